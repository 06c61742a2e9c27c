"""Rules of reshapes, permutations and broadcasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.rules.notation import line
from autopar.rules.spec import Call, Letters, Local, Spec, flattens, plain

aten = torch.ops.aten
FIRST = (frozenset({0}),)


def _reshape_locally(local: Local) -> fx.Node:
    return local.emit(aten.reshape.default, local.args[0], list(local.result_shapes[0]))


def _expand_locally(local: Local) -> fx.Node:
    return local.emit(aten.expand.default, local.args[0], list(local.result_shapes[0]))


def view(call: Call) -> Spec:
    """`b, s -> b s` and the like: both shapes are cut at each other's boundaries."""
    source, target = list(call.operands[0].shape), list(call.results[0].shape)
    letters: list[list[str]] = [[] for _ in source]
    result: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for i, (left, right) in enumerate(common_factors(source, target)):
        agrees = len(left) == len(right) == 1
        for pieces, side, tag in ((left, letters, "x"), (right, result, "y")):
            for j, (size, dim) in enumerate(pieces):
                letter = f"d{i}" if agrees else f"{tag}{i}_{j}"
                side[dim].append(letter)
                sizes[letter] = size
                whole.update(() if agrees else (letter,))
    return Spec(
        (_frozen(letters),),
        (_frozen(result),),
        sizes,
        whole=frozenset(whole),
        linear=FIRST,
        is_view=flattens(call.operands[0], target),
        localize=_reshape_locally,
    )


Pieces = list[tuple[int, int]]  # (size, dim) of parts of dims, most significant first


