"""Contractions: products summed over a shared letter, two FLOPs per point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopar.rules.notation import spec_of
from autopar.rules.spec import Call, Dim, Local, RuleDoesNotApply, Spec, parts, run_as_is

aten = torch.ops.aten


def row(text: str) -> Callable[[Call], Spec]:
    """Rule of a contraction that one line describes."""

    def rule(call: Call) -> Spec:
        spec = spec_of(text, call)
        return replace(spec, flops=2 * spec.points)

    return rule


def linear(call: Call) -> Spec:
    """linear; a weight of one dim gives a result without `j`."""
    if call.operands[1].ndim == 1:
        raise RuleDoesNotApply("a weight of one dim")
    return row("b.. k, j k, +j -> b.. j | sum k | linear 0")(call)


def matmul(call: Call) -> Spec:
    """matmul: batch dims broadcast; a 1-d operand lacks its free dim."""
    left = "k" if call.operands[0].ndim == 1 else "b.. i k"
    right = "k" if call.operands[1].ndim == 1 else "b.. k j"
    free = (" i" if "i" in left else "") + (" j" if "j" in right else "")
    return row(f"{left}, {right} -> b..{free} | sum k | linear 0 1")(call)


def einsum(call: Call) -> Spec:
    """einsum: its equation is a row already. Equations with an ellipsis have no rule."""
    left, _, right = call["equation"].replace(" ", "").partition("->")
    if not right or "." in left:
        raise RuleDoesNotApply(call["equation"])
    operands = left.split(",")
    gone = sorted(set(left) - set(right) - {","})
    text = f"{', '.join(' '.join(o) for o in operands)} -> {' '.join(right)}"
    linear = " ".join(str(i) for i in range(len(operands)))
    return row(f"{text} | linear {linear}" + (f" | sum {' '.join(gone)}" if gone else ""))(call)


def convolution(call: Call) -> Spec:
    """conv: `n i x, o i k, +o -> n o y | sum i`; with groups both channel dims begin with the group."""
    x, weight = call.operands[:2]
    if call.arguments.get("transposed") or x.ndim != weight.ndim:
        raise RuleDoesNotApply("a transposed convolution, or one without a batch dim")
    groups = call.arguments["groups"]
    outs, ins = weight.shape[0] // groups, weight.shape[1]
    sizes = {"n": x.shape[0], "g": groups, "o": outs, "i": ins}
    sizes |= {f"x{d}": s for d, s in enumerate(x.shape[2:])}
    sizes |= {f"k{d}": s for d, s in enumerate(weight.shape[2:])}
    sizes |= {f"y{d}": s for d, s in enumerate(call.results[0].shape[2:])}
    sizes = {letter: int(size) for letter, size in sizes.items() if size > 1}

    def dims(*names: str) -> tuple[Dim, ...]:
        return tuple(tuple(letter for letter in name if letter in sizes) for name in names)

    def spatial(tag: str) -> tuple[Dim, ...]:
        return tuple(((f"{tag}{d}",) if f"{tag}{d}" in sizes else ()) for d in range(x.ndim - 2))

    flops = 2 * call.results[0].numel() * ins
    flops *= int(torch.tensor(weight.shape[2:]).prod())
    operands = [dims("n", "gi") + spatial("x"), dims("go", "i") + spatial("k"), dims("go")]
    return Spec(
        tuple(operands[: len(call.operands)]), (dims("n", "go") + spatial("y"),), sizes,
        sums=frozenset({"i"} & sizes.keys()), additive=frozenset(range(2, len(call.operands))),
        whole=frozenset(letter for letter in sizes if letter[0] in "xky"),
        flops=flops, localize=_convolve_locally,
    )  # fmt: skip


def _convolve_locally(local: Local) -> fx.Node:
    schema = [argument.name for argument in local.node.target._schema.arguments]  # type: ignore[union-attr]
    position = schema.index("groups")
    if position >= len(local.args):
        return run_as_is(local)
    groups = local.args[position] // parts(local, ["g"])
    args = (*local.args[:position], groups, *local.args[position + 1 :])
    return local.emit(local.node.target, *args, **local.kwargs)


RULES: dict[str, Callable[[Call], Spec]] = {
    "aten.linear": linear,
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
}
