"""Ops that only rearrange: views, permutations, joining and cutting, padding."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.rules.notation import line
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


def shaped_like(rule: Callable[[Call], Spec]) -> Callable[[Call], Spec]:
    """view_as and its like: the second operand only tells the shape, and is split as the result is."""

    def shaped(call: Call) -> Spec:
        spec = rule(call)
        return replace(spec, operands=(*spec.operands[:1], *spec.results))

    return shaped


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
    """Makes the rule of ops that mix elements along some dims only (sort, tril, select).

    The dims `names(call)` cannot be split, in any operand or result; their sizes may differ between
    these. All other dims can be split. A tensor that has none of the dims `names(call)` (the result of
    `select`) has the others in the same order.

    Args:
        names: function that gives the dims of the first operand that the op works along.
        linear: whether the op is linear in all operands together, so that partial sums pass through it.
        is_view: whether the results share the memory of the first operand.
    """

    def rule(call: Call) -> Spec:
        touched = set(names(call))
        rank = call.operands[0].ndim
        sizes: dict[str, int] = {}
        whole: set[str] = set()

        def letters(tensor: torch.Tensor, tag: str) -> Letters:
            dims = [d for d in range(rank) if tensor.ndim == rank or d not in touched]
            if len(dims) != tensor.ndim:
                raise RuleDoesNotApply(f"a tensor of {tensor.ndim} dims beside one of {rank}")
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
    """cat: the joined dim stays whole, but for rows (dim 0) of equal parts: `s, s -> n! s`, as `cut` has it.

    Two views of a batch are then split alike. Along other dims nobody wants the parts of a feature.
    """
    if any(t.ndim != call.results[0].ndim for t in call.operands):
        raise RuleDoesNotApply("cat of an empty tensor of shape (0,)")
    sizes_along = {t.shape[0] for t in call.operands}
    if _dim(call) != (0,) or len(sizes_along) != 1 or sizes_along == {1}:
        spec, (dim,) = along(_dim)(call), _dim(call)
        parts = [x for letters in spec.operands for x in letters[dim]]
        joins = {x: tuple(parts) for x in spec.results[0][dim] if len(parts) == len(spec.operands)}
        return replace(spec, joins=joins, flops=call.results[0].numel())
    letters, sizes = plain(call.operands[0].shape)
    count: Dim = ("n",) if len(call.operands) > 1 else ()
    sizes |= dict.fromkeys(count, len(call.operands))
    return Spec(
        (letters,) * len(call.operands), (((*count, *letters[0]), *letters[1:]),), sizes,
        whole=frozenset(count), linear=(frozenset(range(len(call.operands))),),
        flops=call.results[0].numel(),
    )  # fmt: skip


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
    """slice: the dim stays whole, unless all of it is taken, or one of every `step`."""
    dim = call.dim(call["dim"])
    if _is_one_of_every_step(call, dim):
        return _strided(call, dim)
    if call.operands[0].shape[dim] != call.results[0].shape[dim]:
        return along(_dim, is_view=True)(call)
    letters, sizes = plain(call.operands[0].shape)
    return Spec((letters,), (letters,), sizes, linear=FIRST, is_view=True, localize=_take_all(dim))


def _is_one_of_every_step(call: Call, dim: int) -> bool:
    size, step = int(call.operands[0].shape[dim]), call["step"]
    first = call["start"] or 0
    return step > 1 and 0 <= first < step and call.results[0].shape[dim] * step == size > step


def _strided(call: Call, dim: int) -> Spec:
    """`s n! -> s`: gates that are stored interleaved are split as those that stand side by side."""
    letters, sizes = plain(call.operands[0].shape)
    step, count = call["step"], int(call.results[0].shape[dim])
    sizes = {k: v for k, v in sizes.items() if k != f"d{dim}"} | {"s": count, "n": step}
    first = call["start"] or 0

    def localize(local: Local) -> fx.Node:
        return local.emit(aten.slice.Tensor, local.args[0], dim, first, sys.maxsize, step)

    operand = (*letters[:dim], ("s", "n"), *letters[dim + 1 :])
    result = (*letters[:dim], ("s",), *letters[dim + 1 :])
    return Spec((operand,), (result,), sizes, whole=frozenset({"n"}), linear=FIRST, is_view=True,
                localize=localize)  # fmt: skip


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
    """repeat: repeated dims stay whole, but for rows (dim 0): `s -> n! s`, as if they were joined."""
    lead = len(call["repeats"]) - call.operands[0].ndim
    result, sizes = plain(call.results[0].shape, "y")
    operand: list[Dim] = []
    names = list(result)
    for i, size in enumerate(call.operands[0].shape):
        again = call["repeats"][lead + i] != 1
        rows = again and lead + i == 0 and size > 1
        letter = f"{'x' if again and not rows else 'd'}{i}"
        operand.append((letter,) if size > 1 else ())
        sizes |= {letter: int(size)} if size > 1 else {}
        sizes |= {"y0": call["repeats"][0]} if rows else {}
        times = names[lead + i] if again else ()
        names[lead + i] = times if again and not rows else (*times, *operand[-1])
    used = {letter for dim in (*operand, *names) for letter in dim}
    sizes = {letter: size for letter, size in sizes.items() if letter in used}
    whole = frozenset(letter for letter in sizes if letter[0] in "xy")
    return Spec((tuple(operand),), (tuple(names),), sizes, whole=whole, linear=FIRST)


def _rolled(call: Call) -> tuple[int, ...]:
    return call.dims(call["dims"])


def flipped(call: Call) -> Spec:
    """flip: the dims stay whole; none is named by an empty list."""
    return along(lambda _: call.dims(call["dims"]) if call["dims"] else ())(call)


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


def diagonal(call: Call) -> Spec:
    """diagonal: two dims go, their diagonal is a new last dim; all three stay whole."""
    first, second = sorted((call.dim(call["dim1"]), call.dim(call["dim2"])))
    letters, sizes = plain(call.operands[0].shape)
    count = call.results[0].shape[-1]
    new: Dim = ("new",) if count > 1 else ()
    sizes |= {"new": count} if count > 1 else {}
    kept = [x for d, x in enumerate(letters) if d not in (first, second)]
    whole = frozenset((*letters[first], *letters[second], *new))
    return Spec((letters,), ((*kept, new),), sizes, whole=whole, linear=FIRST, is_view=True)


def diagonal_made(call: Call) -> Spec:
    """diag_embed: the last dim becomes two, which stay whole."""
    rank = call.results[0].ndim
    first, second = (call[name] % rank for name in ("dim1", "dim2"))
    letters, sizes = plain(call.operands[0].shape)
    rest = iter(letters[:-1])
    result: list[Dim] = []
    for d, size in enumerate(call.results[0].shape):
        new: Dim = (f"y{d}",) if size > 1 else ()
        own = d in (first, second)
        sizes |= {f"y{d}": int(size)} if own and size > 1 else {}
        result.append(new if own else next(rest))
    whole = frozenset((*letters[-1], *(x for x in sizes if x[0] == "y")))
    return Spec((letters,), (tuple(result),), sizes, whole=whole, linear=FIRST,
                flops=call.results[0].numel())  # fmt: skip


def windows(call: Call) -> Spec:
    """unfold: windows along a dim, each in a new last dim; both stay whole."""
    dim = call.dim(call["dimension"])
    letters, sizes = plain(call.operands[0].shape)
    count, width = call.results[0].shape[dim], call.results[0].shape[-1]
    if not letters:
        raise RuleDoesNotApply("a tensor without dims")
    sizes |= {name: size for name, size in (("y", count), ("w", width)) if size > 1}
    new, last = (((name,) if name in sizes else ()) for name in ("y", "w"))
    whole = frozenset((*letters[dim], *new, *last))
    result = (*letters[:dim], new, *letters[dim + 1 :], last)
    return Spec((letters,), (result,), sizes, whole=whole, linear=FIRST, is_view=True)


def tiled(call: Call) -> Spec:
    """tile: repeat, with ones for the leading dims."""
    lead = call.operands[0].ndim - len(call["dims"])
    call.arguments["repeats"] = [1] * lead + list(call["dims"])
    return repeated(call)


def filled(call: Call) -> Spec:
    """new_zeros and its like: of the operand only its type is used."""
    own, sizes = plain(call.operands[0].shape, "x")
    result, more = plain(call.results[0].shape, "y")
    return Spec((own,), (result,), sizes | more, whole=frozenset(sizes), localize=_fill_locally)


def _fill_locally(local: Local) -> fx.Node:
    x, _, *rest = local.args
    return local.emit(local.node.target, x, list(local.result_shapes[0]), *rest, **local.kwargs)


def shuffled(call: Call) -> Spec:
    """pixel_shuffle: `b.. c p! q!, h, w -> b.. c, h p!, w q!`, channels cut into blocks of p x q."""
    return _shuffle(call, call.operands[0], call.results[0], call["upscale_factor"])


def unshuffled(call: Call) -> Spec:
    """pixel_unshuffle: pixel_shuffle the other way."""
    spec = _shuffle(call, call.results[0], call.operands[0], call["downscale_factor"])
    return replace(spec, operands=spec.results, results=spec.operands)


def _shuffle(call: Call, deep: torch.Tensor, wide: torch.Tensor, factor: int) -> Spec:
    lead, sizes = plain(deep.shape[:-3])
    names = {
        "c": wide.shape[-3],
        "h": deep.shape[-2],
        "w": deep.shape[-1],
        "p": factor,
        "q": factor,
    }
    sizes |= {name: int(size) for name, size in names.items() if size > 1}

    def dims(*texts: str) -> tuple[Dim, ...]:
        return tuple(tuple(x for x in text if x in sizes) for text in texts)

    return Spec(
        ((*lead, *dims("cpq", "h", "w")),), ((*lead, *dims("c", "hp", "wq")),), sizes,
        whole=frozenset({"p", "q"} & sizes.keys()), linear=FIRST, flops=deep.numel(),
    )  # fmt: skip


def grid(call: Call) -> Spec:
    """meshgrid: vectors `i`, `j` ... -> tensors of all their dims."""
    sizes = {f"d{i}": t.numel() for i, t in enumerate(call.operands) if t.numel() > 1}
    if any(t.ndim != 1 for t in call.operands):
        raise RuleDoesNotApply("a number among the vectors")
    names: list[Dim] = [(f"d{i}",) if f"d{i}" in sizes else () for i in range(len(call.operands))]
    result = list(names)
    if call.arguments.get("indexing") == "xy" and len(result) > 1:
        result[:2] = result[1::-1]
    return Spec(tuple((n,) for n in names), (tuple(result),) * len(names), sizes)


def interleaved(call: Call) -> Spec:
    """repeat_interleave: `b.. d -> b.. d r!`, every element of the dim r times."""
    if call.arguments.get("dim") is None or len(call.operands) > 1:
        raise RuleDoesNotApply("all elements in a row, or counts in a tensor")
    if call["output_size"] is not None:
        return along(_dim)(call)
    dim, times = call.dim(call["dim"]), int(call["repeats"])
    letters, sizes = plain(call.operands[0].shape)
    again: Dim = ("r",) if times > 1 else ()
    sizes |= dict.fromkeys(again, times)
    result = (*letters[:dim], (*letters[dim], *again), *letters[dim + 1 :])
    return Spec((letters,), (result,), sizes, whole=frozenset(again), linear=FIRST,
                flops=call.results[0].numel())  # fmt: skip


def named(dim: int) -> Callable[[Call], Spec]:
    """Rule of ops that work along one dim that their name tells."""

    def rule(call: Call) -> Spec:
        if any(t.ndim <= max(dim, 1) for t in [*call.operands, *call.results]):
            raise RuleDoesNotApply("dims are added first")
        return along(lambda _: (dim,))(call)

    return rule


def _turned(call: Call) -> tuple[int, ...]:
    return () if call["k"] % 4 == 0 else call.dims(call["dims"])


def joined_windows(call: Call) -> Spec:
    """im2col (F.unfold): `b.. c h! w! -> b.. c k! l!`, the windows' points behind their channel."""
    return _windows_of(call.operands[0], call.results[0], call["kernel_size"])


