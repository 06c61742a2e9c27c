"""Rules of ops that join, cut, repeat or pad along dims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.rules.spec import Call, Dim, Letters, Local, RuleDoesNotApply, Spec, aten_ops, plain
from autopar.rules.views import FIRST, replacing

aten = torch.ops.aten


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
                if size != 1:
                    sizes[letter] = int(size)
                    whole.update({letter} if dim in touched else ())
                result.append((letter,) if size != 1 else ())
            return tuple(result)

        operands = tuple(letters(t, f"x{i}_") for i, t in enumerate(call.operands))
        results = tuple(letters(t, f"y{i}_") for i, t in enumerate(call.results))
        everything = (frozenset(range(len(operands))),) if linear else ()
        return Spec(operands, results, sizes, whole=frozenset(whole), linear=everything, is_view=is_view)

    return rule


def named_dim(call: Call) -> tuple[int, ...]:
    """The dim that the op's argument `dim` names."""
    return (call.dim(call["dim"]),)


def joined(call: Call) -> Spec:
    """cat: the joined dim stays whole, except for rows (dim 0) of equal parts: `s, s -> n! s`, as in `cut`.

    Two joined views of a batch can then be split alike. Along other dims such a split is of no use.
    """
    if any(t.ndim != call.results[0].ndim for t in call.operands):
        raise RuleDoesNotApply("cat of an empty tensor of shape (0,)")
    sizes_along = {t.shape[0] for t in call.operands}
    if named_dim(call) != (0,) or len(sizes_along) != 1 or sizes_along == {1}:
        spec, (dim,) = along(named_dim)(call), named_dim(call)
        parts = [x for letters in spec.operands for x in letters[dim]]
        joins = {x: tuple(parts) for x in spec.results[0][dim] if len(parts) == len(spec.operands)}
        return replace(spec, joins=joins, flops=call.results[0].numel())
    letters, sizes = plain(call.operands[0].shape)
    count: Dim = ("n",) if len(call.operands) > 1 else ()
    sizes |= dict.fromkeys(count, len(call.operands))
    return Spec(
        (letters,) * len(call.operands),
        (((*count, *letters[0]), *letters[1:]),),
        sizes,
        whole=frozenset(count),
        linear=(frozenset(range(len(call.operands))),),
        flops=call.results[0].numel(),
    )


def stacked(call: Call) -> Spec:
    """stack: the new dim stays whole."""
    letters, sizes = plain(call.operands[0].shape)
    dim = call["dim"] % call.results[0].ndim
    new: Dim = ("new",) if len(call.operands) > 1 else ()
    result = (*letters[:dim], new, *letters[dim:])
    sizes |= {"new": len(call.operands)} if new else {}
    everything = (frozenset(range(len(call.operands))),)
    return Spec((letters,) * len(call.operands), (result,), sizes, whole=frozenset(new), linear=everything)


def cut(call: Call) -> Spec:
    """split into n equal parts: `n! s -> s, s ...`, so that each part can be split alike.

    A fused projection of query, key and value can then be split inside each of them. A dim with unequal parts stays
    whole.
    """
    dim, count = call.dim(call["dim"]), len(call.results)
    sizes_along = {t.shape[dim] for t in call.results}
    if len(sizes_along) != 1 or count == 1:
        return along(named_dim, is_view=True)(call)
    letters, sizes = plain(call.operands[0].shape)
    size = sizes_along.pop()
    inner: Dim = ("s",) if size > 1 else ()
    sizes = {k: v for k, v in sizes.items() if k != f"d{dim}"} | {"n": count} | dict.fromkeys(inner, size)
    operand = (*letters[:dim], ("n", *inner), *letters[dim + 1 :])
    result = (*letters[:dim], inner, *letters[dim + 1 :])
    return Spec(
        (operand,),
        (result,) * count,
        sizes,
        whole=frozenset({"n"}),
        linear=FIRST,
        is_view=True,
        localize=_cut_locally(dim),
    )


def _cut_locally(dim: int) -> Callable[[Local], fx.Node]:
    def localize(local: Local) -> fx.Node:
        sizes = [shape[dim] for shape in local.result_shapes]
        return local.emit(aten.split_with_sizes.default, local.args[0], sizes, dim)

    return localize


def unbound(call: Call) -> Spec:
    """unbind: the dim, which the results lack, stays whole."""
    return along(named_dim, is_view=True)(call)


