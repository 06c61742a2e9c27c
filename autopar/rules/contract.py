"""Contractions: products summed over a shared letter, two FLOPs per point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopar.ops.float8 import TILE
from autopar.ops.nodes import schema
from autopar.rules.notation import spec_of
from autopar.rules.spec import Call, Dim, Letters, Local, RuleDoesNotApply, Spec, run_as_is

aten = torch.ops.aten


def row(text: str) -> Callable[[Call], Spec]:
    """Rule of a contraction that one line describes."""

    def rule(call: Call) -> Spec:
        spec = spec_of(text, call)
        return replace(spec, flops=2 * spec.points)

    return rule


def linear(call: Call) -> Spec:
    """linear: a weight with one dim gives a result without `j`."""
    if call.operands[1].ndim == 1:
        raise RuleDoesNotApply("a weight of one dim")
    return row("b.. k, j k, +j -> b.. j | sum k | linear 0")(call)


def float8_linear(call: Call) -> Spec:
    """float8_linear: linear without a bias, of which no plan cuts a tile of the two matrix dims.

    Backward rounds the gradient, so it is not linear: its results for the parts of a sum do not add up to that of the
    sum.
    """
    spec = row("b.. k, j k -> b.. j | sum k")(call)
    tiled = {name: (name, f"{name}_in_tile") for name in "jk"}
    sizes = dict(spec.sizes)
    for name in tiled:
        sizes |= {name: sizes[name] // TILE, f"{name}_in_tile": TILE}
    sizes = {letter: size for letter, size in sizes.items() if size > 1}

    def cut(tensor: Letters) -> Letters:
        return tuple(tuple(x for letter in dim for x in tiled.get(letter, (letter,)) if x in sizes) for dim in tensor)

    return replace(
        spec,
        operands=tuple(map(cut, spec.operands)),
        results=tuple(map(cut, spec.results)),
        sizes=sizes,
        sums=frozenset({"k", "k_in_tile"} & sizes.keys()),
        whole=frozenset({"j_in_tile", "k_in_tile"}),
        linear_backward=False,
        product_itemsize_bytes=1,
    )


def matmul(call: Call) -> Spec:
    """matmul: batch dims broadcast; a 1-d operand lacks its free dim."""
    left = "k" if call.operands[0].ndim == 1 else "b.. i k"
    right = "k" if call.operands[1].ndim == 1 else "b.. k j"
    free = (" i" if "i" in left else "") + (" j" if "j" in right else "")
    return row(f"{left}, {right} -> b..{free} | sum k | linear 0 1")(call)


def einsum(call: Call) -> Spec:
    """einsum: the equation is itself a row."""
    operands, result = equation(call)
    gone = sorted({x for names in operands for x in names} - set(result))
    text = f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}"
    linear = " ".join(str(i) for i in range(len(operands)))
    return row(f"{text} | linear {linear}" + (f" | sum {' '.join(gone)}" if gone else ""))(call)


def equation(call: Call) -> tuple[list[list[str]], list[str]]:
    """The letters of every operand of an einsum and of its result; `...` is `rest0` (the last dim) and so on."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    if not arrow:  # the result has the letters that occur once, in alphabetical order
        right = "..." + "".join(sorted(x for x in set(left) - {",", "."} if left.count(x) == 1))
    operands = zip(left.split(","), call.operands, strict=True)
    return [_letters(text, x) for text, x in operands], _letters(right, call.results[0])


def _letters(text: str, tensor: torch.Tensor) -> list[str]:
    before, dots, after = text.partition("...")
    count = tensor.ndim - len(before) - len(after) if dots else 0
    return [*before, *(f"rest{d}" for d in reversed(range(count))), *after]


