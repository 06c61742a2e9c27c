"""Rule of attention: split over batch, heads and queries, or over queries and keys at once, as a ring."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir import EXCHANGED
from autopar.ops.attention_block import wide
from autopar.ops.nodes import bound_arguments
from autopar.ops.ring import ROTATE, ROTATE_BACK, arguments
from autopar.ops.ring_attention import Scoring
from autopar.rules.index import shifted
from autopar.rules.kept.attention import is_fused_attention
from autopar.rules.notation import spec_of
from autopar.rules.spec import (
    Call,
    Letters,
    Local,
    Nest,
    RuleDoesNotApply,
    Spec,
    StatedCollective,
    local_arguments,
    run_as_is,
)

aten = torch.ops.aten
ours = torch.ops.autopar

# The choice that splits queries and keys over the same axes.
_RING = f"q{EXCHANGED}k"
# The result, where an operand is named by its position.
_RESULT = -1


def attention(call: Call) -> Spec:
    """scaled_dot_product_attention: `b.. q e!, b.. k! e!, b.. k! v! (, b.. q k!) -> b.. q v!`.

    With enable_gqa the heads of the query are (kv head, group). The op's own causal mask counts queries from 0, so
    over split queries the op is given the mask of its rows instead. With `q>k` both queries and keys are split, and
    keys and values travel around a ring of ranks, see `autopar.ops.ring_attention`.
    """
    query, key, value = call.operands[:3]
    if call.arguments.get("enable_gqa") and key.shape[-3] != value.shape[-3]:
        raise RuleDoesNotApply("keys and values of different heads")
    if call["dropout_p"]:
        raise RuleDoesNotApply("every part would drop the same; open_random_attention opens it")
    spec = spec_of("b.. q e!, b.. k! e!, b.. k! v!, b.. q k! -> b.. q v!", call)
    if call.arguments.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        spec = _grouped(spec, query.shape[-3], key.shape[-3])
    nests = scores_and_values(2.0, spec.sizes, *spec.operands[:3])
    flops = round(sum(nest.flops(spec.sizes) for nest in nests))
    batch = frozenset(x for dim in spec.results[0][:-2] for x in dim)
    spec = replace(spec, flops=flops, nests=nests, batch=batch, localize=_attend)
    if can_go_round(call, spec):
        spec = replace(spec, exchanges=(("q", "k"),), collectives=_sent(call, spec))
    if not call["is_causal"]:
        return spec
    square = _of_the_square(call)
    stretch = {"q": square, _RING: 1.0 if _is_dealt(call) else square}
    return replace(spec, contiguous=frozenset("q"), stretch=stretch)


def scores_and_values(
    times: float, letters: Iterable[str], query: Letters, key: Letters, value: Letters
) -> tuple[Nest, Nest]:
    """The products of attention: queries times keys over e, then scores times values over the keys.

    Args:
        times: FLOPs for a point of each.
        letters: letters of the op, of which v are those of the values' features.
        query, key, value: letters of the first three operands.
    """
    q, k, v = ({x for dim in tensor for x in dim} for tensor in (query, key, value))
    scores, values = ([x for x in letters if x != left_out] for left_out in ("v", "e"))
    return (Nest.of(times, scores, q, k, (q | k) - {"e"}), Nest.of(times, values, (q | v) - {"v"}, v, q | {"v"}))


def can_go_round(call: Call, spec: Spec) -> bool:
    """Whether keys and values can travel in a ring: if a fused kernel would run, and no mask requires a gradient."""
    masks = range(3, len(call.operands))
    return {"q", "k"} <= spec.sizes.keys() and is_fused_attention(call) and not call.wanted & {*masks}


def _is_dealt(call: Call) -> bool:
    """Whether rows are first dealt out, so that all ranks compute equally many scores (`Operands.is_dealt`)."""
    query, key = call.operands[:2]
    return call["is_causal"] and len(call.operands) == 3 and query.shape[-2] == key.shape[-2]


def _sent(call: Call, spec: Spec) -> tuple[StatedCollective, ...]:
    """All collectives of a ring.

    Forward sends keys, values, and a mask that is split along the keys. Backward sends them again, with the sums of the
    gradients of keys and values. Where rows are dealt out, the collectives of `_dealt` come in addition.
    """
    found = [_message(call, spec, i, ROTATE, ROTATE_BACK) for i in (1, 2)]
    masks = [3] if _mask_travels(spec) else []
    found += [_message(call, spec, i, ROTATE, ROTATE) for i in masks]
    return (*found, *(_dealt(call, spec) if _is_dealt(call) else ()))


def _dealt(call: Call, spec: Spec) -> Iterator[StatedCollective]:
    """The all-to-alls that deal rows out and back.

    Forward deals out query, key and value, and takes the result and the log-sum-exp back. Backward deals all five out
    again, and the gradient of the result, and takes the gradients of query, key and value back.
    """
    for i in (0, 1, 2, _RESULT):
        yield _message(call, spec, i, "all_to_all", "all_to_all")
        yield _message(call, spec, i, "", "all_to_all")  # gradients
    logsumexp = spec.results[0][:-1], wide(call.operands[0].dtype).itemsize
    yield _stated(call, *logsumexp, "all_to_all", "all_to_all")


def _message(call: Call, spec: Spec, i: int, forward: str, backward: str) -> StatedCollective:
    """The collective that moves operand number `i`, or the result for `_RESULT`."""
    letters, value = (spec.results, call.results) if i == _RESULT else (spec.operands, call.operands)
    return _stated(call, letters[max(i, 0)], value[max(i, 0)].element_size(), forward, backward)


def _stated(call: Call, letters: Letters, itemsize_bytes: int, forward: str, backward: str) -> StatedCollective:
    """A collective that moves a tensor.

    Args:
        call: the call of attention; where it wants no gradient, nothing is sent in backward.
        letters: letters of the tensor's dims.
        itemsize_bytes: bytes of an element.
        forward, backward: names of the collectives of both passes, "" for none.
    """
    flat = tuple(x for dim in letters for x in dim)
    back = backward if call.wanted else ""
    return StatedCollective(frozenset({_RING}), forward, back, flat, itemsize_bytes)


def _mask_travels(spec: Spec) -> bool:
    """Whether a mask is split along the keys: it has a column for each, and the same row for all queries."""
    letters = {x for mask in spec.operands[3:] for dim in mask for x in dim}
    return "k" in letters and "q" not in letters


def _of_the_square(call: Call) -> float:
    """Number of all scores divided by the number that the unsplit causal kernel computes.

    Query i, counted from 0, sees min(i + 1, k) of the k keys: (k + 1) / 2 on average if q = k. A rank with a part of
    the queries is given its rows of the mask, and computes every score of its rows.
    """
    queries, keys = call.operands[0].shape[-2], call.operands[1].shape[-2]
    short = min(queries, keys)
    seen = short * (short + 1) // 2 + (queries - short) * keys
    return queries * keys / seen


def _attend(local: Local) -> fx.Node:
    """The op on a rank's queries: in a ring, or with this rank's rows of the causal mask."""
    if local.exchanges("k"):
        return _attend_in_ring(local)
    if not local.axes("q") or not bound_arguments(local.node)["is_causal"]:
        return run_as_is(local)
    return _attend_causally(local)


def _attend_in_ring(local: Local) -> fx.Node:
    """The op on a rank's queries, with keys and values that travel along the axes that split the keys."""
    given, axes, ring = local_arguments(local), local.axes("q"), local.exchanges("k")
    assert ring == local.axes("k"), local.node  # see `autopar.ir.go_together`
    names, sizes = zip(*axes, strict=True)
    call = Call(local.node)
    how = Scoring(
        given["is_causal"], given["scale"] or 1 / math.sqrt(call.operands[0].shape[-1]), _mask_travels(attention(call))
    )
    turns = [i for i, axis in enumerate(axes) if axis in ring]
    tensors = (given[name] for name in ("query", "key", "value", "attn_mask"))
    both = local.emit(ours.ring_attention.default, *tensors, *arguments(sizes, names, turns, how))
    return local.emit(operator.getitem, both, 0)


