"""Fitted figures of the runtimes whose published runs the accuracy benchmarks price."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from autopar.cost_model.machines.software import Software

SOFTWARE: Mapping[tuple[str, str], Software] = MappingProxyType(
    {
        ("megatron-deepspeed", "a100"): Software(
            "megatron-deepspeed",
            matmul_efficiency=0.767,
            matmul_half_size=0.0,
            memory_efficiency=0.528,
            host_seconds=45.4e-6,
            skew_seconds=26.6e-6,
            source="fitted to half of the groups of vTrain on one node; mean error 6.5 % on the "
            "other half, 10.1 % on several nodes",
        ),
        ("llm-foundry", "a100"): Software(
            "llm-foundry",
            matmul_efficiency=0.82,
            memory_efficiency=0.569,
            attention_efficiency=0.617,
            host_seconds=44.8e-6,
            hides=0.707,
            source="products, attention and overlap fitted to half of the groups of llm-foundry, "
            "the rest that of megatron-deepspeed; median error 6.5 % on the other half"
            "; products anew with their law of shapes, on every second group of model, GPUs and length; median error "
            "2.5 % on the others",
        ),
        ("llm-foundry", "h100"): Software(
            "llm-foundry",
            matmul_efficiency=0.655,
            matmul_half_size=0.0,
            memory_efficiency=0.531,
            attention_efficiency=0.328,
            host_seconds=106e-6,
            hides=0.836,
            source="fitted to half of the groups of llm-foundry; median error 3.7 % on the other half",
        ),
        ("nemo", "h100"): Software(
            "nemo",
            matmul_efficiency=0.72,
            memory_efficiency=0.8,
            attention_efficiency=0.65,
            host_seconds=10e-6,
            hides=0.9,
            hides_activations=0.7,
            runs_ahead=True,
            source="products, attention and hidden activations fitted to half of the groups of "
            "NVIDIA's bfloat16 tables, the rest set by hand; median error 2.0 % on the other half"
            "; products anew with their law of shapes, on every second group of model, GPUs and length; median error "
            "3.1 % on the others",
        ),
        ("nanotron", "h100"): Software(
            "nanotron",
            matmul_efficiency=0.698,
            matmul_half_size=0.0,
            memory_efficiency=0.392,
            attention_efficiency=0.6,
            host_seconds=46.6e-6,
            stall_seconds=194e-6,
            hop_seconds=39.7e-6,
            send_seconds=0.5e-3,
            runs_ahead=True,
            source="fitted to every second (model, GPUs) group of the Ultra-Scale Playbook below 512 "
            "GPUs, but attention (Shah et al. 2024, section 1) and send (set by hand); median error "
            "8.6 % on the other groups",
        ),
    }
)

# Runtime without fitted figures -> the fitted runtime that works most like it.
_ALIKE = {"megatron-lm": "megatron-deepspeed", "apex": "megatron-deepspeed", "torchtitan": "llm-foundry"}


# Share of the datasheet's peak that the best product in bfloat16 reaches: `matmul_tflops.csv`, rows of the MAMF table
# (stas00/ml-engineering at 744d01e), where H200 is said to be as H100. A B200 holds the clock of its best (0.776) for
# no usual shape: 0.57 is as far from what its 267 products reach as the other shares are on their devices.
BEST_PRODUCT = MappingProxyType(
    {"a100": 0.869, "h100": 0.803, "h200": 0.803, "b200": 0.57, "gb200": 0.729, "mi300x": 0.514}
)


def software_for(name: str, device: str) -> Software:
    """The figures of a runtime on a device.

    If they are not known, those of the most similar pair, labelled a guess; products then are as far from the best
    product of this device as they are on the other.
    """
    device = device.split("-")[0]
    if (name, device) in SOFTWARE:
        return SOFTWARE[name, device]
    alike = _ALIKE.get(name, name)
    known = {key: found for key, found in SOFTWARE.items() if key[0] == alike} or SOFTWARE
    key = (alike, device) if (alike, device) in known else next(iter(known))
    source = f"guess: {key[0]} on {key[1]}, nothing known of {name} on {device}"
    found = dataclasses.replace(known[key], name=name, source=source)
    if not {device, key[1]} <= set(BEST_PRODUCT):
        return found
    scaled = found.matmul_efficiency * BEST_PRODUCT[device] / BEST_PRODUCT[key[1]]
    return dataclasses.replace(found, matmul_efficiency=scaled)