def sliced(call: Call) -> Spec:
    """slice: the dim stays whole, unless the slice takes all of it or every `step`-th element."""
    dim = call.dim(call["dim"])
    if _is_one_of_every_step(call, dim):
        return _strided(call, dim)
    if call.operands[0].shape[dim] != call.results[0].shape[dim]:
        return along(named_dim, is_view=True)(call)
    letters, sizes = plain(call.operands[0].shape)
    return Spec((letters,), (letters,), sizes, linear=FIRST, is_view=True, localize=_take_all(dim))


def _is_one_of_every_step(call: Call, dim: int) -> bool:
    size, step = int(call.operands[0].shape[dim]), call["step"]
    first = call["start"] or 0
    return step > 1 and 0 <= first < step and call.results[0].shape[dim] * step == size > step


def _strided(call: Call, dim: int) -> Spec:
    """`s n! -> s`: interleaved gates can be split like gates that lie one after another."""
    letters, sizes = plain(call.operands[0].shape)
    step, count = call["step"], int(call.results[0].shape[dim])
    sizes = {k: v for k, v in sizes.items() if k != f"d{dim}"} | {"s": count, "n": step}
    first = call["start"] or 0

    def localize(local: Local) -> fx.Node:
        return local.emit(aten.slice.Tensor, local.args[0], dim, first, sys.maxsize, step)

    operand = (*letters[:dim], ("s", "n"), *letters[dim + 1 :])
    result = (*letters[:dim], ("s",), *letters[dim + 1 :])
    return Spec((operand,), (result,), sizes, whole=frozenset({"n"}), linear=FIRST, is_view=True, localize=localize)


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
    """flip: the flipped dims stay whole; an empty list names no dim."""
    return along(lambda _: call.dims(call["dims"]) if call["dims"] else ())(call)


def diagonal(call: Call) -> Spec:
    """diagonal replaces two dims by a new last dim; all three stay whole."""
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
    return Spec((letters,), (tuple(result),), sizes, whole=whole, linear=FIRST, flops=call.results[0].numel())


def tiled(call: Call) -> Spec:
    """tile: repeat, with ones for the leading dims."""
    lead = call.operands[0].ndim - len(call["dims"])
    call.arguments["repeats"] = [1] * lead + list(call["dims"])
    return repeated(call)


def filled(call: Call) -> Spec:
    """new_zeros and the like use only the operand's dtype and device."""
    own, sizes = plain(call.operands[0].shape, "x")
    result, more = plain(call.results[0].shape, "y")
    return Spec((own,), (result,), sizes | more, whole=frozenset(sizes), localize=_fill_locally)


def _fill_locally(local: Local) -> fx.Node:
    x, _, *rest = local.args
    return local.emit(local.node.target, x, list(local.result_shapes[0]), *rest, **local.kwargs)


def named(dim: int) -> Callable[[Call], Spec]:
    """Makes the rule of an op that joins or cuts tensors along a fixed dim, such as hstack or vsplit.

    All other dims can be split. The rule does not apply to tensors that the op reshapes first: those with fewer
    than two dims, or with none at `dim`.

    Args:
        dim: the dim along which the op works: 0 for vstack, 1 for hstack, 2 for dstack.
    """

    def rule(call: Call) -> Spec:
        if any(t.ndim <= max(dim, 1) for t in [*call.operands, *call.results]):
            raise RuleDoesNotApply("dims are added first")
        return along(lambda _: (dim,))(call)

    return rule


def _turned(call: Call) -> tuple[int, ...]:
    return () if call["k"] % 4 == 0 else call.dims(call["dims"])


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.select": along(named_dim, is_view=True),
    "aten.narrow": along(named_dim, is_view=True),
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
    "aten.slice_scatter": along(named_dim),
    "aten.select_scatter": along(named_dim),
    "aten.slice_copy": sliced,
    "aten.diagonal": diagonal,
    "aten.linalg_diagonal": diagonal,
    "aten.diag_embed": diagonal_made,
    "aten.tile": tiled,
    "aten.channel_shuffle": along(lambda _: (1,)),
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
    "aten.tensor_split": along(named_dim, is_view=True),
    "aten.tril": along(lambda call: range(call.operands[0].ndim)[-2:]),
    "aten.triu": along(lambda call: range(call.operands[0].ndim)[-2:]),
    **aten_ops(filled, "new_zeros new_ones new_full"),
}
_COPIES = ("select", "narrow", "split", "split_with_sizes", "unbind", "diagonal")
RULES |= {f"aten.{name}_copy": replacing(RULES[f"aten.{name}"], is_view=False) for name in _COPIES}