def _attend_causally(local: Local) -> fx.Node:
    """The op with this rank's rows of the causal mask: query q sees keys 0 to q."""
    query, key, value = local.args[:3]
    where = {"device": local.node.meta["val"].device}
    rows = local.emit(aten.arange.default, local.result_shapes[0][-2], **where)
    columns = local.emit(aten.arange.default, local.emit(aten.sym_size.int, key, -2), **where)
    seen = local.emit(aten.ge.Tensor, local.emit(aten.unsqueeze.default, rows, -1), shifted(local, columns, "q"))
    return local.emit(local.node.target, query, key, value, seen, **_keywords(local.node))


def _keywords(node: fx.Node) -> dict[str, Any]:
    given = bound_arguments(node)
    return {name: given[name] for name in ("dropout_p", "scale", "enable_gqa")}


def _grouped(spec: Spec, heads: int, kv_heads: int) -> Spec:
    """Cuts the head letter `b0` of query and result into kv head and group; a single kv head has no letter."""
    if kv_heads == 1:
        return spec

    def cut(tensor: Letters) -> Letters:
        return tuple(("b0", "group") if dim == ("b0",) else dim for dim in tensor)

    sizes = dict(spec.sizes) | {"b0": kv_heads, "group": heads // kv_heads}
    q, k, v, *mask = spec.operands
    return replace(spec, operands=(cut(q), k, v, *map(cut, mask)), results=tuple(map(cut, spec.results)), sizes=sizes)


RULES: dict[str, Callable[[Call], Spec]] = {"aten.scaled_dot_product_attention": attention}