def convolution(call: Call) -> Spec:
    """conv: `n i x, o i k, +o -> n o y | sum i`; with groups both channel dims begin with the group.

    A transposed convolution has its weight as `i o k`. An input without a batch has no `n`.
    """
    x, weight = call.operands[:2]
    transposed = call.arguments.get("transposed") or "transpose" in str(call.node.target)
    groups, space = call.arguments["groups"], weight.ndim - 2
    outs, ins = call.results[0].shape[-space - 1] // groups, x.shape[-space - 1] // groups
    sizes = {"n": x.shape[0] if x.ndim > space + 1 else 1, "g": groups, "o": outs, "i": ins}
    sizes |= {f"x{d}": s for d, s in enumerate(x.shape[-space:])}
    sizes |= {f"k{d}": s for d, s in enumerate(weight.shape[2:])}
    sizes |= {f"y{d}": s for d, s in enumerate(call.results[0].shape[-space:])}
    sizes = {letter: int(size) for letter, size in sizes.items() if size > 1}

    def dims(*names: str) -> tuple[Dim, ...]:
        return tuple(tuple(letter for letter in name if letter in sizes) for name in names)

    def spatial(tag: str) -> tuple[Dim, ...]:
        return tuple(((f"{tag}{d}",) if f"{tag}{d}" in sizes else ()) for d in range(space))

    batch = dims("n") if x.ndim > space + 1 else ()
    channels = dims("gi", "o") if transposed else dims("go", "i")
    flops = 2 * (x if transposed else call.results[0]).numel() * (outs if transposed else ins)
    flops *= int(torch.tensor(weight.shape[2:]).prod())
    operands = [(*batch, *dims("gi"), *spatial("x")), channels + spatial("k"), dims("go")]
    return Spec(
        tuple(operands[: len(call.operands)]),
        ((*batch, *dims("go"), *spatial("y")),),
        sizes,
        sums=frozenset({"i"} & sizes.keys()),
        additive=frozenset(range(2, len(call.operands))),
        whole=frozenset(letter for letter in sizes if letter[0] in "xky"),
        batch=frozenset(sizes) & {"n"},
        flops=flops,
        localize=_convolve_locally,
    )


def inner(call: Call) -> Spec:
    """inner sums over the last dims; if an operand is a number, it is a product."""
    if not all(t.ndim for t in call.operands):
        raise RuleDoesNotApply("a product with a number")
    return row("a.. k, b.. k -> a.. b.. | sum k | linear 0 1")(call)


def vecdot(call: Call) -> Spec:
    """linalg_vecdot sums over the last dim, or over another one, which then stays whole."""
    if call["dim"] not in (-1, call.operands[0].ndim - 1):
        raise RuleDoesNotApply("not the last dim")
    return row("b.. k, b.. k -> b.. | sum k | linear 0 1")(call)


def tensordot(call: Call) -> Spec:
    """tensordot sums over pairs of dims."""
    names: list[list[str]] = []
    sizes: dict[str, int] = {}
    for i, tensor in enumerate(call.operands):
        summed = [d % tensor.ndim for d in call["dims_self" if i == 0 else "dims_other"]]
        own = [f"k{summed.index(d)}" if d in summed else f"x{i}{d}" for d in range(tensor.ndim)]
        sizes |= {n: int(s) for n, s in zip(own, tensor.shape, strict=True) if s > 1}
        names.append(own)
    kept = [n for n in [*names[0], *names[1]] if n[0] == "x"]
    letters = [tuple((n,) if n in sizes else () for n in own) for own in (*names, kept)]
    spec = Spec(
        tuple(letters[:2]),
        (letters[2],),
        sizes,
        sums=frozenset(n for n in sizes if n[0] == "k"),
        linear=(frozenset({0}), frozenset({1})),
    )
    return replace(spec, flops=2 * spec.points)


def _convolve_locally(local: Local) -> fx.Node:
    names = [argument.name for argument in schema(local.node).arguments]
    position = names.index("groups")
    if position >= len(local.args):
        return run_as_is(local)
    args = (*local.args[:position], local.part("g"), *local.args[position + 1 :])
    return local.emit(local.node.target, *args, **local.kwargs)


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.linear": linear,
    "autopar.float8_linear": float8_linear,
    "aten.addmm": row("+i j, i k, k j -> i j | sum k"),
    "aten.mm": row("i k, k j -> i j | sum k | linear 0 1"),
    "aten.bmm": row("b i k, b k j -> b i j | sum k | linear 0 1"),
    "aten.baddbmm": row("+b i j, b i k, b k j -> b i j | sum k"),
    "aten.mv": row("i k, k -> i | sum k | linear 0 1"),
    "aten.dot": row("k, k -> | sum k | linear 0 1"),
    "aten.matmul": matmul,
    "aten.einsum": einsum,
    "aten.conv1d": convolution,
    "aten.conv2d": convolution,
    "aten.conv3d": convolution,
    "aten.convolution": convolution,
    "aten.conv_transpose1d": convolution,
    "aten.conv_transpose2d": convolution,
    "aten.conv_transpose3d": convolution,
    "aten.inner": inner,
    "aten.tensordot": tensordot,
    "aten.outer": row("i, j -> i j | linear 0 1"),
    "aten.ger": row("i, j -> i j | linear 0 1"),
    "aten.vdot": row("k, k -> | sum k | linear 0 1"),
    "aten.linalg_vecdot": vecdot,
    "aten.addmv": row("+i, i k, k -> i | sum k"),
    "aten.addr": row("+i j, i, j -> i j"),
    "aten.addbmm": row("+i j, b i k, b k j -> i j | sum b k"),
    "aten.bilinear": row("b.. i, b.. j, o i j, +o -> b.. o | sum i j"),
    "aten.cdist": row("b.. p k!, b.. r k! -> b.. p r"),
}