def common_factors(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[Pieces, Pieces]]:
    """Matches the dims of two shapes with the same number of elements, as a reshape needs it.

    Dims are cut into pieces (size, dim), from the most significant on; dims of size 1 are left out.
    Yields pairs (pieces of `source`, pieces of `target`) that hold the same elements: one piece of equal
    size on each side, or, where neither size divides the other, all pieces up to the next common cut.

    >>> list(common_factors((4, 6), (8, 3)))
    [([(4, 0)], [(4, 0)]), ([(2, 1)], [(2, 0)]), ([(3, 1)], [(3, 1)])]
    """
    left = [(size, dim) for dim, size in enumerate(source) if size != 1]
    right = [(size, dim) for dim, size in enumerate(target) if size != 1]
    while left and right:
        (a, i), (b, j) = left.pop(0), right.pop(0)
        small = min(a, b)
        if max(a, b) % small == 0:
            yield [(small, i)], [(small, j)]
            if a > small:
                left.insert(0, (a // small, i))
            if b > small:
                right.insert(0, (b // small, j))
        else:
            yield _until_boundaries_meet([(a, i)], [(b, j)], left, right)
    assert not left and not right, (source, target)


def _until_boundaries_meet(taken: Pieces, other: Pieces, left: Pieces, right: Pieces) -> tuple[Pieces, Pieces]:
    def total(pieces: Pieces) -> int:
        return math.prod(size for size, _ in pieces)

    while total(taken) != total(other):
        if total(taken) < total(other):
            taken.append(left.pop(0))
        else:
            other.append(right.pop(0))
    return taken, other


def _frozen(letters: list[list[str]]) -> Letters:
    return tuple(tuple(dim) for dim in letters)


def shaped_like(rule: Callable[[Call], Spec]) -> Callable[[Call], Spec]:
    """view_as and the like: the second operand only gives the shape, and is split like the result."""

    def shaped(call: Call) -> Spec:
        spec = rule(call)
        return replace(spec, operands=(*spec.operands[:1], *spec.results))

    return shaped


def expand(call: Call) -> Spec:
    """expand: a new letter where the result is larger than the operand, and the same letter elsewhere."""
    result, sizes = plain(call.results[0].shape)
    lead = call.results[0].ndim - call.operands[0].ndim
    operand = tuple(result[lead + i] if size > 1 else () for i, size in enumerate(call.operands[0].shape))
    return Spec((operand,), (result,), sizes, linear=FIRST, is_view=True, localize=_expand_locally)


def rearranged(order: Callable[[Call], Sequence[int | None]]) -> Callable[[Call], Spec]:
    """Rule of ops whose result's dim i is the operand's dim `order(call)[i]` (None: a new dim of 1)."""

    def rule(call: Call) -> Spec:
        letters, sizes = plain(call.operands[0].shape)
        result = tuple(() if source is None else letters[source] for source in order(call))
        return Spec((letters,), (result,), sizes, linear=FIRST, is_view=True)

    return rule


def _transposed(call: Call) -> list[int | None]:
    order: list[int | None] = list(range(call.operands[0].ndim))
    first, second = call.dim(call["dim0"]), call.dim(call["dim1"])
    order[first], order[second] = order[second], order[first]
    return order


def _unsqueezed(call: Call) -> list[int | None]:
    order: list[int | None] = list(range(call.operands[0].ndim))
    order.insert(call["dim"] % call.results[0].ndim, None)
    return order


def _squeezed(call: Call) -> list[int | None]:
    named = call.arguments.get("dim")
    gone = () if named == [] else call.dims(named)
    shape = call.operands[0].shape
    return [dim for dim in range(len(shape)) if dim not in gone or shape[dim] != 1]


def replacing(rule: Callable[[Call], Spec], **changes: Any) -> Callable[[Call], Spec]:
    """The rule with some attributes of its spec changed."""
    return lambda call: replace(rule(call), **changes)


def _moved(call: Call) -> list[int | None]:
    rank = call.operands[0].ndim
    sources, targets = (
        [x % rank for x in ([value] if isinstance(value, int) else value)]
        for value in (call["source"], call["destination"])
    )
    order: list[int | None] = [None] * rank
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter(d for d in range(rank) if d not in sources)
    return [next(rest) if d is None else d for d in order]


def _reversed(call: Call) -> list[int]:
    return list(range(call.operands[0].ndim))[::-1]


def _last_two(call: Call) -> list[int]:
    rank = call.operands[0].ndim
    return list(range(rank)) if rank < 2 else [*range(rank - 2), rank - 1, rank - 2]


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.view": view,
    "aten.reshape": view,
    "aten._unsafe_view": view,
    "aten.flatten": view,
    "aten.unflatten": view,
    "aten.expand": expand,
    "aten.permute": rearranged(lambda call: [call.dim(d) for d in call["dims"]]),
    "aten.transpose": rearranged(_transposed),
    "aten.t": rearranged(lambda call: list(range(call.operands[0].ndim))[::-1]),
    "aten.unsqueeze": rearranged(_unsqueezed),
    # A local dim of size 1 may be a part of a larger one, which squeeze would take away.
    "aten.squeeze": replacing(rearranged(_squeezed), localize=_reshape_locally),
    "aten.ravel": view,
    "aten.broadcast_to": expand,
    "aten.atleast_1d": view,
    "aten.atleast_2d": view,
    "aten.atleast_3d": view,
    "aten.movedim": rearranged(_moved),
    "aten.moveaxis": rearranged(_moved),
    "aten.numpy_T": rearranged(_reversed),
    "aten.matrix_H": rearranged(_reversed),
    "aten.mT": rearranged(_last_two),
    "aten.mH": rearranged(_last_two),
    "aten.adjoint": rearranged(_last_two),
    "aten.view_as": shaped_like(view),
    "aten.reshape_as": shaped_like(view),
    "aten.expand_as": shaped_like(expand),
    "aten.view_as_real": line("b.. -> b.. z! | linear 0", is_view=True),
    "aten.view_as_complex": line("b.. z! -> b.. | linear 0", is_view=True),
}
_COPIES = ("view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze")
RULES |= {f"aten.{name}_copy": replacing(RULES[f"aten.{name}"], is_view=False) for name in _COPIES}
