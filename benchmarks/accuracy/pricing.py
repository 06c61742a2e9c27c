"""Prices rows of published runs: one captured graph per family of models, one set of expressions per
way to shard it, and from there only numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import sympy
import torch

from autopar.cost_model import Hardware, find_hardware
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.cuts import Cuts, equal_cuts
from autopar.cost_model.items import COMPUTE, TrainingState, WorkItem
from autopar.cost_model.machines.software import Software
from autopar.cost_model.steps.run import Run, total
from autopar.cost_model.steps.step import Step
from autopar.cost_model.symbols import Expressions, link_of, link_symbols, link_values, machine_values, symbol
from autopar.ir import Graph, Mesh, Plan, Stack
from autopar.models import Transformer, build, example_inputs
from autopar.models.description import Latent, repeated_layers
from autopar.planning.planning import prepare_step
from autopar.search import search
from benchmarks.accuracy.adapters import RANK, with_adapters
from benchmarks.accuracy.rows import Row, Skip
from benchmarks.accuracy.simulated import CLOSED, Simulated
from benchmarks.accuracy.traits import USUAL, Traits, applied, data_ranks, recomputed

CAPTURED_LAYERS = 3
# Every size that a symbol stands for differs from all others, so that it tells which factor is which. Products of
# groups take widths of a multiple of 8.
SIGNATURE = {
    "batch": 12,
    "seq": 24,
    "hidden": 8 * 11,
    "kv_heads": 6,
    "group": 7,
    "head_dim": 18,
    "ffn": 8 * 13,
    "vocab": 68,
    "positions": 26,
    "experts": 44,
    "per_token": 5,
    "shared_ffn": 3 * 8 * 13,
    "queries": 92,
    "keys": 148,
    "rotary": 46,
    "dense_ffn": 124,
}
# Sizes that follow from these: halves of what turns with the position, and widths in eights.
PARTS = {"head_dim": 2, "rotary": 2, "hidden": 8, "ffn": 8}
# Factors that are no size of the model: query, key and value; real and imaginary; gate and up; eight numbers of a
# group's product; the rank of an adapter.
CONSTANTS = (2, 3, 8, RANK)


@dataclass(frozen=True)
class Family:
    """Models that differ in their sizes alone.

    Attributes:
        description: at the sizes of `SIGNATURE`.
        grouped: whether several query heads share a key head.
        trains: "all", or "adapters" of frozen layers.
    """

    description: Transformer
    grouped: bool
    trains: str = "all"


@dataclass(frozen=True)
class Shape:
    """The properties of a run, other than numbers, that its expressions depend on.

    Attributes:
        family: family of models.
        zero_stage: stage of ZeRO, 0 to 3.
        sequence_parallel: whether tensor-parallel ranks split the sequence between their regions.
        training_state: bytes that training keeps for each parameter.
        traits: habits of the runtime.
        ring: whether ranks share sequences out (context parallelism).
    """

    family: Family
    zero_stage: int
    sequence_parallel: bool
    training_state: TrainingState
    traits: Traits = USUAL
    ring: bool = False

    @property
    def recipes(self) -> dict[str, str]:
        """The recipe of every mesh axis, in the order of the mesh."""
        routed = self.family.description.experts > 0
        data = ("ddp", "zero1", "zero2", "zero3")[self.zero_stage]
        found = {"dp": data} | ({"cp": "cp"} if self.ring else {})
        if routed:
            found["ep"] = ("ep", "ep+zero1", "ep+zero1", "ep+zero3")[self.zero_stage]
        return found | {"tp": "tp+ep" if routed else "tp+sp" if self.sequence_parallel else "tp"}


@functools.lru_cache(maxsize=64)
def graph_of(family: Family) -> Graph:
    """The captured step of a family."""
    with torch.device("meta"):
        model = build(family.description, layers=CAPTURED_LAYERS)
        if family.trains == "adapters":
            model = with_adapters(model)
    inputs = example_inputs(family.description, SIGNATURE["batch"], SIGNATURE["seq"])
    graph = prepare_step(model, inputs).analysis.graph
    stacks = repeated_layers(family.description)
    return replace(graph, stacks=tuple(Stack(path, CAPTURED_LAYERS, CAPTURED_LAYERS) for path in stacks))


@functools.lru_cache(maxsize=64)
def expressions_of(shape: Shape) -> Expressions:
    """Items and holdings of a plan that follows the usual recipes, over symbols."""
    hardware = find_hardware("h100")  # every figure is a symbol, and replaced
    graph = graph_of(shape.family)
    recipes = shape.recipes
    plan: Plan = search(graph, dict.fromkeys(recipes, 2), hardware=hardware, recipe=recipes, memory_bytes=10**18)
    traits = shape.traits
    found = Expressions.of(
        graph,
        plan,
        hardware,
        factors=_names(graph),
        training_state=shape.training_state,
        fused=traits.fused,
        regathers=traits.regathers,
        bucket_bytes=traits.bucket(),
        selected=recomputed(graph, plan, traits),
    )
    return applied(_vocabulary_parallel(found), traits)


def _vocabulary_parallel(expressions: Expressions) -> Expressions:
    """The same with the loss computed where the logits are, each rank on its share of the vocabulary.

    Our own graphs gather the logits, because the loss is one op; Megatron-LM and nanotron take it
    apart (Shoeybi et al. 2019, section 3), for three all-reduces of a number per token.
    """
    parts = symbol("tp")
    gathered = ("all_gather of head linear", "shard of head linear", "all_gather of  reshape")
    items = [
        replace(i, seconds=i.seconds / parts, traffic_bytes=i.traffic_bytes / parts)
        if i.resource == COMPUTE and i.region == "after" and i.kind in _LOSS
        else i
        for i in expressions.items
        if i.name not in gathered
    ]
    tokens = 4 * symbol("batch") * symbol("seq") / data_ranks()
    sums = collective_seconds(
        "all_reduce",
        before_bytes=tokens,
        after_bytes=tokens,
        ranks=parts,
        link=link_symbols(["tp"])[0],
        hardware=expressions.machine,
    )
    items.append(
        WorkItem(
            "all_reduce of the loss",
            "all_reduce",
            "tp",
            "forward",
            "after",
            3,
            sums,
            tokens,
            carries="activation",
            ranks=parts,
        )
    )
    holdings = tuple(
        replace(h, bytes=h.bytes / parts) if h.name.endswith("cross_entropy_loss") else h for h in expressions.holdings
    )
    return replace(expressions, items=tuple(items), holdings=holdings)


_LOSS = ("aten._to_copy", "aten.cross_entropy_loss")


def _names(graph: Graph) -> dict[str, sympy.Expr]:
    by_size: dict[int, sympy.Expr] = {SIGNATURE[name] // parts: symbol(name) / parts for name, parts in PARTS.items()}
    by_size[SIGNATURE["head_dim"] + SIGNATURE["rotary"]] = symbol("head_dim") + symbol("rotary")
    by_size |= {size: symbol(name) for name, size in SIGNATURE.items()}
    named = {f.name: by_size[f.size] for f in graph.factors.values() if f.size in by_size}
    unknown = {f.name: f.size for f in graph.factors.values() if f.name not in named and f.size not in CONSTANTS}
    assert not unknown, f"factors whose size no symbol has: {unknown}"
    return named


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and bytes of a rank on the first stage and on the fullest."""

    seconds: float
    first_bytes: float
    worst_bytes: float


