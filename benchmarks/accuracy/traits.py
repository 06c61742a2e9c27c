"""Habits of the runtimes whose published runs are priced, and what each changes in the expressions of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost_model.arith import Quantity, larger, smaller
from autopar.cost_model.collectives import BUCKET_BYTES
from autopar.cost_model.compute import FUSED_ATTENTION, is_product
from autopar.cost_model.flow import Flow
from autopar.cost_model.items import COMPUTE, MemoryItem, WorkItem
from autopar.cost_model.memory import Selected
from autopar.cost_model.symbols import Expressions, symbol
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Selection
from autopar.pipeline.producers import Producers, op_names, producer_name
from autopar.pipeline.recomputable import selected


@dataclass(frozen=True)
class Traits:
    """What a runtime does in its own way.

    Attributes:
        balances: whether stages are cut by weight, the head included.
        fused: whether chains of element-wise ops are one kernel, forward and backward.
        regathers: whether gathered activations are kept in shards.
        hides_regathers: whether gathering them again runs beside the product that makes the gradient of the input
            (Korthikanti et al. 2022, section 4.2.2).
        bucket_bytes: size of the collectives of gradients, before tensor parallelism splits them: their
            number stays.
        bucket_bytes_per_rank: size of these collectives for each data-parallel rank, where that is more; then of what a
            tensor-parallel rank has.
        scatters: whether each rank of a tensor-parallel group sends a part of what crosses from stage
            to stage, which the other side gathers.
        accumulates_in_products: whether a product adds a weight's gradient to the sum as it writes it.
        repeats_layers: whether recomputation repeats whole layers, as a reentrant checkpoint does, and
            does not end with the last tensor that backward wants.
        narrow_products: whether products of layers keep their inputs in one byte a number, for the product that makes
            the gradient of the weight.
        narrow_frozen: whether frozen weights of layers, and what a gated activation keeps, have one byte a number.
        rings: whether ranks of context parallelism load tokens in the order that balances causal attention, and pass
            keys and values on beside attention (Transformer Engine, torch); else as our own runtime does.
        logit_bytes: bytes that the loss keeps for each logit at its peak, where a kernel of its own makes loss and
            gradient; None for that of torch, as it is priced.
    """

    balances: bool = False
    fused: bool = False
    regathers: bool = False
    hides_regathers: bool = False
    bucket_bytes: float = BUCKET_BYTES
    bucket_bytes_per_rank: float = 0
    scatters: bool = False
    accumulates_in_products: bool = False
    repeats_layers: bool = False
    narrow_products: bool = False
    narrow_frozen: bool = False
    rings: bool = True
    logit_bytes: int | None = None

    def bucket(self) -> Quantity:
        """Bytes of a collective of gradients on a rank, as a formula."""
        if self.bucket_bytes_per_rank:
            return larger(self.bucket_bytes, self.bucket_bytes_per_rank * data_ranks())
        return self.bucket_bytes / symbol("tp")


EXPERTS = "autopar.analysis.experts"  # the op of a mixture
USUAL = Traits()
BACKWARD_PASSES = 2.5  # of attention, each as long as its forward (Dao 2023, FlashAttention-2, section 3.1.2)


def data_ranks() -> Quantity:
    """Number of ranks with other tokens, but for those of tensor parallelism, as a formula."""
    return symbol("dp") * symbol("cp") * symbol("ep")


def applied(expressions: Expressions, traits: Traits) -> Expressions:
    """The expressions of a step as a runtime with these traits runs it."""
    items = tuple(_items(expressions.items, traits))
    return replace(expressions, items=items, holdings=tuple(_holdings(expressions.holdings, traits)))


def _items(items: tuple[WorkItem, ...], traits: Traits) -> Iterator[WorkItem]:
    gathered = {i.name for i in items if i.kind == "all_gather" and i.phase == "forward"}
    for item in _ringed(items) if traits.rings else items:
        if traits.accumulates_in_products and item.kind == "accumulate":
            continue
        if traits.repeats_layers and item.phase == "forward":
            item = replace(item, recomputed=1)
        is_again = item.name in gathered and item.phase == "backward" and item.carries == "activation"
        if traits.hides_regathers and is_again:
            item = replace(item, hidden_seconds=item.seconds)
        yield item


def _ringed(items: tuple[WorkItem, ...]) -> Iterator[WorkItem]:
    """The items with rotations of keys and values beside attention, and without those that put tokens in order."""
    attention = {(i.region, i.phase): i for i in items if i.kind == FUSED_ATTENTION and i.resource == COMPUTE}
    for item in items:
        if item.resource != "cp" or "scaled_dot_product_attention" not in item.name:
            yield item
        elif item.kind.startswith("rotate"):
            beside = attention[item.region, item.phase]
            passes = 1 if item.phase == "forward" else BACKWARD_PASSES
            yield replace(item, hidden_seconds=smaller(item.seconds, passes * beside.seconds))


def _holdings(holdings: tuple[MemoryItem, ...], traits: Traits) -> Iterator[MemoryItem]:
    for each in holdings:
        is_input = each.name.endswith(" linear") and each.region == "layers"
        is_saved = each.kind in ("saved activations", "recomputed")
        if traits.narrow_products and is_input and is_saved:
            each = replace(each, bytes=each.bytes / 2)
        if traits.fused and is_saved and each.region == "layers":
            each = replace(each, bytes=each.bytes * _share_of_mixture(each.name, traits))
        if traits.narrow_frozen and each.region == "layers":
            is_gate = is_saved and each.name.endswith(("mlp silu", "mlp mul"))
            each = replace(each, bytes=each.bytes / (2 if is_gate or each.kind == "parameters" else 1))
        if traits.logit_bytes is not None and each.name.endswith("cross_entropy_loss"):
            logits = symbol("batch") * symbol("seq") * symbol("vocab") / data_ranks() / symbol("tp")
            size = traits.logit_bytes * logits if each.kind == "working" else 0
            each = replace(each, bytes=size)
        yield each
    if traits.narrow_products:
        yield _narrow_copy()


def _share_of_mixture(name: str, traits: Traits) -> Quantity:
    """What Megatron-Core keeps of the activations of a mixture, of those that separate kernels keep.

    A row keeps the inputs of both products and what goes into the activation, which is one kernel and weighs the row,
    too: 2 h + 2 f + 4 f bytes, or h + f + 4 f where inputs have one byte (`weighted_bias_swiglu`, core_r0.12).
    """
    hidden, ffn = symbol("hidden"), symbol("ffn")
    if name == "layers.mlp einsum":
        return 0
    if not name.endswith(EXPERTS):
        return 1
    kept = hidden + 5 * ffn if traits.narrow_products else 2 * hidden + 6 * ffn
    return kept / (2 * hidden + 8 * ffn)


def _narrow_copy() -> MemoryItem:
    """The result of attention, which attention keeps as it is, once more as the input of the output projection."""
    tokens = symbol("batch") * symbol("seq") * symbol("layers")
    size = tokens * symbol("hidden") / (data_ranks() * symbol("tp"))
    return MemoryItem("attention.output linear", "saved activations", "layers", size)


def every_second_product(graph: Graph, plan: Plan) -> Selected:
    """What torchtitan's policy by op recomputes in the layers: all but attention, reductions and every second product.

    Source: torchtitan, `distributed/activation_checkpoint.py` at b5bcd76: products are counted in the order of the
    forward, and those with an even number are recomputed.
    """
    names, flow = op_names(graph, plan), Flow(graph, plan)
    kept = _kept_by_policy(graph, names)
    chosen: dict[str, list[str]] = {}
    for op, converted in Producers.find(graph, flow).of.values():
        is_sum = bool(converted) and any(s.kind == "P" for s in flow.place(converted).layout)
        in_layer = op in names and graph.stack_of(graph.by_name[op].module) is not None
        if in_layer and not is_sum and (converted or op not in kept):
            path, name = names[op]
            chosen.setdefault(path, []).append(producer_name(graph, name, (op, converted)))
    return selected(graph, plan, Selection.of(chosen))


def _kept_by_policy(graph: Graph, names: Mapping[str, tuple[str, str]]) -> set[str]:
    """Names of the ops of layers whose results that policy keeps."""
    kept, products = set[str](), Counter[str]()
    for op in graph.ops:
        if op.name in names and is_product(op):
            path, _ = names[op.name]
            is_attention = "attention" in op.kind
            products[path] += not is_attention
            if is_attention or products[path] % 2:
                kept.add(op.name)
    return kept
