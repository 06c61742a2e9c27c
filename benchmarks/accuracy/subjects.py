"""What a row of a table means: its model, how it was sharded, and on what it ran."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_model import Hardware, find_hardware
from autopar.cost_model.items import TrainingState
from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.cost_model.machines.software import Software
from autopar.errors import AutoparError
from autopar.models import Transformer
from autopar.models.description import Latent
from benchmarks.accuracy.frameworks import FRAMEWORKS, Framework
from benchmarks.accuracy.pricing import CAPTURED_LAYERS, SIGNATURE, Family, Shape, cuts_of
from benchmarks.accuracy.rows import Row, Skip
from benchmarks.accuracy.runtimes import software_for
from benchmarks.accuracy.traits import Traits


@dataclass(frozen=True)
class Subject:
    """A row with all that its price depends on."""

    row: Row
    shape: Shape
    recompute: str
    hardware: Hardware
    software: Software

    @property
    def capacity_bytes(self) -> float:
        return float(self.hardware.memory_bytes)


def subject(row: Row) -> Subject:
    """What a row means. Raises Skip for what is not described."""
    framework = framework_of(row)
    hardware = hardware_of(row, framework.network)
    software = software_for(framework.name, hardware.name)
    if not framework.overlaps:
        software = replace(software, hides=0.0, hides_activations=0.0)
    if row.experts and framework.name == "nemo":
        software = _of_mixtures(row, software)
    vocab = row.vocab or framework.vocab
    if vocab is None:
        raise Skip("no vocabulary")
    if framework.pads_vocab:
        granule = 128 * row.tp
        vocab = -(-vocab // granule) * granule
    chunks = row.chunks or _chunks(row, framework)
    row = replace(row, vocab=vocab, ffn=row.ffn or 4 * row.hidden, chunks=chunks)
    shape = shape_of(row, framework)
    return Subject(row, shape, _recompute(row), _products(row, software.on(hardware)), software)


# Host time of an op of Megatron-DeepSpeed, as fitted: an assumption for mixtures in Megatron-Core, whose routing and
# experts are eager there, too. Its dense layers have so few kernels that they never wait for the host.
EAGER_HOST_SECONDS = 45.4e-6


def _of_mixtures(row: Row, software: Software) -> Software:
    """The figures of a runtime in runs with experts: what they send hides only beside another micro-batch."""
    hides = (software.hides or 0.0) if row.expert_overlap else 0.0
    return replace(software, hides_activations=hides, host_seconds=0.0 if row.graph else EAGER_HOST_SECONDS)


def framework_of(row: Row) -> Framework:
    """The framework a row names."""
    named = f"{row.framework}, {row.source}".lower()
    matching = (f for word, f in FRAMEWORKS.items() if word.lower() in named)
    framework = next(matching, None)
    if framework is None:
        raise Skip(f"framework {row.framework!r} is not described")
    ungated = any(word in row.model.lower() for word in ("gpt", "nemotron4", "nemotron-4"))
    ungated = not row.experts.gated if row.experts else ungated
    if framework.family == "llama" and ungated:
        return replace(framework, family="gpt")
    return framework


def shape_of(row: Row, framework: Framework) -> Shape:
    """The family, and how it is sharded."""
    grouped = row.kv_heads != row.heads
    sizes = {"hidden", "ffn", "vocab", "kv_heads", "head_dim"}
    description = Transformer.from_dimensions(
        framework.family,
        **{name: SIGNATURE[name] for name in sizes},
        layers=3,
        heads=SIGNATURE["kv_heads"] * (SIGNATURE["group"] if grouped else 1),
        max_positions=SIGNATURE["positions"],
        tied=row.tied,
        fused_attention=framework.flash,
        fused_projections=not grouped and row.experts is None,
        dropout=framework.dropout,
        **_mixture(row.experts),
    )
    stage = framework.zero_stage if row.zero_stage is None else row.zero_stage
    if row.trains == "adapters" and stage < 3:
        stage = 0  # what is frozen has no states to share out
    return Shape(
        Family(description, grouped, row.trains),
        stage,
        row.sequence_parallel or (framework.sequence_parallel and row.tp > 1),
        *_kept_by(row, framework),
        row.cp > 1 and row.experts is None,
    )


def _mixture(model: Transformer | None) -> dict[str, Any]:
    """What a description with experts has beside that of a dense model, at the sizes of `SIGNATURE`."""
    if model is None:
        return {}
    shared = SIGNATURE["shared_ffn"] // SIGNATURE["ffn"]
    latent = Latent(**{name: SIGNATURE[name] for name in ("queries", "keys", "rotary")})
    return {
        "experts": SIGNATURE["experts"],
        "experts_per_token": SIGNATURE["per_token"],
        "shared_experts": shared * bool(model.shared_experts),
        "bias": model.bias,
        "norms_heads": model.norms_heads,
        "latent": latent if model.latent else None,
        "dense_layers": CAPTURED_LAYERS * bool(model.dense_layers),
        "dense_ffn": SIGNATURE["dense_ffn"] * bool(model.dense_layers),
    }


def _kept_by(row: Row, framework: Framework) -> tuple[TrainingState, Traits]:
    """The training state and the traits of a framework in a run of this precision."""
    traits = replace(framework.traits, recomputes=row.recomputes, offloaded_layers=row.host_layers)
    if framework.narrow_state is None or not row.is_narrow:
        return framework.training_state, traits
    is_frozen = row.trains == "adapters"
    return framework.narrow_state, replace(traits, narrow_products=True, narrow_frozen=is_frozen)


def hardware_of(row: Row, network: str = "") -> Hardware:
    """The GPU of a row, in nodes and on a network as the row says; a node is what NVLink reaches, which
    is a rack where the GPU's name says so, and not the tray that the row counts. Of racks of 72 that a run does not
    fill, it has 64 each, so that groups of ranks stay within a rack.
    """
    hardware = _named(row.gpu, network)
    rack = hardware.devices_per_node
    if "NVL" not in row.gpu:
        hardware = replace(hardware, devices_per_node=row.gpus_per_node)
    elif row.n_gpus > rack and row.n_gpus % rack:
        hardware = replace(hardware, devices_per_node=2 ** int(math.log2(rack)))
    nic = network_bytes_per_second(row.interconnect, row.gpus_per_node)
    return hardware if nic is None else hardware.with_network(nic)


_MEMORY = re.compile(r"(\d+)\s*(GB|GiB)")


def _named(text: str, network: str) -> Hardware:
    """The GPU of this name; a kind that the catalogue has, but for its memory, has the memory that the name tells."""
    try:
        name = canonical_gpu(text)
        return find_hardware(f"{name}-{network}" if network else name)
    except AutoparError as error:
        chip, told = re.split(r"[\s-]", text)[0], _MEMORY.search(text)
        try:
            usual = find_hardware(canonical_gpu(chip))
        except AutoparError:
            raise Skip(f"GPU {text!r} is not in the catalogue") from error
    if told is None:
        return usual
    return replace(usual, memory_bytes=int(told[1]) * (2**30 if told[2] == "GiB" else 10**9))


def network_bytes_per_second(text: str, gpus_per_node: int) -> float | None:
    """A rank's share of the bandwidth between nodes, where the text tells it in bits."""
    if found := re.search(r"(\d+)\s*x\s*[\w-]+ (\d+)\s*Gb/?p?s per node", text):
        return int(found[1]) * int(found[2]) * 1e9 / 8 / gpus_per_node
    if found := re.search(r"(\d+)\s*Gbps(?:/node| node-node)", text):
        return int(found[1]) * 1e9 / 8 / gpus_per_node
    if found := re.search(r"(\d+)\s*Gb/?p?s per GPU", text):
        return int(found[1]) * 1e9 / 8
    return None


