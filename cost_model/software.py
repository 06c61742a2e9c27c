"""The efficiency that one training framework reaches on one kind of device, as a few fitted figures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.cost_model.catalogue import find_hardware
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.hardware import Hardware, Source


@dataclass(frozen=True)
class Software:
    """Figures of one runtime (training framework) on one kind of device; None keeps the hardware's own figure.

    Attributes:
        name: name of the runtime.
        matmul_efficiency: fraction of the peak that its large matrix products reach.
        memory_efficiency: fraction of the memory bandwidth that its element-wise kernels reach.
        attention_efficiency: fraction of the peak that fused attention reaches; masked scores count as work.
        host_seconds: time of the CPU to issue one op, Python included.
        network_efficiency: fraction of the bandwidth between nodes that collectives reach.
        hides: fraction, 0 to 1, of the communication of parameters and gradients that overlaps with compute, up to the
            duration of the compute.
        hides_activations: the same fraction for activations, which some runtimes send piece by piece while they
            compute.
        skew_seconds: time that a collective of activations waits for its slowest rank, for each rank beyond the first.
        stall_seconds: time that a collective of activations waits, per rank, where messages between pipeline stages
            cross nodes; it grows with the square root of the number of nodes that the group spans.
        hop_seconds: duration of a step of a ring between nodes; None for the network's own latency.
        send_seconds: time of a message between stages in different nodes, on top of its transfer.
        runs_ahead: whether the host issues kernels well ahead of the device, so that a region takes the larger of the
            two sums; otherwise every op waits for its own launch.
        step_seconds: fixed time per step: logging, the data loader, the optimizer's launches.
        source: source of the figures.
    """

    name: str = "autopar"
    matmul_efficiency: float | None = None
    memory_efficiency: float | None = None
    attention_efficiency: float | None = None
    host_seconds: float | None = None
    network_efficiency: float = 1.0
    hides: float | None = None
    hides_activations: float = 0.0
    skew_seconds: float = 0.0
    stall_seconds: float = 0.0
    hop_seconds: float | None = None
    send_seconds: float = 0.0
    runs_ahead: bool = False
    step_seconds: float = 0.0
    source: str = "guess"

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware with this runtime's figures in place of its own."""
        own = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
        nic = hardware.across_nodes.bandwidth_bytes_per_second * self.network_efficiency
        return dataclasses.replace(hardware, **own).with_network(nic, self.hop_seconds)


# Figures of a device that a runtime may have of its own.
_OWN = ("matmul_efficiency", "memory_efficiency", "attention_efficiency", "host_seconds", "hides")

AUTOPAR = Software()

SOFTWARE: Mapping[tuple[str, str], Software] = MappingProxyType(
    {
        ("megatron-deepspeed", "a100"): Software(
            "megatron-deepspeed",
            matmul_efficiency=0.767,
            memory_efficiency=0.528,
            host_seconds=45.4e-6,
            skew_seconds=26.6e-6,
            source="fitted to half of the groups of vTrain on one node; mean error 6.5 % on the "
            "other half, 10.1 % on several nodes",
        ),
        ("llm-foundry", "a100"): Software(
            "llm-foundry",
            matmul_efficiency=0.695,
            memory_efficiency=0.569,
            attention_efficiency=0.617,
            host_seconds=44.8e-6,
            hides=0.707,
            source="products, attention and overlap fitted to half of the groups of llm-foundry, "
            "the rest that of megatron-deepspeed; median error 6.5 % on the other half",
        ),
        ("llm-foundry", "h100"): Software(
            "llm-foundry",
            matmul_efficiency=0.655,
            memory_efficiency=0.531,
            attention_efficiency=0.328,
            host_seconds=106e-6,
            hides=0.836,
            source="fitted to half of the groups of llm-foundry; median error 3.7 % on the other half",
        ),
        ("nemo", "h100"): Software(
            "nemo",
            matmul_efficiency=0.9,
            memory_efficiency=0.8,
            attention_efficiency=0.503,
            host_seconds=10e-6,
            hides=0.9,
            hides_activations=0.178,
            runs_ahead=True,
            source="products, attention and hidden activations fitted to half of the groups of "
            "NVIDIA's bfloat16 tables (products end at the bound of the fit), the rest set by hand; "
            "median error 2.1 % on the other half",
        ),
        ("nanotron", "h100"): Software(
            "nanotron",
            matmul_efficiency=0.698,
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
_ALIKE = {
    "megatron-lm": "megatron-deepspeed",
    "apex": "megatron-deepspeed",
    "torchtitan": "llm-foundry",
}


def software_for(name: str, device: str) -> Software:
    """The figures of a runtime on a device. If they are not known, those of the most similar pair, labelled a guess."""
    device = device.split("-")[0]
    if (name, device) in SOFTWARE:
        return SOFTWARE[name, device]
    alike = _ALIKE.get(name, name)
    known = {key: found for key, found in SOFTWARE.items() if key[0] == alike} or SOFTWARE
    key = (alike, device) if (alike, device) in known else next(iter(known))
    source = f"guess: {key[0]} on {key[1]}, nothing known of {name} on {device}"
    return dataclasses.replace(known[key], name=name, source=source)


# Guesses of what eager PyTorch reaches on a GPU without measurements: about the middle of the runtimes above. Of
# autopar's own messages 0.82 to 0.87 hide on Gloo behind a slow link (docs/benchmarks.md); NCCL was never measured.
_EAGER = {
    "memory_efficiency": 0.55, "attention_efficiency": 0.5, "host_seconds": 45e-6, "hides": 0.8,
}  # fmt: skip
_EAGER_SOURCE = Source("guess", "as eager runtimes fitted to published runs")


def as_eager_runs(hardware: Hardware) -> Hardware:
    """The hardware with guesses of eager PyTorch's efficiency where its file does not give it.

    A file that `autopar calibrate` wrote has measured figures, which stay as they are.
    """
    stated = {figure for figure, _ in hardware.sources}
    missing: dict[str, Any] = {n: value for n, value in _EAGER.items() if n not in stated}
    sources = tuple((name, _EAGER_SOURCE) for name in missing)
    return dataclasses.replace(hardware, sources=(*hardware.sources, *sources), **missing)


def named_hardware(hardware: Hardware | str | os.PathLike[str]) -> Hardware:
    """The hardware that a person names for autopar's own runtime: that of a file with the guesses of `as_eager_runs`.

    Args:
        hardware: a name in the catalogue, the path of a TOML file, or the hardware itself, which is taken as it is.
    """
    return hardware if isinstance(hardware, Hardware) else as_eager_runs(find_hardware(hardware))


def with_eager_runs(cluster: Cluster) -> Cluster:
    """The cluster with the guesses of `as_eager_runs` for its hardware."""
    return dataclasses.replace(cluster, hardware=as_eager_runs(cluster.hardware))
