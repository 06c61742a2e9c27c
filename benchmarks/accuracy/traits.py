"""Habits of the runtimes whose published runs are priced, and what each changes in the expressions of a step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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
        narrow_frozen: whether frozen weights of layers, and what a gated activation keeps, have one byte a number
            (mlcommons/training_results_v4.0, NVIDIA's llama2_70b_lora: `fp8_params` and `fp8_activation_input_store` of
            conf/megatron_gpt_peft_tuning_config.yaml, which its files for H100 and H200 turn on).
        recomputes: what backward makes again: modules of Megatron-Core, or `EVERY_SECOND_PRODUCT`.
        offloaded_layers: number of layers whose saved activations lie on the host, which counts as free.
        loops_over_experts: whether the host issues the products of each expert that a rank has, one by one.
        sends_once: whether a token is sent once to a rank with experts that it visits, and once to a node, whose ranks
            pass it on (DeepEP, HybridEP), instead of once to each expert.
        hides_in_products: share of what dense layers send along tp that runs beside their products; the figure of the
            runtime then holds for what experts send.
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
    recomputes: tuple[str, ...] = ()
    offloaded_layers: int = 0
    loops_over_experts: bool = False
    sends_once: bool = False
    hides_in_products: float = 0.0
    rings: bool = True
    logit_bytes: int | None = None

    def bucket(self) -> Quantity:
        """Bytes of a collective of gradients on a rank, as a formula."""
        if self.bucket_bytes_per_rank:
            return larger(self.bucket_bytes, self.bucket_bytes_per_rank * data_ranks())
        return self.bucket_bytes / symbol("tp")


EXPERTS = "autopar.analysis.experts"  # the op of a mixture
SINGLE = "products of single experts"
WEIGHING = "layers.mlp einsum"  # the sum of its rows, once a layer
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
    has_experts = any(i.name.endswith(EXPERTS) for i in items)
    routed = [i for i in items if has_experts and i.name == WEIGHING and i.phase == "forward"]
    for item in _ringed(items) if traits.rings else items:
        if traits.accumulates_in_products and item.kind == "accumulate":
            continue
        if traits.repeats_layers and item.phase == "forward":
            item = replace(item, recomputed=1)
        is_again = item.name in gathered and item.phase == "backward" and item.carries == "activation"
        if traits.hides_regathers and is_again:
            item = replace(item, hidden_seconds=item.seconds)
        elif routed and item.resource == "tp" and item.carries == "activation" and EXPERTS not in item.name:
            item = replace(item, hidden_seconds=traits.hides_in_products * item.seconds)
        yield item
    if traits.loops_over_experts:
        yield from _launches(routed)


def _launches(routed: Iterable[WorkItem]) -> Iterator[WorkItem]:
    """The products of an expert that the host issues after those of the first, which the op has itself.

    Transformer Engine's grouped linear layer issues one product of cuBLAS for every expert (`general_grouped_gemm`):
    two in forward and four in backward. They take no time of the device, which the op has, too.
    """
    experts = symbol("experts") / (symbol("ep") * symbol("tp"))
    for each in routed:
        item = replace(each, name=SINGLE, seconds=0, traffic_bytes=0, flops=0)
        yield replace(item, count=2 * each.count * (experts - 1))
        yield replace(item, count=4 * each.count * (experts - 1), phase="backward", recomputed=0)


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
        if traits.offloaded_layers and is_saved and each.region == "layers":
            each = replace(each, bytes=each.bytes * larger(0, 1 - traits.offloaded_layers / symbol("layers")))
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
    too: 2 h + 2 f + 4 f bytes, or h + f + 4 f where inputs have one byte (NVIDIA/Megatron-LM at 00caa53,
    `WeightedSwiGLUFunction` of fused_bias_swiglu.py saves gate and up). "moe_act" makes what goes into down again.
    """
    hidden, ffn = symbol("hidden"), symbol("ffn")
    if name == "layers.mlp einsum":
        return 0
    if not name.endswith(EXPERTS):
        return 1
    into_down = 0 if "moe_act" in traits.recomputes else ffn
    kept = hidden + into_down + 4 * ffn if traits.narrow_products else 2 * (hidden + into_down) + 4 * ffn
    return kept / (2 * hidden + 8 * ffn)


def _narrow_copy() -> MemoryItem:
    """The result of attention, which attention keeps as it is, once more as the input of the output projection."""
    tokens = symbol("batch") * symbol("seq") * symbol("layers")
    size = tokens * symbol("hidden") / (data_ranks() * symbol("tp"))
    return MemoryItem("attention.output linear", "saved activations", "layers", size)


EVERY_SECOND_PRODUCT = "every second product"
# Modules whose results backward makes again, by the names of our ops: `TransformerConfig.recompute_modules` of
# Megatron-Core (core_r0.13). "mla_up_proj" is all from the narrow vectors of latent attention to its kernel
# (`MLASelfAttention.qkv_up_proj_and_rope_apply`). "moe_act" lies within an op: `_share_of_mixture`.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "mla_up_proj": r"attention\.(query_up|key|value)/linear|attention/(?!scaled_dot_product_attention)",
        "layernorm": r"(attention|mlp)_norm/",
        "mlp": r"mlp\.(gate|up)/linear|mlp/(silu|mul|gelu)",
        "moe_act": r"(?!)",
    }
)


def recomputed(graph: Graph, plan: Plan, traits: Traits) -> Selected | None:
    """What backward of a runtime makes again, and what layers then keep; None where a whole number of layers does."""
    if not traits.recomputes:
        return None
    names, flow = op_names(graph, plan), Flow(graph, plan)
    again = _by_policy(graph, names, traits)
    chosen: dict[str, list[str]] = {}
    for op, converted in Producers.find(graph, flow).of.values():
        is_sum = bool(converted) and any(s.kind == "P" for s in flow.place(converted).layout)
        in_layer = op in names and graph.stack_of(graph.by_name[op].module) is not None
        if in_layer and not is_sum and again(op, converted):
            path, name = names[op]
            chosen.setdefault(path, []).append(producer_name(graph, name, (op, converted)))
    return selected(graph, plan, Selection.of(chosen))


def _by_policy(graph: Graph, names: Mapping[str, tuple[str, str]], traits: Traits) -> Callable[[str, str], bool]:
    """Whether an op, or what is converted for it, is made again."""
    if traits.recomputes == (EVERY_SECOND_PRODUCT,):
        kept = _every_second_product(graph, names)
        return lambda op, converted: bool(converted) or op not in kept
    modules = re.compile("|".join(MODULES[each] for each in traits.recomputes))
    return lambda op, converted: not converted and bool(modules.match(names[op][1]))


def _every_second_product(graph: Graph, names: Mapping[str, tuple[str, str]]) -> set[str]:
    """Names of the ops of layers whose results torchtitan's policy by op keeps: attention and every second product.

    Source: torchtitan, `distributed/activation_checkpoint.py` at b5bcd76: products are counted in the order of the
    forward, and those with an even number are recomputed. `SelectiveAC` is what its configurations of Llama 3, Qwen3
    and DeepSeek have (`models/*/config_registry.py`).
    """
    kept, products = set[str](), Counter[str]()
    for op in graph.ops:
        if op.name in names and is_product(op):
            path, _ = names[op.name]
            is_attention = "attention" in op.kind
            products[path] += not is_attention
            if is_attention or products[path] % 2:
                kept.add(op.name)
    return kept