def _chunks(row: Row, framework: Framework) -> int:
    """Chunks of a stage in the middle."""
    if framework.chunk_layers is None:
        raise Skip("interleaved, and the number of chunks is not told")
    return int(cuts_of(row, framework.traits.balances).middle) // framework.chunk_layers


# How much faster the best product in float8 is than the best in bfloat16: `matmul_tflops.csv`, rows of the MAMF table
# (stas00/ml-engineering at 744d01e). Others take the ratio of the datasheet's peaks.
NARROW_GAIN = {"h100": 1402.6 / 794.5, "h200": 1453.4 / 794.5, "b200": 3432.5 / 1745.0, "gb200": 3615.6 / 1822.0}
# Peak of products in NVFP4 and MXFP4, dense: NVIDIA DGX B200 and HGX B300 (72 and 108 PFLOP/s in 8, 144 sparse), GB200
# NVL72 (720 in 72) and GB300 NVL72 (1,080 in 72); AMD Instinct MI350X and MI355X.
FOUR_BIT_FLOPS = {"b200": 9e15, "gb200": 10e15, "b300": 13.5e15, "gb300": 15e15, "mi350x": 9.2e15, "mi355x": 10.1e15}
# Rounding operands takes the rest of that gain. Fitted to half of the groups of NVIDIA's 8-bit runs on H100; median
# error 5.3 % on the other half.
ROUNDED_SHARE = 0.96


def _products(row: Row, hardware: Hardware) -> Hardware:
    """The hardware with products in the format of a row; attention keeps its 16 bits."""
    if row.precision in ("tf32", "fp32"):
        peak = hardware.dtype_flops_per_second({"tf32": "tf32", "fp32": "float32"}[row.precision])
        slower = peak / hardware.flops_per_second(2)
        return replace(hardware, matmul_efficiency=hardware.matmul_efficiency * slower)
    if not row.is_narrow:
        return hardware
    gain = _gain_of_eight_bits(hardware)
    if row.is_four_bit:
        gain *= _gain_of_four_bits(hardware)
    gained = 1 / (row.narrow_share / (ROUNDED_SHARE * gain) + 1 - row.narrow_share)
    return replace(hardware, matmul_efficiency=hardware.matmul_efficiency * gained)


def _gain_of_eight_bits(hardware: Hardware) -> float:
    """How much faster products of 8 bits are than those of 16. MXFP8 has the peak of other formats of 8 bits."""
    if gain := NARROW_GAIN.get(hardware.name.split("-")[0]):
        return gain
    try:
        return hardware.dtype_flops_per_second("float8") / hardware.flops_per_second(2)
    except AutoparError as error:
        raise Skip("no figure for 8-bit products") from error


def _gain_of_four_bits(hardware: Hardware) -> float:
    """How much faster products of 4 bits are than those of 8."""
    name = hardware.name.split("-")[0]
    if name not in FOUR_BIT_FLOPS:
        raise Skip(f"{name} has no figure for 4-bit products")
    return FOUR_BIT_FLOPS[name] / hardware.dtype_flops_per_second("float8")


# Tables whose column `recompute` contradicts their own times. vTrain's single-node rows say full; with
# it, matrix products would run above the peak of the device, and without it the same constants price
# the multi-node rows, which do recompute.
_NOT_RECOMPUTED = ("ground_truth_single.csv",)


def _recompute(row: Row) -> str:
    if any(name in row.source_ref for name in _NOT_RECOMPUTED):
        return "none"
    return "full" if row.recompute.startswith("full") else "none"
