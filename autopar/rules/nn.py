"""Rules of normalization, pooling and resampling."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.rules.notation import line, spec_of
from autopar.rules.shape import along
from autopar.rules.spec import (
    Call,
    Dim,
    Local,
    RuleDoesNotApply,
    Spec,
    StatedCollective,
    aten_ops,
    local_arguments,
    needs_a_row,
    plain,
    run_as_is,
)

aten = torch.ops.aten


def layer_norm(call: Call) -> Spec:
    """layer_norm, rms_norm: the trailing `normalized_shape` dims stay whole."""
    x = call.operands[0]
    letters, sizes = plain(x.shape)
    tail = letters[x.ndim - len(call["normalized_shape"]) :]
    normalized = frozenset(letter for dim in tail for letter in dim)
    affine = (tail,) * (len(call.operands) - 1)
    statistics = [tuple(() if d in tail else d for d in letters)] * (len(call.results) - 1)
    return Spec(
        (letters, *affine), (letters, *statistics), sizes, whole=normalized, normalized=normalized, flops=8 * x.numel()
    )


def batch_norm(call: Call) -> Spec:
    """batch_norm: `n c x.., c .. -> n c x.., c ..`; in training, statistics cover all ranks."""
    letters, sizes = plain(call.operands[0].shape)
    channel = (letters[1],)
    others = frozenset(letter for i, dim in enumerate(letters) if i != 1 for letter in dim)
    trains = call.arguments.get("training") is not False
    results = tuple(letters if t.ndim > 1 else (channel if t.numel() else ((),)) for t in call.results)
    spec = Spec((letters, *(channel,) * (len(call.operands) - 1)), results, sizes, flops=8 * call.operands[0].numel())
    if not trains:
        return spec
    if "aten._native_batch_norm_legit" not in str(call.node.target):
        return replace(spec, whole=others)  # its statistics change in place
    localizer = _BatchNorm(call, sorted(others))
    return replace(spec, agreed=others, collectives=localizer.collectives(call, letters[1]), localize=localizer)


class _BatchNorm:
    """Training over a split batch or split space: ranks exchange the mean and variance of every channel.

    The variance over all ranks is the mean of the parts' variances plus the variance of their means
    (torch.nn.SyncBatchNorm gathers the same numbers), computed one mesh axis after the other. Parts of different sizes
    count as many times as they have numbers, and send how many that are.
    `x * scale + shift` keeps only x for backward.
    """

    def __init__(self, call: Call, letters: Sequence[str]) -> None:
        x = call.operands[0]
        self.letters, self.ndim, self.count = letters, x.ndim, x.numel() // x.shape[1]
        self.widens = x.dtype in (torch.float16, torch.bfloat16)

    def collectives(self, call: Call, channel: Dim) -> tuple[StatedCollective, ...]:
        """Mean and variance of every channel, which `_moments` gathers."""
        size = torch.float32.itemsize if self.widens else call.operands[0].element_size()
        backward = "reduce_scatter" if 0 in call.wanted else ""
        return (StatedCollective(frozenset(self.letters), "all_gather", backward, channel, 2 * size),)

    def __call__(self, local: Local) -> fx.Node | tuple[fx.Node, ...]:
        axes = [axis for letter in self.letters for axis in local.axes(letter)]
        if not axes:
            return run_as_is(local)
        emit, given = local.emit, local_arguments(local)
        x = given["input"]
        if self.widens:
            x = emit(aten._to_copy.default, x, dtype=torch.float32)
        mean, variance = self._moments(local, x, axes)
        rstd = emit(aten.rsqrt.default, emit(aten.add.Scalar, variance, given["eps"]))
        scale = rstd
        if given["weight"] is not None:
            scale = emit(aten.mul.Tensor, rstd, given["weight"])
        shift = emit(aten.neg.default, emit(aten.mul.Tensor, mean, scale))
        if given["bias"] is not None:
            shift = emit(aten.add.Tensor, shift, given["bias"])
        row = [-1, *[1] * (self.ndim - 2)]
        scale, shift = (emit(aten.reshape.default, each, row) for each in (scale, shift))
        y = emit(aten.add.Tensor, emit(aten.mul.Tensor, x, scale), shift)
        if self.widens:
            y = emit(aten._to_copy.default, y, dtype=local.node.meta["val"][0].dtype)
        mean, variance, rstd = (emit(aten.detach.default, each) for each in (mean, variance, rstd))
        return (y, mean, rstd, *self._running(local, given, mean, variance))

    def _moments(self, local: Local, x: fx.Node, axes: Sequence[tuple[str, int]]) -> tuple[fx.Node, fx.Node]:
        """Mean and variance (divided by the count) of every channel over all ranks."""
        if not local.is_even(self.letters):
            return self._weighted_moments(local, x, axes)
        emit = local.emit
        space = [0, *range(2, self.ndim)]
        own = emit(aten.var_mean.correction, x, space, correction=0)
        mean, variance = (emit(operator.getitem, own, i) for i in (1, 0))
        for name, size in axes:
            parts = emit(aten.stack.default, [emit(aten.stack.default, [mean, variance])])
            parts = emit(torch.ops.autopar.all_gather.default, parts, [0], size, name, "reduce_scatter")
            means, variances = (emit(aten.select.int, parts, 1, i) for i in (0, 1))
            between = emit(aten.var_mean.correction, means, [0], correction=0)
            within = emit(aten.mean.dim, variances, [0])
            mean = emit(operator.getitem, between, 1)
            variance = emit(aten.add.Tensor, within, emit(operator.getitem, between, 0))
        return mean, variance

    def _weighted_moments(self, local: Local, x: fx.Node, axes: Sequence[tuple[str, int]]) -> tuple[fx.Node, fx.Node]:
        """The same over parts of different sizes, of which some may have no numbers at all.

        Each has a count n, a sum s, and the squares q of the distances from its mean m = s / n. Together they have the
        sums of all n and s, and sum(q + n (m - mean)**2) (Chan, Golub and LeVeque 1983).
        """
        emit, space = local.emit, [0, *range(2, self.ndim)]
        first = local.node.meta["val"][0]
        batch, channels, *rest = local.result_shapes[0]
        like = {"dtype": torch.float32 if self.widens else first.dtype, "device": first.device}
        count = emit(aten.full.default, [channels], batch * math.prod(rest), **like)
        total = emit(aten.sum.dim_IntList, x, space)
        row = emit(aten.reshape.default, _ratio(local, total, count), [1, -1, *[1] * (self.ndim - 2)])
        squares = emit(aten.sum.dim_IntList, emit(aten.square.default, emit(aten.sub.Tensor, x, row)), space)
        for name, size in axes:
            parts = emit(aten.stack.default, [emit(aten.stack.default, [count, total, squares])])
            parts = emit(torch.ops.autopar.all_gather.default, parts, [0], size, name, "reduce_scatter")
            counts, totals, within = (emit(aten.select.int, parts, 1, i) for i in range(3))
            count, total = (emit(aten.sum.dim_IntList, each, [0]) for each in (counts, totals))
            apart = emit(aten.sub.Tensor, _ratio(local, totals, counts), _ratio(local, total, count))
            between = emit(aten.mul.Tensor, counts, emit(aten.square.default, apart))
            squares = emit(aten.sum.dim_IntList, emit(aten.add.Tensor, within, between), [0])
        return _ratio(local, total, count), _ratio(local, squares, count)

    def _running(self, local: Local, given: dict[str, Any], mean: fx.Node, variance: fx.Node) -> tuple[fx.Node, ...]:
        """The new running statistics, if there are buffers for them; these use the unbiased variance."""
        if "running_mean" not in given:
            return ()
        emit, momentum = local.emit, given["momentum"]
        scales = momentum, momentum * self.count / (self.count - 1)
        olds = given["running_mean"], given["running_var"]
        found = []
        for old, new, scale in zip(olds, (mean, variance), scales, strict=True):
            kept = emit(aten.mul.Scalar, old, 1 - momentum)
            found.append(emit(aten.add.Tensor, kept, emit(aten.mul.Scalar, new, scale)))
        return tuple(found)


def _ratio(local: Local, total: fx.Node, count: fx.Node) -> fx.Node:
    """total / count, and 0 of nothing."""
    return local.emit(aten.div.Tensor, total, local.emit(aten.clamp.default, count, 1))


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
        (letters, *((channel,),) * (len(call.operands) - 1)),
        (letters,),
        sizes,
        whole=whole,
        flops=8 * x.numel(),
        localize=_norm_locally,
    )


def _norm_locally(local: Local) -> fx.Node:
    """group_norm on the groups that this rank has."""
    x, _, *rest = local.args
    return local.emit(local.node.target, x, local.part("g"), *rest, **local.kwargs)


@needs_a_row
def instance_norm(call: Call) -> Spec:
    """instance_norm has statistics for every sample and channel, so space stays whole; given ones are per channel.

    A separate op writes its running statistics, see [Note: silent writes].
    """
    letters, sizes = plain(call.operands[0].shape)
    space = frozenset(letter for dim in letters[2:] for letter in dim)
    channel = (letters[1],)
    return Spec(
        (letters, *(channel,) * (len(call.operands) - 1)),
        (letters,),
        sizes,
        whole=space if call["use_input_stats"] else frozenset(),
        flops=8 * call.operands[0].numel(),
    )


def parametric_relu(call: Call) -> Spec:
    """prelu: one slope for every channel, or one for all."""
    x, slope = call.operands
    letters, sizes = plain(x.shape)
    own = (letters[1],) if slope.numel() > 1 else ((),)
    return Spec((letters, own[: slope.ndim]), (letters,), sizes, flops=x.numel())


def resized(call: Call) -> Spec:
    """upsample: batch and channels can be split, space cannot."""
    return along(lambda _: range(2, call.operands[0].ndim))(call)


def sampled(call: Call) -> Spec:
    """grid_sampler: `n c x!.., n p.. two! -> n c p..`."""
    space = call.operands[0].ndim - 2
    own, points = (" ".join(f"{tag}{d}{end}" for d in range(space)) for tag, end in (("x", "!"), ("p", "")))
    spec = spec_of(f"n c {own}, n {points} two! -> n c {points}", call)
    return replace(spec, flops=4 * call.results[0].numel())


def pooling(call: Call) -> Spec:
    """Pooling: batch and channels can be split, space cannot."""
    x, y = call.operands[0], call.results[0]
    spatial = int(str(call.node.target).split("pool")[1][0])
    letters, sizes = plain(x.shape, "d")
    lead = letters[: x.ndim - spatial]
    tail, more = plain(y.shape, "y")
    result: tuple[Dim, ...] = (*lead, *tail[y.ndim - spatial :])
    sizes |= {n: s for n, s in more.items() if (n,) in tail[y.ndim - spatial :]}
    whole = frozenset(n for n in sizes if (n,) not in lead)
    return Spec((letters,), (result,) * len(call.results), sizes, whole=whole, flops=x.numel())


def unpooled(call: Call) -> Spec:
    """max_unpool: batch and channels can be split, space cannot."""
    space = int(str(call.node.target).split("pool")[1][0])
    rank = call.operands[0].ndim
    return along(lambda _: range(rank - space, rank), linear=False)(call)


def pooled_at_random(call: Call) -> Spec:
    """Rule of fractional_max_pool2d and 3d: batch and channels can be split, space cannot.

    The random numbers that place the pooling regions are an operand of shape (N, C, 2) or (N, C, 3), and are
    split with the batch and the channels. The rule does not apply to an input without a batch dim.
    """
    space = call.operands[0].ndim - 2
    if space < int(str(call.node.target).split("pool")[1][0]):
        raise RuleDoesNotApply("no batch")
    of_x, of_y = (" ".join(f"{tag}{d}!" for d in range(space)) for tag in "xy")
    return line(f"n c {of_x}, n c two! -> n c {of_y}, n c {of_y}")(call)


def affine_grid(call: Call) -> Spec:
    """affine_grid_generator: `n a! b! -> n y!.. two!` of an image size that names the batch."""
    space = " ".join(f"y{d}!" for d in range(call.results[0].ndim - 2))
    return line(f"n a! b! -> n {space} two!", localize=_grid_locally)(call)


def _grid_locally(local: Local) -> fx.Node:
    theta, size, *rest = local.args
    size = [local.result_shapes[0][0], *size[1:]]
    return local.emit(local.node.target, theta, size, *rest, **local.kwargs)


def weight_norm(call: Call) -> Spec:
    """_weight_norm: one norm for every index of a dim. This dim can be split, the others cannot."""
    v, g = call.operands
    letters, sizes = plain(v.shape)
    own = letters[call.dim(call["dim"])]
    norms = tuple(own if size > 1 else () for size in g.shape)
    return Spec(
        (letters, norms),
        (letters, norms)[: len(call.results)],
        sizes,
        whole=frozenset(sizes) - {*own},
        flops=3 * v.numel(),
    )


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.max_unpool2d": unpooled,
    "aten.max_unpool3d": unpooled,
    "aten.fractional_max_pool2d": pooled_at_random,
    "aten.fractional_max_pool3d": pooled_at_random,
    "aten.affine_grid_generator": affine_grid,
    "aten._weight_norm": weight_norm,
    "aten._weight_norm_interface": weight_norm,
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
    "aten.grid_sampler": sampled,
    "aten.grid_sampler_2d": sampled,
    "aten.grid_sampler_3d": sampled,
    **aten_ops(
        resized,
        """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        """,
    ),
    **aten_ops(
        pooling,
        """
        max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_max_pool2d max_pool3d max_pool1d_with_indices max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool3d
        """,
    ),
}