def price_rows(
    rows: Sequence[Row],
    shape: Shape,
    recompute: str,
    hardware: Hardware,
    software: Software,
    *,
    simulates: bool = False,
) -> list[Prediction]:
    """Prices rows that share a shape, all at once.

    Pipelines whose schedule has no closed form are run action by action; all are, where it `simulates`.
    """
    step = step_of(rows, shape, recompute, hardware, software)
    seconds = np.array(np.broadcast_to(step.seconds(), len(rows)), dtype=float)
    simulated = Simulated(step, rows)
    for i, row in enumerate(rows):
        if row.pp > 1 and (simulates or row.schedule.upper() not in CLOSED):
            seconds[i] = simulated.seconds(i)
    peaks = (total(step.memory("first")), step.peak_bytes())
    first, worst = (np.broadcast_to(peak, len(rows)) for peak in peaks)
    return [Prediction(*map(float, each)) for each in zip(seconds, first, worst, strict=True)]


def step_of(rows: Sequence[Row], shape: Shape, recompute: str, hardware: Hardware, software: Software) -> Step:
    """The priced steps of rows that share a shape, with an array over the rows for every figure."""
    expressions = expressions_of(shape)
    cuts = Cuts(*np.array([cuts_of(row, shape.traits.balances) for row in rows], dtype=float).T)
    values = _columns([_sizes(row, shape.family) | _links(row, hardware, shape.traits) for row in rows])
    found = expressions.at(**machine_values(expressions.machine, hardware), **values)
    run = Run(
        values["micro_batches"],
        values["stages"],
        values["chunks"],
        cuts,
        "full" if recompute == "full" else "none",
        shape.training_state,
    )
    link = link_of(values, "pp")
    parts = values["tp"] if shape.traits.scatters and not shape.sequence_parallel else 1
    # What hides has no symbol, because the price of no item depends on it.
    machine = replace(found.machine, hides=hardware.hides)
    return Step(
        found.items,
        found.holdings,
        run,
        machine,
        software,
        layers=found.layers,
        boundary_bytes=found.boundary_bytes,
        boundary_link=link,
        boundary_crosses=values["crosses"],
        boundary_parts=parts,
    )


def cuts_of(row: Row, balances: bool) -> Cuts:
    """Layers of the stages, by the weight of the head or by Megatron's habit."""
    if not balances:
        return cuts_of_equal_ends(row.layers, row.pp)
    assert row.ffn is not None and row.vocab is not None
    layer = 4 * row.hidden**2 + 3 * row.ffn * row.hidden
    return cuts_by_weight(row.layers, row.pp, after=row.vocab * row.hidden / layer)


