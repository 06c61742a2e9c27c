"""Random ops: draws that are independent across split parts and identical across replicas.

[Note: keys of random ops] All ranks draw in step: the runtime gives them one seed per run of a program, and every
random op draws one number from it, its key. The numbers that an op draws on a rank depend on the key and on the rank's
position along the axes that split the op. So ranks that run the same part of an op draw the same numbers. Ops without a
rule here, and those without a tensor to split (`rand`, `randperm`), draw from the seed itself, whole on every rank, and
their results are cut afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.ops.nodes import bound_arguments, named_arguments, schema
from autopar.rules.elementwise import elementwise
from autopar.rules.spec import Call, Local, Spec, plain, run_as_is

aten = torch.ops.aten
_KEYS = 2**31 - 1

# Point by point: what the op draws depends on its place alone, and on the operands there.
POINTS = (
    "bernoulli",
    "binomial",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal",
    "normal_functional",
    "poisson",
    "rand_like",
    "randint_like",
    "randn_like",
    "random",
    "uniform",
)


def dropout(call: Call) -> Spec:
    """native_dropout(x, p, train) -> (x * mask / (1 - p), mask)."""
    spec = elementwise(call)
    dropped = call["train"] is not False and 0 < call["p"] < 1
    localize = _Dropout(tuple(spec.sizes), call["p"]) if dropped else run_as_is
    return replace(spec, localize=localize)


def points(call: Call) -> Spec:
    """One random number per element; without an operand to split, every rank draws all numbers."""
    spec = elementwise(call)
    if not call.operands:
        return replace(spec, whole=frozenset(spec.sizes))
    return replace(spec, localize=_Draw(tuple(spec.sizes)))


def rrelu(call: Call) -> Spec:
    """rrelu(x, lower, upper, training): negative numbers are multiplied with random slopes."""
    spec = elementwise(call)
    return replace(spec, localize=_Slopes(tuple(spec.sizes))) if call["training"] else spec


def multinomial(call: Call) -> Spec:
    """`b.. n -> b.. k`: every row is drawn by itself."""
    (weights,) = call.operands
    rows, sizes = plain(weights.shape[:-1], "b")
    (own, drawn), more = plain((weights.shape[-1], call.results[0].shape[-1]), "n")
    return Spec(
        ((*rows, own),),
        ((*rows, drawn),),
        sizes | more,
        whole=frozenset(more),
        flops=weights.numel(),
        localize=_Draw(tuple(sizes)),
    )


class _Draw:
    """The op itself, with a generator that its key seeds."""

    def __init__(self, letters: tuple[str, ...]) -> None:
        self.letters = letters

    def __call__(self, local: Local) -> fx.Node:
        overload, arguments = local.node.target, schema(local.node).arguments
        given = named_arguments(local.node, local.args) | local.kwargs
        values = [given.get(a.name, a.default_value) for a in arguments if not a.kwarg_only]
        operands = [x for x in values if isinstance(x, fx.Node)]
        scalars = [x for x in values if isinstance(x, (bool, int, float))]
        return _drawn(local, self.letters, _with_generator(overload), operands, scalars, given.get("dtype"))


class _Dropout:
    def __init__(self, letters: tuple[str, ...], p: float) -> None:
        self.letters, self.p = letters, p

    def __call__(self, local: Local) -> tuple[fx.Node, fx.Node]:
        x = local.args[0]
        key = _key(local, self.letters)
        mask = local.emit(torch.ops.autopar.keep_mask.default, x, key, self.p)
        scaled = local.emit(aten.mul.Tensor, x, 1 / (1 - self.p))
        return local.emit(aten.mul.Tensor, scaled, mask), mask


class _Slopes:
    def __init__(self, letters: tuple[str, ...]) -> None:
        self.letters = letters

    def __call__(self, local: Local) -> fx.Node:
        x, given = local.args[0], bound_arguments(local.node)
        bounds = [float(given["lower"]), float(given["upper"])]
        slopes = _drawn(local, self.letters, "uniform.default", [x], bounds)
        small = local.emit(aten.le.Scalar, x, 0)
        return local.emit(aten.where.self, small, local.emit(aten.mul.Tensor, x, slopes), x)


def _drawn(
    local: Local,
    letters: tuple[str, ...],
    op: str,
    operands: list[fx.Node],
    scalars: list[float],
    dtype: torch.dtype | None = None,
) -> fx.Node:
    """The drawn tensor, without a gradient, as in torch."""
    detached = [local.emit(aten.detach.default, x) for x in operands]
    key = _key(local, letters)
    return local.emit(torch.ops.autopar.draw.default, op, detached, key, scalars, dtype=dtype)


def _with_generator(overload: object) -> str:
    """`rand_like.generator` for `aten.rand_like.default`, and its own name for one that has the argument."""
    op = str(overload).removeprefix("aten.")
    name, _, kind = op.partition(".")
    if not name.endswith("_like"):
        return op
    kinds = {"default": "generator", "Tensor": "Tensor_generator", "low_dtype": "low_generator_dtype"}
    return f"{name}.{kinds[kind]}"


def _key(local: Local, letters: tuple[str, ...]) -> fx.Node:
    """A tensor of one element, on the CPU."""
    key = local.emit(aten.randint.default, _KEYS, [1])
    axes = [axis for letter in letters for axis in local.axes(letter)]
    if not axes:
        return key
    return local.emit(aten.add.Tensor, key, _position(local, axes), alpha=_KEYS)


def _position(local: Local, axes: Sequence[tuple[str, int]]) -> fx.Node:
    """A tensor of one element, on the CPU: the position of this rank among the ranks that split the op along `axes`."""
    found = local.emit(aten.arange.default, math.prod(size for _, size in axes))
    for name, size in axes:
        found = local.emit(torch.ops.autopar.shard.default, found, [0], size, name, "all_gather")
    return found


def is_key(node: fx.Node) -> bool:
    """Whether a node draws the key of a random op, which is smaller than the state of the generator."""
    return node.target is aten.randint.default and node.args[:2] == (_KEYS, [1])


RULES: dict[str, Callable[[Call], Spec]] = {
    **{f"aten.{name}": points for name in POINTS},
    "aten.native_dropout": dropout,
    "aten.rrelu": rrelu,
    "aten.multinomial": multinomial,
}
