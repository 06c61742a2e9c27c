"""Rules of reductions, and of ops that work along one dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopar.rules.elementwise import elementwise
from autopar.rules.shape import along
from autopar.rules.spec import (
    Call,
    Dim,
    Letters,
    Local,
    RuleDoesNotApply,
    Spec,
    aten_ops,
    local_arguments,
    needs_a_row,
    parts,
    plain,
)
from autopar.rules.views import FIRST

aten = torch.ops.aten


def _reduced(call: Call) -> tuple[int, ...]:
    return call.dims(call.arguments.get("dim"))


def _shapes(call: Call, gone: tuple[int, ...]) -> tuple[Letters, Letters, dict[str, int]]:
    letters, sizes = plain(call.operands[0].shape)
    kept: list[Dim] = [() if dim in gone else letter for dim, letter in enumerate(letters)]
    if call.results[0].ndim < len(letters):
        kept = [letter for dim, letter in enumerate(letters) if dim not in gone]
    return letters, tuple(kept), sizes


def summed(call: Call) -> Spec:
    """sum: splitting a summed dim leaves a partial sum."""
    gone = _reduced(call)
    letters, result, sizes = _shapes(call, gone)
    sums = frozenset(letter for dim in gone for letter in letters[dim])
    spec = Spec((letters,), (result,), sizes, sums=sums, linear=FIRST)
    return replace(spec, flops=spec.points)


def averaged(call: Call) -> Spec:
    """mean: a sum, divided by the size of the whole dim."""
    spec = summed(call)
    return replace(spec, normalized=spec.sums if call.results[0].ndim else frozenset(), localize=_average_locally(spec))


def _average_locally(spec: Spec) -> Callable[[Local], fx.Node]:
    letters, count = sorted(spec.sums), math.prod(spec.sizes[letter] for letter in spec.sums)

    def localize(local: Local) -> fx.Node:
        if not local.is_even(letters):
            return local.emit(aten.div.Scalar, _sum_locally(local), count)
        mean = local.emit(local.node.target, *local.args, **local.kwargs)
        divisor = parts(local, letters)
        return mean if divisor == 1 else local.emit(aten.div.Scalar, mean, divisor)

    return localize


def _sum_locally(local: Local) -> fx.Node:
    """The sum in place of a mean, of a part that may have no elements."""
    given = local_arguments(local)
    if given.get("dim") is None:
        return local.emit(aten.sum.default, given["self"], dtype=given["dtype"])
    return local.emit(aten.sum.dim_IntList, given["self"], given["dim"], given["keepdim"], dtype=given["dtype"])


def whole_reduction(call: Call) -> Spec:
    """amax, var, argmax and so on: the reduced dims stay whole."""
    gone = _reduced(call)
    letters, result, sizes = _shapes(call, gone)
    whole = frozenset(letter for dim in gone for letter in letters[dim])
    spec = Spec((letters,), (result,) * len(call.results), sizes, whole=whole)
    return replace(spec, flops=spec.points)


def extremum(call: Call) -> Spec:
    """min and max are point-wise between two tensors, and reductions of one."""
    return elementwise(call) if len(call.operands) == 2 else whole_reduction(call)


def _dim(call: Call) -> tuple[int, ...]:
    return (call.dim(call["dim"]),)


def scanned(call: Call) -> Spec:
    """cumsum, softmax and so on: the dim stays whole; the others can be split."""
    letters, sizes = plain(call.operands[0].shape)
    whole = frozenset(letters[call.dim(call["dim"])])
    spec = Spec((letters,), (letters,) * len(call.results), sizes, whole=whole)
    return replace(spec, flops=spec.points)


def selected(call: Call) -> Spec:
    """topk, sort: the dim stays whole and may change its size."""
    return along(lambda c: (c.dim(c["dim"]),) if c.operands[0].ndim else (), linear=False)(call)


def counted(call: Call) -> Spec:
    """nansum, count_nonzero: a sum of terms that are not linear in the operand."""
    return replace(summed(call), linear=())


def compared(call: Call) -> Spec:
    """cross, cosine_similarity and so on: two broadcast tensors with equally many dims, one of which stays whole."""
    if len({t.ndim for t in call.operands}) > 1:
        raise RuleDoesNotApply("tensors of different ranks")
    return along(_dim_of_three, linear=False)(call)


def crossed(call: Call) -> Spec:
    """cross: a part takes the dim that the whole takes, also where the part's first dim of size 3 is another."""
    dim = _dim_of_three(call)[0]
    return replace(compared(call), localize=lambda local: local.emit(local.node.target, *local.args[:2], dim))


def _dim_of_three(call: Call) -> tuple[int, ...]:
    """The dim of torch.cross without an argument is the first of size 3; that of distances is the last."""
    dim = call.arguments.get("dim", -1)
    return (call.operands[0].shape.index(3) if dim is None else call.dim(dim),)


@needs_a_row
def quantiles(call: Call) -> Spec:
    """quantile removes the dim, or leaves it with size 1; several quantiles are a new first dim."""
    if call["dim"] is None:
        raise RuleDoesNotApply("of all elements")
    x, dim = call.operands[0], call.dim(call["dim"])
    letters, sizes = plain(x.shape)
    rest = [() if d == dim else own for d, own in enumerate(letters)]
    rest = rest if call["keepdim"] else [own for d, own in enumerate(letters) if d != dim]
    count = call.operands[1].numel() if len(call.operands) > 1 else 1
    new: Dim = ("q",) if count > 1 else ()
    sizes |= dict.fromkeys(new, count)
    first = (new,) if len(call.operands) > 1 and call.operands[1].ndim else ()
    return Spec(
        (letters, first)[: len(call.operands)],
        ((*first, *rest),),
        sizes,
        whole=frozenset((*letters[dim], *new)),
        flops=x.numel(),
    )


def renormed(call: Call) -> Spec:
    """renorm: norms are taken over all dims except one."""
    letters, sizes = plain(call.operands[0].shape)
    free = letters[call.dim(call["dim"])]
    spec = Spec((letters,), (letters,), sizes, whole=frozenset(sizes) - {*free})
    return replace(spec, flops=3 * spec.points)


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.sum": summed,
    "aten.mean": averaged,
    "aten.nansum": counted,
    "aten.count_nonzero": counted,
    "aten.renorm": renormed,
    "aten.cross": crossed,
    "aten.quantile": quantiles,
    "aten.nanquantile": quantiles,
    **aten_ops(
        whole_reduction,
        """
        amax amin var std argmax argmin logsumexp prod any all norm linalg_vector_norm linalg_norm var_mean std_mean
        nanmean aminmax median nanmedian mode kthvalue
        """,
    ),
    **aten_ops(
        scanned, "cumsum cumprod softmax _softmax log_softmax _log_softmax _safe_softmax logcumsumexp cummax cummin"
    ),
    "aten.max": extremum,
    "aten.min": extremum,
    "aten.topk": selected,
    "aten.sort": selected,
    "aten.argsort": selected,
    "aten.glu": selected,
    "aten.msort": along(lambda _: (0,), linear=False),
    **aten_ops(
        compared,
        """
        diff linalg_cross cosine_similarity pairwise_distance trapezoid trapz cumulative_trapezoid
        _softmax_backward_data _log_softmax_backward_data
        """,
    ),
}
