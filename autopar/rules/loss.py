"""Cross-entropy, over a split batch and over a split vocabulary; losses of one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules.elementwise import elementwise
from autopar.rules.index import shifted, zeroed
from autopar.rules.spec import Call, Local, RuleDoesNotApply, Spec, plain, run_as_is

aten = torch.ops.aten
MEAN, SUM = 1, 2  # values of the op's `reduction` argument (torch.nn._reduction)


def cross_entropy(call: Call) -> Spec:
    """`n.. c, n.. -> | sum n c`: a mean divides by the tokens of all ranks.

    Without reduction, probabilities as targets or class weights, classes stay whole.
    """
    x, target = call.operands[:2]
    if x.ndim == 1:
        raise RuleDoesNotApply("logits without a batch dim")
    letters, sizes = plain(x.shape, "n")
    channel = letters[min(1, x.ndim - 1)]
    tokens = tuple(dim for i, dim in enumerate(letters) if i != min(1, x.ndim - 1))
    classes_as_targets = target.ndim == x.ndim
    reduced = call["reduction"] in (MEAN, SUM)
    plain_targets = not classes_as_targets and call["weight"] is None
    splits_classes = reduced and plain_targets and not call["label_smoothing"]
    operands = [letters, letters if classes_as_targets else tokens, (channel,)]
    every_token = frozenset(letter for dim in tokens for letter in dim)
    can_count = not (classes_as_targets and call["weight"] is not None)
    return Spec(
        tuple(operands[: len(call.operands)]), (() if reduced else tokens,), sizes,
        sums=(every_token | frozenset(channel)) if reduced else frozenset(),
        whole=(frozenset() if splits_classes else frozenset(channel))
        | (frozenset() if can_count else every_token),
        contiguous=frozenset(channel), flops=4 * x.numel(),
        localize=_Localizer(call, tuple(sorted(every_token)), channel),
    )  # fmt: skip


class _Localizer:
    """Runs cross-entropy on local shards."""

    def __init__(self, call: Call, tokens: tuple[str, ...], channel: tuple[str, ...]) -> None:
        self.reduction: int = call["reduction"]
        self.ignore: int = call["ignore_index"]
        self.arguments = call.arguments
        self.tokens, self.channel = tokens, channel
        self.ndim = call.operands[0].ndim
        self.counts_all = call.operands[1].ndim == self.ndim

    def __call__(self, local: Local) -> fx.Node:
        axes = [axis for letter in self.channel for axis in local.axes(letter)]
        token_axes = [axis for letter in self.tokens for axis in local.axes(letter)]
        if self.reduction not in (MEAN, SUM) or not (axes or token_axes):
            return run_as_is(local)
        x, target = local.args[:2]
        if axes:
            total = self._over_classes(local, x, target, tuple(axes))
        else:
            total = self._cross_entropy(local, SUM)
        if self.reduction == SUM:
            return total
        return local.emit(aten.div.Tensor, total, self._count(local, target, token_axes))

    def _cross_entropy(self, local: Local, reduction: int) -> fx.Node:
        names = ("weight", "reduction", "ignore_index", "label_smoothing")
        values: dict[str, Any] = {name: self.arguments[name] for name in names}
        values |= {"reduction": reduction, "weight": local.args[2] if len(local.args) > 2 else None}
        return local.emit(aten.cross_entropy_loss.default, *local.args[:2], *values.values())

    def _count(self, local: Local, target: fx.Node, token_axes: list[tuple[str, int]]) -> fx.Node:
        """How many tokens (or how much class weight) the ranks have together."""
        if self.counts_all:  # probabilities: the mean is over all rows
            shape = local.emit(aten.select.int, target, min(1, self.ndim - 1), 0)
            count = local.emit(aten.sum.default, local.emit(aten.ones_like.default, shape))
        else:
            count = self._weight_of_tokens(local, target)
        for name, size in token_axes:
            count = local.emit(torch.ops.autopar.all_reduce.default, count, [], size, name, "vary")
        return count

    def _weight_of_tokens(self, local: Local, target: fx.Node) -> fx.Node:
        kept = local.emit(aten.ne.Scalar, target, self.ignore)
        weight = local.args[2] if len(local.args) > 2 else None
        if weight is None:
            return local.emit(aten.sum.default, kept)
        rows = local.emit(aten.mul.Tensor, target, kept)
        flat = local.emit(aten.reshape.default, rows, [-1])
        weights = local.emit(aten.index_select.default, weight, 0, flat)
        counted = local.emit(aten.reshape.default, kept, [-1])
        return local.emit(
            aten.dot.default, weights, local.emit(aten.type_as.default, counted, weights)
        )

    def _over_classes(
        self, local: Local, x: fx.Node, target: fx.Node, axes: tuple[tuple[str, int], ...]
    ) -> fx.Node:
        """sum(log sum exp x - x[target]), each rank holding some of the classes.

        The largest logit and the sum of exponentials are shared; the log-sum-exp, then the same on
        every rank, is counted on one of them (R -> P), and x[target] where the class is (P).
        """
        emit, dim = local.emit, min(1, self.ndim - 1)
        peak = self._peak(local, x, axes, dim)
        total = emit(
            aten.sum.dim_IntList,
            emit(aten.exp.default, emit(aten.sub.Tensor, x, peak)),
            [dim],
            True,
        )
        for name, size in axes:
            total = emit(torch.ops.autopar.all_reduce.default, total, [], size, name, "vary")
        lse = emit(aten.add.Tensor, emit(aten.log.default, total), peak)
        for name, size in axes:
            lse = emit(torch.ops.autopar.partial.default, lse, [], size, name, "vary")
        kept = emit(aten.ne.Scalar, target, self.ignore)
        kept_column = emit(aten.unsqueeze.default, kept, dim)
        here = shifted(local, target, axes, x, dim)
        column = emit(aten.unsqueeze.default, here, dim)
        width = emit(aten.sym_size.int, x, dim)
        mine = emit(
            aten.logical_and.default,
            emit(aten.ge.Scalar, column, 0),
            emit(aten.lt.Scalar, column, width),
        )
        found = self._pick(local, x, emit(aten.mul.Tensor, column, mine), dim)
        picked = zeroed(local, found, mine)
        each = emit(aten.sub.Tensor, lse, picked)
        return emit(aten.sum.default, zeroed(local, each, kept_column))

    def _pick(self, local: Local, x: fx.Node, column: fx.Node, dim: int) -> fx.Node:
        """gather(x, dim, column) for one column; gather would keep all of x for its backward."""
        emit = local.emit
        by_row, place = (emit(aten.transpose.int, y, dim, -1) for y in (x, column))
        width = emit(aten.sym_size.int, x, dim)
        count = emit(aten.sym_numel.default, column)
        rows = emit(aten.arange.default, count, device=local.node.meta["val"].device)
        places = emit(
            aten.add.Tensor,
            emit(aten.reshape.default, place, [-1]),
            emit(aten.mul.Tensor, rows, width),
        )
        flat = emit(aten.reshape.default, by_row, [-1])
        found = emit(aten.view_as.default, emit(aten.index_select.default, flat, 0, places), place)
        return emit(aten.transpose.int, found, dim, -1)

    def _peak(
        self, local: Local, x: fx.Node, axes: tuple[tuple[str, int], ...], dim: int
    ) -> fx.Node:
        peak = local.emit(aten.amax.default, local.emit(aten.detach.default, x), [dim], True)
        for name, size in axes:
            peak = local.emit(
                torch.ops.autopar.all_gather.default, peak, [dim], size, name, "shard"
            )
            peak = local.emit(aten.amax.default, peak, [dim], True)
        return peak


def unreduced(call: Call) -> Spec:
    """A loss of one element at a time; `unreduce_losses` splits its reduction off."""
    if call["reduction"] in (MEAN, SUM):
        raise RuleDoesNotApply
    return elementwise(call)


def negative_likelihood(call: Call) -> Spec:
    """nll_loss_nd: `n c.., n.. ->`, unless it is a mean, which counts what is not ignored."""
    x, reduction = call.operands[0], call["reduction"]
    if reduction == MEAN or x.ndim < 2:
        raise RuleDoesNotApply("a mean over what is not ignored")
    letters, sizes = plain(x.shape)
    tokens = (letters[0], *letters[2:])
    operands = (letters, tokens, (letters[1],))[: len(call.operands)]
    sums = (
        frozenset(letter for dim in tokens for letter in dim) if reduction == SUM else frozenset()
    )
    return Spec(operands, (() if reduction == SUM else tokens,), sizes, sums=sums,
                whole=frozenset(letters[1]), flops=x.numel())  # fmt: skip


ELEMENTWISE = tuple(
    f"aten.{name}"
    for name in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div", "hinge_embedding_loss",
        "poisson_nll_loss", "margin_ranking_loss",
    )
)  # fmt: skip

RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss_nd": negative_likelihood,
    **{name: unreduced for name in ELEMENTWISE},
}
