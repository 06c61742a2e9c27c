"""Rules of losses: cross-entropy over a split batch and over a split vocabulary, and point-wise losses.

Over split classes every rank has some logits of every token. The loss of token i is a sum over classes c, to which
each rank adds its own classes (Shoeybi et al. 2019, Megatron-LM, section 3):

    loss_i = sum_c q_ic (lse_i - x_ic),    lse_i = log sum_c exp x_ic

    q_ic = w_c p_ic,    p_ic = (1 - smoothing) [c = y_i] + smoothing / C    of class indices y, or
                        p_ic = (1 - smoothing) t_ic + smoothing / C          of class probabilities t

Ranks exchange the largest logit and the sum of exponentials of every token, and nothing of the size of x. A mean
divides by the sum over the tokens of all ranks: by sum_i w_{y_i} over the tokens that are not ignored, or by the number
of rows if targets are probabilities (torch.nn.functional.cross_entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules.elementwise import elementwise
from autopar.rules.index import shifted, zeroed
from autopar.rules.notation import line
from autopar.rules.spec import (
    Call,
    Local,
    RuleDoesNotApply,
    Spec,
    StatedCollective,
    aten_ops,
    local_arguments,
    plain,
    run_as_is,
)

aten = torch.ops.aten
MEAN, SUM = 1, 2  # values of the op's `reduction` argument (torch.nn._reduction)

Axes = tuple[tuple[str, int], ...]


def cross_entropy(call: Call) -> Spec:
    """`n c n.., n n.. (, c) -> | sum n c`, without reduction `-> n n.. | sum c`."""
    return _over_tokens(call, flops=4 * call.operands[0].numel(), normalizes=True)


def negative_likelihood(call: Call) -> Spec:
    """nll_loss_nd: cross-entropy whose input already is the logarithm of probabilities."""
    return _over_tokens(call, flops=call.operands[0].numel(), normalizes=False)


def _over_tokens(call: Call, *, flops: int, normalizes: bool) -> Spec:
    x, target = call.operands[:2]
    if x.ndim == 1:
        raise RuleDoesNotApply("logits without a batch dim")
    letters, sizes = plain(x.shape, "n")
    channel, tokens = letters[1], (letters[0], *letters[2:])
    reduced = call["reduction"] in (MEAN, SUM)
    localizer = OverTokens(call, x, target, tokens, channel, normalizes)
    targets = letters if target.ndim == x.ndim else tokens
    every_token = frozenset(letter for dim in tokens for letter in dim) if reduced else frozenset()
    return Spec(
        (letters, targets, (channel,))[: len(call.operands)],
        (() if reduced else tokens,),
        sizes,
        sums=every_token | frozenset(channel),
        contiguous=frozenset(channel),
        flops=flops,
        collectives=localizer.collectives(call["weight"], wanted=0 in call.wanted),
        transient=normalizes,
        localize=localizer,
    )


class OverTokens:
    """Runs cross-entropy (or nll_loss, which does not normalize) on local shards.

    Args:
        call: the call of the loss.
        logits, target: tensors of the shapes and formats of its operands.
        tokens, channel: letters of the dims of tokens, and of the classes.
        normalizes: whether the op takes logits.
    """

    def __init__(
        self,
        call: Call,
        logits: torch.Tensor,
        target: torch.Tensor,
        tokens: tuple[Any, ...],
        channel: tuple[str, ...],
        normalizes: bool,
    ) -> None:
        self.reduction: int = call["reduction"]
        self.ignored: int = call["ignore_index"]
        self.smoothing: float = call.arguments.get("label_smoothing", 0.0)
        self.classes, self.rows, self.ndim = logits.shape[1], logits.numel() // logits.shape[1], logits.ndim
        self.size_bytes = logits.element_size()
        self.tokens, self.channel = [letter for dim in tokens for letter in dim], channel
        self.has_probabilities, self.normalizes = target.ndim == logits.ndim, normalizes

    def collectives(self, weight: fx.Node | None, *, wanted: bool) -> tuple[StatedCollective, ...]:
        """The collectives of `_log_sum_exp` and `_divided`: two numbers per token, and one count.

        Args:
            weight: weights of the classes, if there are some.
            wanted: whether the gradient of the logits is.
        """
        tokens, found, size = frozenset(self.tokens), [], self.size_bytes
        if self.normalizes:
            shares = not self.has_probabilities and weight is None
            backward = "all_reduce" if wanted and not shares else ""
            for forward, back in (("all_gather", ""), ("all_reduce", backward)):
                over = frozenset(self.channel)
                found.append(StatedCollective(over, forward, back, tuple(self.tokens), size))
        if self.reduction == MEAN and not self.has_probabilities:
            over = tokens if weight is None else tokens | {*self.channel}
            count = torch.int64.itemsize if weight is None else size
            found.append(StatedCollective(over, "all_reduce", "", (), count))
        return tuple(each for each in found if each.over)

    def __call__(self, local: Local) -> fx.Node:
        classes, tokens = self.axes(local)
        given = local_arguments(local)
        averages = self.reduction == MEAN
        if classes:
            total = self.over_classes(local, given, classes)
            total = local.emit(aten.sum.default, total) if self.reduction in (MEAN, SUM) else total
        elif averages and tokens:
            total = local.emit(local.node.target, *(given | {"reduction": SUM}).values())
        else:
            return run_as_is(local)
        return self.divided(local, given, total, classes, tokens) if averages else total

    def axes(self, local: Local) -> tuple[Axes, Axes]:
        """The axes that split classes, and those that split tokens."""
        return tuple(  # type: ignore[return-value]
            tuple(axis for letter in letters for axis in local.axes(letter)) for letters in (self.channel, self.tokens)
        )

    # --- the divisor of a mean

    def divided(self, local: Local, given: dict[str, Any], total: fx.Node, classes: Axes, tokens: Axes) -> fx.Node:
        """The mean, of a sum over the tokens of this rank."""
        if self.has_probabilities:
            return local.emit(aten.div.Scalar, total, self.rows)
        each = self._is_counted(local, given)
        if given["weight"] is not None:
            each = self._own_weight(local, given, *self._place(local, given, classes))
        count = local.emit(aten.sum.default, each)
        for name, size in (*tokens, *(classes if given["weight"] is not None else ())):
            count = local.emit(torch.ops.autopar.all_reduce.default, count, [], size, name, "vary")
        return local.emit(aten.div.Tensor, total, count)

    def _is_counted(self, local: Local, given: dict[str, Any]) -> fx.Node:
        return local.emit(aten.ne.Scalar, given["target"], self.ignored)

    def _own_weight(self, local: Local, given: dict[str, Any], place: fx.Node, mine: fx.Node) -> fx.Node:
        """The class weight of every token whose class is on this rank; 0 for other tokens."""
        flat = local.emit(aten.reshape.default, place, [-1])
        found = local.emit(aten.index_select.default, given["weight"], 0, flat)
        return zeroed(local, local.emit(aten.view_as.default, found, place), mine)

    # --- over split classes

    def over_classes(self, local: Local, given: dict[str, Any], axes: Axes) -> fx.Node:
        """The part of every token's loss that comes from this rank's classes."""
        emit = local.emit
        mass, dot = (self._of_probabilities if self.has_probabilities else self._of_indices)(local, given, axes)
        each = emit(aten.neg.default, dot)
        if self.normalizes:
            # A mass that is 1 in all, and of which no rank has a part of its own, is counted on one rank.
            lse = self._log_sum_exp(local, given["self"], axes, shared=mass is None)
            each = emit(aten.sub.Tensor, lse if mass is None else emit(aten.mul.Tensor, mass, lse), dot)
        return each if self.has_probabilities else zeroed(local, each, self._is_counted(local, given))

    def _of_probabilities(self, local: Local, given: dict[str, Any], axes: Axes) -> tuple[fx.Node, fx.Node]:
        """sum_c q_ic and sum_c q_ic x_ic."""
        q = given["target"]
        if self.smoothing:
            q = local.emit(aten.mul.Scalar, q, 1 - self.smoothing)
            q = local.emit(aten.add.Scalar, q, self.smoothing / self.classes)
        if given["weight"] is not None:
            q = local.emit(aten.mul.Tensor, q, self._weight_row(local, given))
        product = local.emit(aten.mul.Tensor, q, given["self"])
        return _class_sum(local, q), _class_sum(local, product)

    def _of_indices(self, local: Local, given: dict[str, Any], axes: Axes) -> tuple[fx.Node | None, fx.Node]:
        """The same sums for class indices. Without class weights the first is 1 over all ranks, and given as None."""
        emit, x, weight = local.emit, given["self"], given["weight"]
        place, mine = self._place(local, given, axes)
        dot = zeroed(local, _pick(local, x, place), mine)
        mass = None
        if weight is not None:
            mass = self._own_weight(local, given, place, mine)
            dot = emit(aten.mul.Tensor, mass, dot)
        if not self.smoothing:
            return mass, dot
        part = self.smoothing / self.classes
        if weight is not None:
            x = emit(aten.mul.Tensor, x, self._weight_row(local, given))
            mass = emit(
                aten.add.Tensor,
                emit(aten.mul.Scalar, mass, 1 - self.smoothing),
                emit(aten.mul.Scalar, emit(aten.sum.default, weight), part),
            )
        dot = emit(aten.mul.Scalar, dot, 1 - self.smoothing)
        return mass, emit(aten.add.Tensor, dot, _class_sum(local, x), alpha=part)

    def _weight_row(self, local: Local, given: dict[str, Any]) -> fx.Node:
        return local.emit(aten.reshape.default, given["weight"], [-1, *[1] * (self.ndim - 2)])

    def _place(self, local: Local, given: dict[str, Any], axes: Axes) -> tuple[fx.Node, fx.Node]:
        """Position of each token's class among this rank's (0 if another rank has it), and whether this rank has it."""
        emit, target = local.emit, given["target"]
        mine = self._is_counted(local, given)
        if axes:
            target = shifted(local, target, *self.channel)
            width = local.part(*self.channel)
            here = emit(aten.logical_and.default, emit(aten.ge.Scalar, target, 0), emit(aten.lt.Scalar, target, width))
            mine = emit(aten.logical_and.default, mine, here)
        return emit(aten.mul.Tensor, target, mine), mine

    def _log_sum_exp(self, local: Local, x: fx.Node, axes: Axes, *, shared: bool) -> fx.Node:
        """Log-sum-exp of every token; counted on one rank (R -> P) where `shared`, else on all (V)."""
        emit = local.emit
        peak = self._peak(local, x, axes)
        total = _class_sum(local, emit(aten.exp.default, emit(aten.sub.Tensor, x, peak)))
        for name, size in axes:
            backward = "vary" if shared else "all_reduce"
            total = emit(torch.ops.autopar.all_reduce.default, total, [], size, name, backward)
        lse = emit(aten.add.Tensor, emit(aten.log.default, total), emit(aten.squeeze.dim, peak, 1))
        for name, size in axes if shared else ():
            lse = emit(torch.ops.autopar.partial.default, lse, [], size, name, "vary")
        return lse

    def _peak(self, local: Local, x: fx.Node, axes: Axes) -> fx.Node:
        peak = local.emit(aten.amax.default, local.emit(aten.detach.default, x), [1], True)
        for name, size in axes:
            peak = local.emit(torch.ops.autopar.all_gather.default, peak, [1], size, name, "shard")
            peak = local.emit(aten.amax.default, peak, [1], True)
        return peak


def _class_sum(local: Local, x: fx.Node) -> fx.Node:
    return local.emit(aten.sum.dim_IntList, x, [1])


def _pick(local: Local, x: fx.Node, place: fx.Node) -> fx.Node:
    """x[n, place[n, ...], ...]. A gather would keep all of x for its backward."""
    emit = local.emit
    by_row = emit(aten.transpose.int, x, 1, -1)
    column = emit(aten.transpose.int, emit(aten.unsqueeze.default, place, 1), 1, -1)
    width, count = emit(aten.sym_size.int, x, 1), emit(aten.sym_numel.default, place)
    rows = emit(aten.arange.default, count, device=local.node.meta["val"].device)
    places = emit(aten.add.Tensor, emit(aten.reshape.default, column, [-1]), emit(aten.mul.Tensor, rows, width))
    flat = emit(aten.reshape.default, by_row, [-1])
    found = emit(aten.view_as.default, emit(aten.index_select.default, flat, 0, places), column)
    return emit(aten.squeeze.dim, emit(aten.transpose.int, found, 1, -1), 1)


def unreduced(rule: Callable[[Call], Spec]) -> Callable[[Call], Spec]:
    """Rule of a loss that treats elements, or rows, one by one; the pass `unreduce_losses` splits its reduction off."""

    def each(call: Call) -> Spec:
        if call["reduction"] in (MEAN, SUM):
            raise RuleDoesNotApply("it is reduced")
        return rule(call)

    return each


def _of_rows(text: str) -> Callable[[Call], Spec]:
    """Rule of a loss of rows that one line describes; it does not apply to a row without a batch."""

    def rule(call: Call) -> Spec:
        if not call.results[0].ndim:
            raise RuleDoesNotApply("one row")
        return line(text)(call)

    return unreduced(rule)


ELEMENTWISE = aten_ops(
    unreduced(elementwise),
    """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
    kl_div hinge_embedding_loss poisson_nll_loss margin_ranking_loss
    """,
)

ROWS: dict[str, Callable[[Call], Spec]] = {
    "aten.triplet_margin_loss": _of_rows("b.. c!, b.. c!, b.. c! -> b.."),
    "aten.cosine_embedding_loss": _of_rows("n c!, n c!, n -> n"),
    "aten.multi_margin_loss": _of_rows("n c!, n, w! -> n"),
    "aten.multilabel_margin_loss": _of_rows("n c!, n c! -> n"),
}
# Losses whose `reduction` is that of what they are without one.
REDUCED = frozenset((*ELEMENTWISE, *ROWS))

RULES: dict[str, Callable[[Call], Spec]] = {
    **ROWS,
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss_nd": negative_likelihood,
    **ELEMENTWISE,
}
