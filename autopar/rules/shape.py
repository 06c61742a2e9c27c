"""Ops that only rearrange: views, permutations, joining and cutting, padding."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.rules.spec import Call, Dim, Letters, Local, RuleDoesNotApply, Spec, flattens, plain

aten = torch.ops.aten
FIRST = (frozenset({0}),)


def _reshape_locally(local: Local) -> fx.Node:
    return local.emit(aten.reshape.default, local.args[0], list(local.result_shapes[0]))


def _expand_locally(local: Local) -> fx.Node:
    return local.emit(aten.expand.default, local.args[0], list(local.result_shapes[0]))


def view(call: Call) -> Spec:
    """`b, s -> b s` and its like: both shapes are cut at each other's boundaries."""
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
        (_frozen(letters),), (_frozen(result),), sizes, whole=frozenset(whole), linear=FIRST,
        is_view=flattens(call.operands[0], target), localize=_reshape_locally,
    )  # fmt: skip


Pieces = list[tuple[int, int]]  # (size, dim) of parts of dims, most significant first


def common_factors(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[Pieces, Pieces]]:
    """Cuts two shapes of the same size at each other's boundaries, most significant first.

    Yields the pieces of either side that make up each other: one piece and one piece of the same
    size, or, where neither size divides the other, all pieces until the boundaries meet again.
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


def _until_boundaries_meet(
    taken: Pieces, other: Pieces, left: Pieces, right: Pieces
) -> tuple[Pieces, Pieces]:
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


def expand(call: Call) -> Spec:
    """`1 -> n` where the result is larger, and the same letter elsewhere."""
    result, sizes = plain(call.results[0].shape)
    lead = call.results[0].ndim - call.operands[0].ndim
    operand = tuple(
        result[lead + i] if size > 1 else () for i, size in enumerate(call.operands[0].shape)
    )
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


def along(
    names: Callable[[Call], Sequence[int]], *, linear: bool = True, is_view: bool = False
) -> Callable[[Call], Spec]:
    """Rule of ops that work along some dims and leave the others alone, whatever comes out there.

    The dims `names(call)` stay whole in every operand and result; an operand or result that lacks a
    dim (`select`, an index) is aligned with the others by position.
    """

    def rule(call: Call) -> Spec:
        touched = set(names(call))
        rank = call.operands[0].ndim
        sizes: dict[str, int] = {}
        whole: set[str] = set()

        def letters(tensor: torch.Tensor, tag: str) -> Letters:
            dims = [d for d in range(rank) if tensor.ndim == rank or d not in touched]
            result: list[Dim] = []
            for dim, size in zip(dims, tensor.shape, strict=True):
                letter = f"{tag}{dim}" if dim in touched else f"d{dim}"
                if size > 1:
                    sizes[letter] = int(size)
                    whole.update({letter} if dim in touched else ())
                result.append((letter,) if size > 1 else ())
            return tuple(result)

        operands = tuple(letters(t, f"x{i}_") for i, t in enumerate(call.operands))
        results = tuple(letters(t, f"y{i}_") for i, t in enumerate(call.results))
        everything = (frozenset(range(len(operands))),) if linear else ()
        return Spec(
            operands, results, sizes, whole=frozenset(whole), linear=everything, is_view=is_view
        )

    return rule


def _dim(call: Call) -> tuple[int, ...]:
    return (call.dim(call["dim"]),)


def joined(call: Call) -> Spec:
    """cat: the joined dim stays whole."""
    if any(t.ndim != call.results[0].ndim for t in call.operands):
        raise RuleDoesNotApply("cat of an empty tensor of shape (0,)")
    return replace(along(_dim)(call), flops=call.results[0].numel())


def stacked(call: Call) -> Spec:
    """stack: a new dim, whole."""
    letters, sizes = plain(call.operands[0].shape)
    dim = call["dim"] % call.results[0].ndim
    new: Dim = ("new",) if len(call.operands) > 1 else ()
    result = (*letters[:dim], new, *letters[dim:])
    sizes |= {"new": len(call.operands)} if new else {}
    everything = (frozenset(range(len(call.operands))),)
    return Spec(
        (letters,) * len(call.operands), (result,), sizes, whole=frozenset(new), linear=everything
    )


def cut(call: Call) -> Spec:
    """split into n equal parts: `n! s -> s, s ...`, so that each part can be split alike.

    A fused projection of query, key and value is then split inside each of them. Unequal parts keep
    the dim whole.
    """
    dim, count = call.dim(call["dim"]), len(call.results)
    sizes_along = {t.shape[dim] for t in call.results}
    if len(sizes_along) != 1 or count == 1:
        return along(_dim, is_view=True)(call)
    letters, sizes = plain(call.operands[0].shape)
    size = sizes_along.pop()
    inner: Dim = ("s",) if size > 1 else ()
    sizes = (
        {k: v for k, v in sizes.items() if k != f"d{dim}"}
        | {"n": count}
        | dict.fromkeys(inner, size)
    )
    operand = (*letters[:dim], ("n", *inner), *letters[dim + 1 :])
    result = (*letters[:dim], inner, *letters[dim + 1 :])
    return Spec(
        (operand,), (result,) * count, sizes, whole=frozenset({"n"}), linear=FIRST, is_view=True,
        localize=_cut_locally(dim),
    )  # fmt: skip


def _cut_locally(dim: int) -> Callable[[Local], fx.Node]:
    def localize(local: Local) -> fx.Node:
        return local.emit(aten.split.Tensor, local.args[0], local.result_shapes[0][dim], dim)

    return localize


def unbound(call: Call) -> Spec:
    """unbind: every result lacks the dim, which stays whole."""
    return along(_dim, is_view=True)(call)


def sliced(call: Call) -> Spec:
    """slice: the dim stays whole, unless all of it is taken."""
    dim = call.dim(call["dim"])
    if call.operands[0].shape[dim] != call.results[0].shape[dim]:
        return along(_dim, is_view=True)(call)
    letters, sizes = plain(call.operands[0].shape)
    return Spec((letters,), (letters,), sizes, linear=FIRST, is_view=True, localize=_take_all(dim))


def _take_all(dim: int) -> Callable[[Local], fx.Node]:
    def localize(local: Local) -> fx.Node:
        return local.emit(aten.slice.Tensor, local.args[0], dim, 0, sys.maxsize)

    return localize


def _padded_dims(call: Call) -> tuple[int, ...]:
    pads, rank = call["pad"], call.operands[0].ndim
    pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]
    return tuple(rank - 1 - i for i, pair in enumerate(pairs) if any(pair))


def padded(call: Call) -> Spec:
    """pad: padded dims stay whole; a partial sum passes where zeros are added."""
    zeros = call.arguments.get("mode", "constant") == "constant" and not call["value"]
    return along(_padded_dims, linear=zeros)(call)


def repeated(call: Call) -> Spec:
    """repeat: repeated dims stay whole."""
    lead = len(call["repeats"]) - call.operands[0].ndim
    result, sizes = plain(call.results[0].shape, "y")
    operand: list[Dim] = []
    names = list(result)
    for i, size in enumerate(call.operands[0].shape):
        again = call["repeats"][lead + i] != 1
        letter = f"{'x' if again else 'd'}{i}"
        operand.append((letter,) if size > 1 else ())
        sizes |= {letter: int(size)} if size > 1 else {}
        names[lead + i] = names[lead + i] if again else operand[-1]
    used = {letter for dim in (*operand, *names) for letter in dim}
    sizes = {letter: size for letter, size in sizes.items() if letter in used}
    whole = frozenset(letter for letter in sizes if letter[0] in "xy")
    return Spec((tuple(operand),), (tuple(names),), sizes, whole=whole, linear=FIRST)


def _flipped(call: Call) -> tuple[int, ...]:
    return call.dims(call["dims"])


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
    "aten.squeeze": rearranged(_squeezed),
    "aten.select": along(_dim, is_view=True),
    "aten.narrow": along(_dim, is_view=True),
    "aten.slice": sliced,
    "aten.cat": joined,
    "aten.stack": stacked,
    "aten.split": cut,
    "aten.split_with_sizes": cut,
    "aten.chunk": cut,
    "aten.unbind": unbound,
    "aten.pad": padded,
    "aten.constant_pad_nd": padded,
    "aten.repeat": repeated,
    "aten.flip": along(_flipped),
    "aten.roll": along(_flipped),
    "aten.slice_scatter": along(_dim),
    "aten.select_scatter": along(_dim),
}