def _sizes(row: Row, family: Family) -> dict[str, float]:
    if row.ffn is None or row.vocab is None:
        raise Skip("no feed-forward width or vocabulary")
    model = row.experts
    return {
        "batch": row.micro_batch * row.dp,
        "seq": row.seq,
        "hidden": row.hidden,
        "kv_heads": row.kv_heads,
        "group": row.heads // row.kv_heads,
        "head_dim": model.head_dim if model else row.hidden // row.heads,
        "positions": row.seq,
        "ffn": row.ffn,
        "vocab": row.vocab,
        "layers": row.layers,
        "stages": row.pp,
        "chunks": row.chunks,
        "micro_batches": row.grad_accum,
        **axes_of(row),
        **(_sizes_of_experts(model) if model else {}),
    }


def _sizes_of_experts(model: Transformer) -> dict[str, float]:
    low = model.latent or Latent(queries=1, keys=1, rotary=1)
    dense = model.dense_layers
    return {
        "ffn": model.ffn,
        "experts": model.experts,
        "per_token": model.experts_per_token,
        "shared_ffn": model.shared_experts * model.ffn,
        "queries": low.queries,
        "keys": low.keys,
        "rotary": low.rotary,
        "dense_ffn": model.dense_ffn,
        **({"layers_layers": model.layers, "layers_dense_layers": dense} if dense else {}),
    }


def axes_of(row: Row) -> dict[str, int]:
    """Sizes of the axes of a row's plan. Ranks that share experts are ranks of `tp` first, and then of `dp`.

    Each of them has whole experts. Where a run splits every expert over the ranks of `tp` instead, each rank has as
    many numbers of experts. Raises Skip for ranks of experts that are no ranks of both.
    """
    if row.experts is None:
        return {"dp": row.dp // row.cp, "cp": row.cp, "ep": 1, "tp": row.tp}
    beyond = row.ep if row.splits_experts else row.ep // math.gcd(row.ep, row.tp)
    if row.dp % beyond:
        raise Skip("ranks of experts do not divide those of data")
    return {"dp": row.dp // beyond, "cp": 1, "ep": beyond, "tp": row.tp}


def _links(row: Row, hardware: Hardware, traits: Traits) -> dict[str, float]:
    """Links of the axes on the machine; stages are the slowest axis."""
    mesh = Mesh((("pp", row.pp), *axes_of(row).items()))
    values: dict[str, float] = {}
    for position, name in enumerate(mesh.names):
        values |= link_values(hardware.link(mesh, position), name)
    if traits.sends_once and row.experts is not None:
        values["exchange_gain_ep"] /= _sent_share(row, hardware)
    return values | {"crosses": float(row.pp > 1 and row.n_gpus > hardware.devices_per_node)}


def _sent_share(row: Row, hardware: Hardware) -> float:
    """Share of a token's copies that are sent where each place gets one: of n places, its k experts are on
    n (1 - (1 - 1/n)^k), if they are chosen evenly. A place is a rank, or a node where experts are on several.
    """
    assert row.experts is not None, "a model without experts sends nothing"
    ranks, visits = axes_of(row)["ep"], row.experts.experts_per_token
    nodes = ranks * row.tp / hardware.devices_per_node
    places = nodes if nodes > 1 else ranks
    return places * (1 - (1 - 1 / places) ** visits) / visits


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def cuts_by_weight(layers: int, stages: int, *, before: float = 0.0, after: float = 0.0) -> Cuts:
    """Cuts a model into stages of about equal weight, between whole layers.

    With s the total weight divided by `stages`, stage k ends after the first layer at which the weight so far,
    `before` included, is at least k * s.

    Args:
        layers: number of repeated layers, each of weight 1.
        stages: number of pipeline stages.
        before, after: weights of what comes before the first layer and after the last, such as an embedding
            and a head, in layers.

    >>> cuts_by_weight(7, 3, after=2.0)
    Cuts(first=3, middle=3, last=1)
    """
    counts = [0] * stages
    share = (before + layers + after) / stages
    stage, reached = 0, before
    for _ in range(layers):
        counts[stage] += 1
        reached += 1
        if stage < stages - 1 and reached >= share * (stage + 1) - 1e-9:
            stage += 1
    return Cuts(counts[0], max(counts[1:-1], default=0), counts[-1])


def cuts_of_equal_ends(layers: int, stages: int) -> Cuts:
    """The division of Megatron-LM users where the stages do not divide the layers.

    The embedding and the head count as one layer each, so that the first and last stages have one layer less.
    """
    if stages == 1 or layers % stages == 0:
        return equal_cuts(layers, stages)
    if stages == 2:
        return Cuts(math.ceil(layers / 2), 0, layers // 2)
    share = math.ceil((layers + 2) / stages)
    return Cuts(share - 1, share, share - 1)


__all__ = ["Family", "Prediction", "Shape", "price_rows"]
