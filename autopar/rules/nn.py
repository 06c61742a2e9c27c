"""Normalization, attention and pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from autopar.rules.notation import spec_of
from autopar.rules.shape import along
from autopar.rules.spec import Call, Dim, Letters, Local, RuleDoesNotApply, Spec, parts, plain


def layer_norm(call: Call) -> Spec:
    """layer_norm, rms_norm: the trailing `normalized_shape` dims stay whole."""
    x = call.operands[0]
    letters, sizes = plain(x.shape)
    tail = letters[x.ndim - len(call["normalized_shape"]) :]
    normalized = frozenset(letter for dim in tail for letter in dim)
    affine = (tail,) * (len(call.operands) - 1)
    statistics = [tuple(() if d in tail else d for d in letters)] * (len(call.results) - 1)
    return Spec(
        (letters, *affine), (letters, *statistics), sizes, whole=normalized, normalized=normalized,
        flops=8 * x.numel(),
    )  # fmt: skip


def batch_norm(call: Call) -> Spec:
    """Statistics run over batch and space, so that only channels can be split, unless they are given."""
    letters, sizes = plain(call.operands[0].shape)
    channel = (letters[1],)
    whole = frozenset(letter for i, dim in enumerate(letters) if i != 1 for letter in dim)
    if call.arguments.get("training") is False:
        whole = frozenset()
    results = tuple(
        letters if t.ndim > 1 else (channel if t.numel() else ((),)) for t in call.results
    )
    return Spec(
        (letters, *(channel,) * (len(call.operands) - 1)), results, sizes, whole=whole,
        flops=8 * call.operands[0].numel(),
    )  # fmt: skip


def group_norm(call: Call) -> Spec:
    """group_norm: `n g c! x!, g c!, g c! -> n g c! x!`: batch and groups can be split."""
    x, groups = call.operands[0], call["num_groups"]
    letters, sizes = plain(x.shape)
    sizes = {k: v for k, v in sizes.items() if (k,) != letters[1]}
    sizes |= {k: v for k, v in (("g", groups), ("c", x.shape[1] // groups)) if v > 1}
    channel: Dim = tuple(k for k in "gc" if k in sizes)
    letters = (letters[0], channel, *letters[2:])
    whole = frozenset(letter for dim in letters[1:] for letter in dim) - {"g"}
    return Spec(
        (letters, *((channel,),) * (len(call.operands) - 1)), (letters,), sizes, whole=whole,
        flops=8 * x.numel(), localize=_norm_locally,
    )  # fmt: skip


def _norm_locally(local: Local) -> fx.Node:
    """A rank that holds some of the groups norms these."""
    x, groups, *rest = local.args
    return local.emit(local.node.target, x, groups // parts(local, ["g"]), *rest, **local.kwargs)


def instance_norm(call: Call) -> Spec:
    """instance_norm: statistics of every sample and channel; running ones are of the whole batch."""
    letters, sizes = plain(call.operands[0].shape)
    whole = {letter for dim in letters[2:] for letter in dim}
    if call["running_mean"] is not None:
        whole |= {*letters[0]}
    channel = (letters[1],)
    return Spec((letters, *(channel,) * (len(call.operands) - 1)), (letters,), sizes,
                whole=frozenset(whole), flops=8 * call.operands[0].numel())  # fmt: skip


def parametric_relu(call: Call) -> Spec:
    """prelu: a slope for every channel, or one."""
    x, slope = call.operands
    letters, sizes = plain(x.shape)
    own = (letters[1],) if slope.numel() > 1 else ((),)
    return Spec((letters, own[: slope.ndim]), (letters,), sizes, flops=x.numel())


def resized(call: Call) -> Spec:
    """upsample: batch and channels pass, space stays whole."""
    return along(lambda _: range(2, call.operands[0].ndim))(call)


def sampled(call: Call) -> Spec:
    """grid_sampler: `n c x!.., n p.. two! -> n c p..`."""
    space = call.operands[0].ndim - 2
    own, points = (
        " ".join(f"{tag}{d}{end}" for d in range(space)) for tag, end in (("x", "!"), ("p", ""))
    )
    spec = spec_of(f"n c {own}, n {points} two! -> n c {points}", call)
    return replace(spec, flops=4 * call.results[0].numel())


def attention(call: Call) -> Spec:
    """scaled_dot_product_attention: `b.. q e!, b.. k! e!, b.. k! v! (, b.. q k!) -> b.. q v!`.

    With enable_gqa the heads of the query are (kv head, group). A causal mask that the op makes
    itself counts queries from 0, so that queries stay whole there.
    """
    if (
        call.arguments.get("enable_gqa")
        and call.operands[1].shape[-3] != call.operands[2].shape[-3]
    ):
        raise RuleDoesNotApply("keys and values of different heads")
    query, key = call.operands[:2]
    q = "q!" if call["is_causal"] else "q"
    text = f"b.. {q} e!, b.. k! e!, b.. k! v!, b.. {q} k! -> b.. {q} v!"
    flops = 2 * query.numel() * key.shape[-2] + 2 * call.results[0].numel() * key.shape[-2]
    spec = spec_of(text, call)
    if call.arguments.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        spec = _grouped(spec, query.shape[-3], key.shape[-3])
    nests = tuple((2.0, tuple(x for x in spec.sizes if x != left_out)) for left_out in ("v", "e"))
    return replace(spec, flops=flops, nests=nests)


def _grouped(spec: Spec, heads: int, kv_heads: int) -> Spec:
    """Cuts the head letter `b0` of query and result into kv head and group."""

    def cut(tensor: Letters) -> Letters:
        return tuple(("b0", "group") if dim == ("b0",) else dim for dim in tensor)

    sizes = dict(spec.sizes) | {"b0": kv_heads, "group": heads // kv_heads}
    if kv_heads == 1:
        raise RuleDoesNotApply("one kv head shared by a group")
    q, k, v, *mask = spec.operands
    return replace(spec, operands=(cut(q), k, v, *map(cut, mask)),
                   results=tuple(map(cut, spec.results)), sizes=sizes)  # fmt: skip


def pooling(call: Call) -> Spec:
    """Pooling: batch and channels pass, space stays whole."""
    x, y = call.operands[0], call.results[0]
    spatial = int(str(call.node.target).split("pool")[1][0])
    letters, sizes = plain(x.shape, "d")
    lead = letters[: x.ndim - spatial]
    tail, more = plain(y.shape, "y")
    result: tuple[Dim, ...] = (*lead, *tail[y.ndim - spatial :])
    sizes |= {n: s for n, s in more.items() if (n,) in tail[y.ndim - spatial :]}
    whole = frozenset(n for n in sizes if (n,) not in lead)
    return Spec((letters,), (result,) * len(call.results), sizes, whole=whole, flops=x.numel())


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.layer_norm": layer_norm,
    "aten.rms_norm": layer_norm,
    "aten.native_layer_norm": layer_norm,
    "aten.group_norm": group_norm,
    "aten.batch_norm": batch_norm,
    "aten._native_batch_norm_legit_functional": batch_norm,
    "aten._native_batch_norm_legit_no_training": batch_norm,
    "aten._native_batch_norm_legit": batch_norm,
    "aten.native_batch_norm": batch_norm,
    "aten.instance_norm": instance_norm,
    "aten.prelu": parametric_relu,
    "aten.scaled_dot_product_attention": attention,
    "aten.grid_sampler": sampled,
    "aten.grid_sampler_2d": sampled,
    "aten.grid_sampler_3d": sampled,
    **{
        f"aten.{name}": resized
        for name in (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
        )
    },
    **{
        f"aten.{name}": pooling
        for name in (
            "max_pool1d", "max_pool2d", "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d",
            "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool3d",
            "max_pool1d_with_indices", "max_pool3d_with_indices", "avg_pool3d", "adaptive_avg_pool3d",
            "adaptive_max_pool1d", "adaptive_max_pool3d",
        )
    },
}  # fmt: skip
