"""What a row of a table means: its model, how it was sharded, and on what it ran."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.cost_model import Hardware, find_hardware
from autopar.cost_model.items import TrainingState
from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.cost_model.machines.software import Software
from autopar.errors import AutoparError
from autopar.models import Transformer
from benchmarks.accuracy.frameworks import FRAMEWORKS, Framework
from benchmarks.accuracy.pricing import SIGNATURE, Family, Shape, cuts_of
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


def framework_of(row: Row) -> Framework:
    """The framework a row names."""
    named = f"{row.framework}, {row.source}".lower()
    matching = (f for word, f in FRAMEWORKS.items() if word.lower() in named)
    framework = next(matching, None)
    if framework is None:
        raise Skip(f"framework {row.framework!r} is not described")
    ungated = any(word in row.model.lower() for word in ("gpt", "nemotron4", "nemotron-4"))
    if framework.family == "llama" and ungated:
        return replace(framework, family="gpt")
    return framework


def shape_of(row: Row, framework: Framework) -> Shape:
    """The family, and how it is sharded."""
    grouped = row.kv_heads != row.heads
    description = Transformer.from_dimensions(
        framework.family,
        hidden=SIGNATURE["hidden"],
        layers=3,
        heads=SIGNATURE["kv_heads"] * (SIGNATURE["group"] if grouped else 1),
        kv_heads=SIGNATURE["kv_heads"],
        head_dim=SIGNATURE["head_dim"],
        ffn=SIGNATURE["ffn"],
        vocab=SIGNATURE["vocab"],
        max_positions=SIGNATURE["positions"],
        tied=row.tied,
        fused_attention=framework.flash,
        fused_projections=not grouped,
        dropout=framework.dropout,
    )
    stage = framework.zero_stage if row.zero_stage is None else row.zero_stage
    return Shape(
        Family(description, grouped),
        stage,
        row.sequence_parallel or (framework.sequence_parallel and row.tp > 1),
        *_kept_by(row, framework),
        row.recomputes_ops,
    )


def _kept_by(row: Row, framework: Framework) -> tuple[TrainingState, Traits]:
    """The training state and the traits of a framework in a run of this precision."""
    if framework.narrow_state is None or not row.is_narrow:
        return framework.training_state, framework.traits
    return framework.narrow_state, replace(framework.traits, narrow_products=True)


def hardware_of(row: Row, network: str = "") -> Hardware:
    """The GPU of a row, in nodes and on a network as the row says; a node is what NVLink reaches, which
    is a whole rack where the GPU's name says so, and not the tray that the row counts.
    """
    try:
        name = canonical_gpu(row.gpu)
        hardware = find_hardware(f"{name}-{network}" if network else name)
    except AutoparError as error:
        raise Skip(f"GPU {row.gpu!r} is not in the catalogue") from error
    if "NVL" not in row.gpu:
        hardware = replace(hardware, devices_per_node=row.gpus_per_node)
    nic = network_bytes_per_second(row.interconnect, row.gpus_per_node)
    return hardware if nic is None else hardware.with_network(nic)


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
# Rounding operands takes the rest of that gain. Fitted to half of the groups of NVIDIA's 8-bit runs on H100; median
# error 5.3 % on the other half.
ROUNDED_SHARE = 0.96


def _products(row: Row, hardware: Hardware) -> Hardware:
    """The hardware with products of 8 bits where a row has them; attention keeps its 16."""
    precision = row.precision.lower()
    if any(word in precision for word in ("fp4", "mx")):
        raise Skip("4-bit or block-scaled products")
    if not row.is_narrow:
        return hardware
    gain = NARROW_GAIN.get(hardware.name.split("-")[0])
    if gain is None:
        try:
            gain = hardware.dtype_flops_per_second("float8") / hardware.flops_per_second(2)
        except AutoparError as error:
            raise Skip("no figure for 8-bit products") from error
    gained = ROUNDED_SHARE * gain
    return replace(hardware, matmul_efficiency=hardware.matmul_efficiency * gained)


# Tables whose column `recompute` contradicts their own times. vTrain's single-node rows say full; with
# it, matrix products would run above the peak of the device, and without it the same constants price
# the multi-node rows, which do recompute.
_NOT_RECOMPUTED = ("ground_truth_single.csv",)


def _recompute(row: Row) -> str:
    if any(name in row.source_ref for name in _NOT_RECOMPUTED):
        return "none"
    return "full" if row.recompute.startswith("full") else "none"