def parted_windows(call: Call) -> Spec:
    """col2im (F.fold): im2col the other way."""
    spec = _windows_of(call.results[0], call.operands[0], call["kernel_size"])
    return replace(spec, operands=spec.results, results=spec.operands)


def _windows_of(image: torch.Tensor, columns: torch.Tensor, kernel: Sequence[int]) -> Spec:
    names = {
        "n": image.shape[0] if image.ndim > 3 else 1, "c": image.shape[-3], "h": image.shape[-2],
        "w": image.shape[-1], "k": math.prod(kernel), "l": columns.shape[-1],
    }  # fmt: skip
    sizes = {name: int(size) for name, size in names.items() if size > 1}

    def dims(*texts: str) -> Letters:
        own = ("n", *texts) if image.ndim > 3 else texts
        return tuple(tuple(x for x in text if x in sizes) for text in own)

    return Spec(
        (dims("c", "h", "w"),), (dims("ck", "l"),), sizes, whole=frozenset(sizes) - {"n", "c"},
        linear=FIRST, flops=columns.numel(),
    )  # fmt: skip


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
    "aten.flip": flipped,
    "aten.roll": along(_rolled),
    "aten.slice_scatter": along(_dim),
    "aten.select_scatter": along(_dim),
    "aten.slice_copy": sliced,
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
    "aten.diagonal": diagonal,
    "aten.linalg_diagonal": diagonal,
    "aten.diag_embed": diagonal_made,
    "aten.unfold": windows,
    "aten.tile": tiled,
    "aten.pixel_shuffle": shuffled,
    "aten.pixel_unshuffle": unshuffled,
    "aten.channel_shuffle": along(lambda _: (1,)),
    "aten.meshgrid": grid,
    "aten.repeat_interleave": interleaved,
    "aten.rot90": along(_turned),
    "aten.fliplr": along(lambda _: (1,)),
    "aten.flipud": along(lambda _: (0,)),
    "aten.hstack": named(1),
    "aten.vstack": named(0),
    "aten.dstack": named(2),
    "aten.column_stack": named(1),
    "aten.hsplit": named(1),
    "aten.vsplit": named(0),
    "aten.dsplit": named(2),
    "aten.unsafe_split": cut,
    "aten.unsafe_split_with_sizes": cut,
    "aten.unsafe_chunk": cut,
    "aten.im2col": joined_windows,
    "aten.col2im": parted_windows,
    "aten.view_as": shaped_like(view),
    "aten.reshape_as": shaped_like(view),
    "aten.expand_as": shaped_like(expand),
    "aten.view_as_real": line("b.. -> b.. z! | linear 0", is_view=True),
    "aten.view_as_complex": line("b.. z! -> b.. | linear 0", is_view=True),
    "aten.tensor_split": along(_dim, is_view=True),
    "aten.tril": along(lambda call: range(call.operands[0].ndim)[-2:]),
    "aten.triu": along(lambda call: range(call.operands[0].ndim)[-2:]),
    **{f"aten.{name}": filled for name in ("new_zeros", "new_ones", "new_full")},
}
COPIES = (
    "view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "select", "narrow", "split",
    "split_with_sizes", "unbind", "diagonal", "unfold",
)  # fmt: skip
RULES |= {f"aten.{name}_copy": replacing(RULES[f"aten.{name}"], is_view=False) for name in COPIES}
