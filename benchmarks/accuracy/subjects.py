"""What a row of a table means: its model, how it was sharded, and on what it ran."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.cost_model import Hardware, find_hardware
from autopar.cost_model.collectives import BUCKET_BYTES
from autopar.cost_model.gpu_names import canonical_gpu
from autopar.cost_model.items import (
    MIXED,
    MIXED_BOTH_GRADIENTS,
    MIXED_FLOAT32_GRADIENTS,
    TrainingState,
)
from autopar.cost_model.optimizers import OptimizerFormat, StateFormat
from autopar.cost_model.software import Software
from autopar.errors import AutoparError
from autopar.models import Transformer
from benchmarks.accuracy.pricing import SIGNATURE, Family, Shape, cuts_of
from benchmarks.accuracy.rows import Row, Skip
from benchmarks.accuracy.runtimes import software_for

# PyTorch FSDP and autocast: parameters in float32, cast to bfloat16 where they are used; the
# captured graph has them in bfloat16, so float32 masters stand for the stored ones.
AUTOCAST = TrainingState(
    gradient_bytes=4,
    master_bytes=2,
    optimizer=OptimizerFormat("adamw", (StateFormat(element_bytes=4),) * 2),
)


@dataclass(frozen=True)
class Framework:
    """What a table leaves unsaid about the code that ran it.

    Attributes:
        name: its name in the catalogue of fitted software.
        family: family of models, a key of `autopar.models.FAMILIES`.
        training_state: bytes that training keeps in addition to parameters.
        zero_stage: stage of ZeRO where a row has none.
        pads_vocab: whether it pads the vocabulary to a multiple of 128 times tp (Megatron-LM).
        flash: whether attention keeps no weights.
        dropout: share of activations and attention weights that is dropped.
        vocab: size of the vocabulary where a row has none.
        chunk_layers: layers of a chunk of an interleaved schedule, where a row does not tell chunks.
        balances, fused, regathers, bucket_bytes, scatters, accumulates_in_products, repeats_layers: see
            `Shape`.
        sequence_parallel: whether tensor parallelism always comes with sequence parallelism, whatever a row says.
        network: network of the cluster where a row names none: a suffix in the catalogue of hardware.
    """

    name: str
    family: str
    training_state: TrainingState
    zero_stage: int = 0
    pads_vocab: bool = False
    flash: bool = True
    dropout: float = 0.0
    vocab: int | None = None
    chunk_layers: int | None = None
    balances: bool = False
    fused: bool = False
    regathers: bool = False
    bucket_bytes: float = BUCKET_BYTES
    scatters: bool = False
    accumulates_in_products: bool = False
    repeats_layers: bool = False
    network: str = ""
    sequence_parallel: bool = False


# By the first word of `framework` that matches.
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        "nanotron": Framework(
            "nanotron",
            "llama",
            MIXED_BOTH_GRADIENTS,
            balances=True,
            regathers=True,
            bucket_bytes=256e6,
            network="efa",
        ),
        "Megatron-DeepSpeed": Framework(
            "megatron-deepspeed",
            "gpt",
            MIXED,
            pads_vocab=True,
            flash=False,
            scatters=True,
            repeats_layers=True,
        ),
        "llm-foundry": Framework("llm-foundry", "llm-foundry", AUTOCAST, zero_stage=3),
        "torchtitan": Framework("torchtitan", "llama", AUTOCAST, zero_stage=3),
        "PyTorch DDP": Framework("apex", "bert", MIXED, flash=False),
        "AutoModel": Framework("torchtitan", "llama", AUTOCAST, zero_stage=3),
        # Qi et al. 2023, section 5.1: every layer is a chunk. The vocabulary is that of the tokenizer of
        # their example, and what the printed numbers of parameters leave for an embedding; dropout and
        # gradients added by the products themselves are defaults of Megatron-LM.
        "Megatron-LM (zero": Framework(
            "megatron-lm",
            "gpt",
            MIXED_FLOAT32_GRADIENTS,
            pads_vocab=True,
            flash=False,
            dropout=0.1,
            vocab=32000,
            chunk_layers=1,
            accumulates_in_products=True,
            repeats_layers=True,
        ),
        "Megatron-LM": Framework(
            "megatron-lm",
            "gpt",
            MIXED,
            pads_vocab=True,
            flash=False,
            scatters=True,
            repeats_layers=True,
        ),
        "NeMo": Framework(
            "nemo",
            "llama",
            MIXED_FLOAT32_GRADIENTS,
            1,
            pads_vocab=True,
            fused=True,
            sequence_parallel=True,
            repeats_layers=True,
        ),
        "Megatron-Core": Framework(
            "nemo",
            "llama",
            MIXED_FLOAT32_GRADIENTS,
            1,
            pads_vocab=True,
            fused=True,
            sequence_parallel=True,
            repeats_layers=True,
        ),
    }
)


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
    matching = (f for word, f in FRAMEWORKS.items() if word.lower() in row.framework.lower())
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
        framework.family, hidden=SIGNATURE["hidden"], layers=3,
        heads=SIGNATURE["kv_heads"] * (SIGNATURE["group"] if grouped else 1),
        kv_heads=SIGNATURE["kv_heads"], head_dim=SIGNATURE["head_dim"], ffn=SIGNATURE["ffn"],
        vocab=SIGNATURE["vocab"], max_positions=SIGNATURE["positions"], tied=row.tied,
        fused_attention=framework.flash, fused_projections=not grouped, dropout=framework.dropout,
    )  # fmt: skip
    stage = framework.zero_stage if row.zero_stage is None else row.zero_stage
    return Shape(
        Family(description, grouped), stage,
        row.sequence_parallel or (framework.sequence_parallel and row.tp > 1), framework.training_state,
        framework.balances, framework.fused, framework.regathers, framework.bucket_bytes,
        framework.scatters, framework.accumulates_in_products, framework.repeats_layers,
    )  # fmt: skip


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
    return int(cuts_of(row, framework.balances).middle) // framework.chunk_layers


def _products(row: Row, hardware: Hardware) -> Hardware:
    """The hardware with products of 8 bits where a row has them; attention keeps its 16."""
    precision = row.precision.lower()
    if any(word in precision for word in ("fp4", "mx")):
        raise Skip("4-bit or block-scaled products")
    if "fp8" not in precision and "float8" not in precision:
        return hardware
    try:
        gain = hardware.dtype_flops_per_second("float8") / hardware.flops_per_second(2)
    except AutoparError as error:
        raise Skip("no figure for 8-bit products") from error
    return replace(hardware, matmul_efficiency=hardware.matmul_efficiency * gain)


# Tables whose column `recompute` contradicts their own times. vTrain's single-node rows say full; with
# it, matrix products would run above the peak of the device, and without it the same constants price
# the multi-node rows, which do recompute.
_NOT_RECOMPUTED = ("ground_truth_single.csv",)


def _recompute(row: Row) -> str:
    if any(name in row.source_ref for name in _NOT_RECOMPUTED):
        return "none"
    return "full" if row.recompute.startswith("full") else "none"
