"""Rows of published measurements, read from CSV files of one form."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.models import Transformer
from autopar.models.description import LLAMA
from benchmarks.accuracy.named_models import has_state_spaces, mixture, named_model, recipe, sizes_of
from benchmarks.accuracy.traits import EVERY_SECOND_PRODUCT

NEEDED = ("model", "seq_len", "gpu", "n_gpus", "framework")


_NARROW_LAYERS = re.compile(r"layers 0-(\d+)")


class Skip(Exception):
    """A row that cannot be priced; the message is the reason, and is counted."""


@dataclass(frozen=True)
class Row:
    """One run, in SI units.

    Attributes are the columns of the file; what a table leaves out has the neutral value, or None.
    `chunks` is 0 for an interleaved schedule whose chunks are not told. Ranks of context parallelism (`cp`) and of
    expert parallelism (`ep`) are counted in `dp`; those of the latter may be ranks of `tp`, too. `experts` is the model
    that has them, of which `ffn` is not that of an expert. `host_layers`, `expert_overlap` and `graph` are what
    `named_models.RECIPES` tells. `trains` is "all", or "adapters" beside frozen weights.
    `assumed` is what the row leaves out, and its price takes for it.
    """

    row_id: str
    source: str
    source_ref: str
    model: str
    params: float | None
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int | None
    vocab: int | None
    tied: bool | None
    seq: int
    gpu: str
    n_gpus: int
    gpus_per_node: int
    interconnect: str
    framework: str
    dp: int
    cp: int
    tp: int
    pp: int
    chunks: int
    sequence_parallel: bool
    zero_stage: int | None
    micro_batch: float
    grad_accum: int
    precision: str
    recompute: str
    schedule: str
    step_seconds: float | None
    memory_bytes: float | None
    memory_kind: str
    failed: bool
    suspect: bool
    ep: int = 1
    experts: Transformer | None = None
    trains: str = "all"
    host_layers: int = 0
    expert_overlap: bool = False
    graph: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def splits_experts(self) -> bool:
        """Whether tensor parallelism splits every expert, which is Megatron-Core's `expert_tensor_parallel_size`.

        NVIDIA's recipes keep this default for a few large experts (Grok, Mixtral), and turn it off for many small ones.
        """
        return self.experts is not None and self.experts.experts <= 8

    @property
    def is_narrow(self) -> bool:
        """Whether products are of 8 or of 4 bits."""
        return self.hides_format or any(word in self.precision.lower() for word in ("fp8", "float8", "fp4"))

    @property
    def is_four_bit(self) -> bool:
        """Whether products are of 4 bits."""
        return "fp4" in self.precision.lower()

    @property
    def narrow_share(self) -> float:
        """Share of the products that are of the format that a row tells; it may name the layers, from the first."""
        told = _NARROW_LAYERS.search(self.precision)
        return (int(told[1]) + 1) / self.layers if told else 1.0

    @property
    def hides_format(self) -> bool:
        """Whether a submission to MLPerf tells no format; in these rounds it is FP8, or FP4, wherever it is told."""
        return not self.precision and self.source.startswith("MLPerf Training")

    @property
    def recomputes(self) -> tuple[str, ...]:
        """Modules whose results are recomputed, or torchtitan's policy by op, its usual one where a row tells none."""
        if self.recompute.startswith("modules"):
            return tuple(self.recompute.split()[1:])
        is_selective = self.recompute.startswith("selective") or not self.recompute
        is_titan = "torchtitan" in self.framework.lower() and "layer" not in self.recompute
        return (EVERY_SECOND_PRODUCT,) if is_selective and is_titan else ()

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """What the price of the row takes in place of what ran."""
        is_selective = self.recompute.startswith("selective") and not self.recomputes
        replaced = {
            "context parallelism as data parallelism": self.cp > 1 and self.experts is not None,
            "selective recomputation as none": is_selective,
            "a format that is not told as FP8": self.hides_format,
            "activations that lie on the host as moved for nothing": self.host_layers > 0,
        }
        return (*(name for name, is_replaced in replaced.items() if is_replaced), *self.assumed)

    @property
    def group(self) -> tuple[object, ...]:
        """What runs compete: one model on one number of GPUs, at one batch and sequence length."""
        return (
            self.model,
            self.hidden,
            self.layers,
            self.seq,
            self.gpu,
            self.n_gpus,
            self.framework,
            self.precision,
            self.trains,
            self.micro_batch * self.grad_accum * self.dp,
        )


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file. Raises AutoparError naming the columns that are missing."""
    with path.open(newline="") as file:
        reader = csv.DictReader(_without_comments(file))
        missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise AutoparError(
                f"{path.name} lacks the columns {', '.join(missing)}; it has "
                f"{', '.join(reader.fieldnames or ['none'])}."
            )
        return list(reader)


def _without_comments(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if not line.startswith("#"))


def is_training_table(path: Path) -> bool:
    """Whether a file has runs of models, rather than of collectives or single kernels."""
    with path.open(newline="") as file:
        header = next(csv.reader(_without_comments(file)), [])
    return "model" in header or "layers" in header


def parse(fields: Mapping[str, str]) -> Row:
    """One row. Raises Skip with the reason where what a price needs is not given."""
    text = {name: (value or "").strip() for name, value in fields.items()}
    if has_state_spaces(text["model"]):
        raise Skip("layers with a state space (Mamba), which none of our models has")
    text, assumed = _completed(text)
    dims = {name: _whole(text, name) for name in ("hidden", "layers", "heads", "seq_len", "n_gpus")}
    missing = [name for name, value in dims.items() if value is None]
    if missing:
        raise Skip(f"no {', '.join(missing)}")
    hidden, layers, heads, seq, n_gpus = (int(value or 0) for value in dims.values())
    tp, pp, cp = (_whole(text, name) or 1 for name in ("tp", "pp", "cp"))
    if pp > layers and n_gpus % pp:
        pp = 1
        assumed.append("more stages than layers as one")
    dp = _degree(text, n_gpus, tp * pp * cp)
    batch = _batch(text, dp * cp, seq, n_gpus)
    if batch and batch < dp and dp % batch == 0 and not _whole(text, "cp"):
        dp, cp = batch, dp // batch
        assumed.append("a layout that is not told as context parallelism")
    micro_batch, grad_accum = _batches(text, batch, dp, assumed)
    tokens = micro_batch * grad_accum * dp * seq
    return Row(
        row_id=text.get("row_id", ""),
        source=text.get("source", ""),
        source_ref=text.get("source_ref", ""),
        model=text["model"],
        params=_number(text, "params"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_whole(text, "kv_heads") or heads,
        ffn=_whole(text, "ffn"),
        vocab=_whole(text, "vocab"),
        tied=_yes(text.get("tied_embeddings", "")),
        seq=seq,
        gpu=text["gpu"],
        n_gpus=n_gpus,
        gpus_per_node=_whole(text, "gpus_per_node") or 8,
        interconnect=text.get("interconnect", ""),
        framework=text["framework"],
        dp=dp * cp,
        cp=cp,
        tp=tp,
        pp=pp,
        chunks=_chunks(text.get("vpp", "")),
        sequence_parallel=_yes(text.get("sp", "")) is True,
        zero_stage=_stage(text.get("zero_stage", "")),
        micro_batch=micro_batch / cp,
        grad_accum=grad_accum,
        precision=text.get("precision", ""),
        recompute=text.get("recompute", ""),
        schedule=text.get("schedule", ""),
        step_seconds=_seconds(text, tokens, n_gpus),
        memory_bytes=_memory(text),
        memory_kind=text.get("memory_kind", ""),
        failed=_failed(text.get("status", "")),
        suspect=_suspect(text.get("status", "")),
        ep=_whole(text, "ep") or 1,
        experts=_experts(text, hidden, layers, heads),
        trains="adapters" if "lora" in f"{text['model']} {text.get('notes', '')}".lower() else "all",
        host_layers=_whole(text, "host_layers") or 0,
        expert_overlap=_yes(text.get("expert_overlap", "")) is True,
        graph=_yes(text.get("graph", "")) is True,
        assumed=tuple(assumed),
    )


def _completed(text: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The columns with what the names of the model and the run tell, and what is assumed for others."""
    found, assumed = {**text, **recipe(text)}, list[str]()
    if known := named_model(text["model"]):
        found |= {name: value for name, value in sizes_of(known) if not text.get(name)}
        if "modalities" in text["model"].lower():
            assumed.append("sizes that are not told as those of GPT-3")
    hidden = _whole(found, "hidden")
    if hidden and not _whole(found, "heads"):
        found["heads"] = str(hidden // 128)
        assumed.append("heads that are not told as of 128 numbers")
    return found, assumed


_DENSE = re.compile(r"(\d+) dense layer")


def _experts(text: Mapping[str, str], hidden: int, layers: int, heads: int) -> Transformer | None:
    """The model with experts that a row is of; None for a dense one."""
    known, pair = named_model(text["model"]), mixture(text["model"])
    if known is not None and known.experts:
        told = _DENSE.search(text.get("notes", ""))
        dense = int(told[1]) if told else known.dense_layers
        return replace(known, layers=layers - dense, dense_layers=dense)
    if pair is not None:
        sizes: dict[str, Any] = {name: _whole(text, name) or 0 for name in ("kv_heads", "ffn", "vocab")}
        count, visited = pair
        made: dict[str, Any] = {
            "hidden": hidden,
            "layers": layers,
            "heads": heads,
            "experts": count,
            "experts_per_token": visited,
        }
        return Transformer(max_positions=8192, **made, **sizes, **LLAMA)
    if (_whole(text, "ep") or 1) > 1 or "moe" in text["model"].lower():
        raise Skip("mixture of experts whose sizes are not known")
    return None


def _degree(text: Mapping[str, str], n_gpus: int, others: int) -> int:
    if n_gpus % others:
        raise Skip("tensor and pipeline parallelism do not divide the GPUs")
    dp = _whole(text, "dp") or n_gpus // others
    return dp if dp * others == n_gpus else n_gpus // others


def _batch(text: Mapping[str, str], ranks: int, seq: int, n_gpus: int) -> int | None:
    """Sequences of a step: as told, or what rate and time of a step make of whole sequences for all ranks."""
    rate, seconds = _number(text, "tokens_per_s_per_gpu"), _number(text, "step_time_s")
    total, micro = _whole(text, "global_batch"), _whole(text, "micro_batch")
    if total or not (rate and seconds and micro):
        return total
    each = micro * ranks
    return each * max(1, round(rate * seconds * n_gpus / seq / each))


def _batches(text: Mapping[str, str], total: int | None, dp: int, assumed: list[str]) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches of a step."""
    micro, accumulated = _whole(text, "micro_batch"), _whole(text, "grad_accum")
    if total and micro and total % (micro * dp) == 0:
        return micro, total // (micro * dp)
    if micro and accumulated:
        return micro, accumulated
    if total and accumulated and total % (accumulated * dp) == 0:
        return total // (accumulated * dp), accumulated
    if total and not micro and total % dp == 0:
        assumed.append("a micro-batch that is not told as 1")
        return 1, total // dp
    raise Skip("no batch size" if not total else "its ranks cannot share its batch")


def _seconds(text: Mapping[str, str], tokens: int, n_gpus: int) -> float | None:
    if (seconds := _number(text, "step_time_s")) is not None:
        return seconds
    if rate := _number(text, "tokens_per_s_per_gpu"):
        return tokens / (rate * n_gpus)
    return None


def _memory(text: Mapping[str, str]) -> float | None:
    found = _number(text, "peak_memory_gib")
    return None if found is None else found * 2**30


def _chunks(text: str) -> int:
    return 0 if text.startswith("yes") else _whole({"vpp": text}, "vpp") or 1


def _stage(text: str) -> int | None:
    return int(text[0]) if text[:1].isdigit() else None


def _failed(status: str) -> bool:
    return any(word in status.lower() for word in ("oom", "failed (", "crashed"))


def _suspect(status: str) -> bool:
    return any(word in status.lower() for word in ("suspect", "low confidence", "plotted as failed"))


def _yes(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text.lower())


def _number(text: Mapping[str, str], name: str) -> float | None:
    try:
        return float(text.get(name, ""))
    except ValueError:
        return None


def _whole(text: Mapping[str, str], name: str) -> int | None:
    found = _number(text, name)
    return None if found is None or found <= 0 else round(found)


def rows(path: Path) -> Iterator[Row | Skip]:
    """Every row of a file, or why it is skipped."""
    for fields in read(path):
        try:
            yield parse(fields)
        except Skip as reason:
            yield reason
        except (ValueError, ArithmeticError, AttributeError, KeyError) as error:
            yield Skip(f"cannot be read: {type(error).__name__}")
