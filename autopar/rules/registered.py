"""Rules that users register for ops of their own, in one line; they are proved before they are used.

    @torch.library.custom_op("mylib::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor: ...          # x of shape (b, s, h), weight (h,)

    autopar.register_rule("mylib::scale", "b s h, h -> b s h")

An op is registered once for the process, as in `torch.library`, and so is its rule: `RULES` below is the
one table of this package that changes after import.

[Note: proof of a registered rule] For every call in a captured graph the op is run on random tensors of
the captured shapes and dtypes, whole and on parts, once for every letter that the rule lets be split, and
results and gradients are compared. Integers are drawn from {0, 1}, because every table has these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar._torch import schema
from autopar.errors import RecipeError
from autopar.ir import P, S, State, V
from autopar.rules.functions import function_name
from autopar.rules.notation import parse, spec_of
from autopar.rules.spec import Call, Letters, Spec
from autopar.rules.trial import Results, difference, on_parts


@dataclass(frozen=True)
class Registered:
    """A row, and the calls on which it was proved, since a model may call an op once per layer."""

    row: str
    proved: set[str] = field(default_factory=set)


RULES: dict[str, Registered] = {}  # by `mylib.scale`

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.complex128: 1e-9,
    torch.complex64: 1e-4,
}
_HALF_TOLERANCE = 3e-2
_MOST_PARTS = 8


def register_rule(op: str | type[torch.autograd.Function], row: str) -> None:
    """Registers how an op can be split, as one line of the project's notation (docs/rules.md).

    Every captured call of the op proves the rule before a plan uses it. A second rule for an op replaces
    the first; one for an op that autopar knows already goes before its own.

    Args:
        op: name of a functional op of `torch.library`, such as `mylib::scale`, or a `torch.autograd.Function`.
        row: its operands and results in letters, `b s h, h -> b s h`, one for every tensor argument in the
            order of the schema, or of the call of `apply`.

    Raises:
        RecipeError: for an op that is not defined, or changes its arguments, and a row that cannot be
            read. At capture: for a rule that does not fit the call or does not hold.

    >>> import autopar, torch
    >>> @torch.library.custom_op("example::scale", mutates_args=())
    ... def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    ...     return x * by
    >>> autopar.register_rule("example::scale", "b s h, h -> b s h")
    """
    name = _functional_op(op) if isinstance(op, str) else function_name(op)
    try:
        parse(row)
    except ValueError as error:
        raise RecipeError(f"The rule of {op} cannot be used: {error}") from error
    RULES[name] = Registered(row)


def _functional_op(op: str) -> str:
    """The name of an op in a graph, `mylib.scale`. Raises RecipeError for one that cannot be split."""
    namespace, colons, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if colons else None
    if packet is None:
        raise RecipeError(
            f"There is no op {op!r} to give a rule; write namespace::name, and import the module that "
            "defines it with torch.library first."
        )
    if any(schema(getattr(packet, overload)).is_mutable for overload in packet.overloads()):
        raise RecipeError(
            f"The op {op} changes its arguments, and autopar splits functional ops only; return the new "
            "value instead."
        )
    return f"{namespace}.{name}"


def registered_rule(name: str) -> Callable[[Call], Spec] | None:
    """The rule that a user gave the op `name` (`mylib.scale`), which proves itself."""
    rule = RULES.get(name)
    return None if rule is None else lambda call: _proved(name, rule, call)


def _proved(name: str, rule: Registered, call: Call) -> Spec:
    spec = _fitted(name, rule.row, call)
    if (key := _key(call)) not in rule.proved:
        for splitting in _splits(spec):
            _prove(name, rule.row, call, splitting)
        rule.proved.add(key)
    # A letter that no small number divides was not tried.
    untried = {x for x, size in spec.sizes.items() if spec.splittable(x) and not _parts(size)}
    points = (2 if spec.sums else 1) * spec.points
    return replace(spec, whole=spec.whole | untried, flops=points)


def _key(call: Call) -> str:
    """A key that is equal for calls whose proofs are the same."""
    tensors = [(tuple(x.shape), x.dtype, x.device.type) for x in call.operands]
    others = fx.map_arg((call.node.args, call.node.kwargs), lambda _: None)
    return f"{call.node.target!r} {tensors} {others} {sorted(call.wanted)}"


def _fitted(name: str, row: str, call: Call) -> Spec:
    """The row on the shapes of a call. Raises RecipeError where it does not fit."""
    tensors = [*call.operands, *call.results]
    shapes = ", ".join(str(list(t.shape)) for t in call.operands)
    shapes += " -> " + ", ".join(str(list(t.shape)) for t in call.results)
    parsed = parse(row)
    counts = len(call.operands), len(call.results)
    if len(parsed.operands) < counts[0] or len(parsed.results) != counts[1]:
        raise RecipeError(
            f"The rule {row!r} of {name} has {len(parsed.operands)} operands and {len(parsed.results)} "
            f"results, and the model calls it with {counts[0]} and {counts[1]}: {shapes}. Write one list "
            "of letters for each."
        )
    try:
        spec = spec_of(parsed, call)
    except AssertionError as error:
        raise RecipeError(
            f"The rule {row!r} of {name} does not fit the ranks of the call {shapes}; write a letter for "
            "every dim, or `b..` for any number of them."
        ) from error
    for letters, tensor in zip([*spec.operands, *spec.results], tensors, strict=True):
        for dim, size in zip(letters, tensor.shape, strict=True):
            if dim and spec.sizes[dim[0]] != size:
                raise RecipeError(
                    f"In the rule {row!r} of {name} the letter {dim[0]!r} is {spec.sizes[dim[0]]} in one "
                    f"tensor and {size} in another of the call {shapes}; use two letters."
                )
    return spec


class _Splitting(NamedTuple):
    """One choice of a rule: the states of all tensors, and the number of parts."""

    text: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    parts: int


def _splits(spec: Spec) -> Iterator[_Splitting]:
    """Every choice that `autopar.analysis.factors` will offer."""
    for letter, size in spec.sizes.items():
        count = _parts(size)
        if spec.splittable(letter) and count:
            summed = letter in spec.sums
            operands = tuple(
                P if summed and i in spec.additive else _state(t, letter)
                for i, t in enumerate(spec.operands)
            )
            results = tuple(_state(t, letter, P) for t in spec.results)
            yield _Splitting(f"splitting the letter {letter!r}", operands, results, count)
    for positions in spec.linear:
        operands = tuple(P if i in positions else V for i in range(len(spec.operands)))
        text = f"a partial sum in operand {', '.join(map(str, sorted(positions)))}"
        yield _Splitting(text, operands, (P,) * len(spec.results), 2)


def _parts(size: int) -> int:
    """The smallest of a few numbers of equal parts into which a size can be cut; 0 if there is none."""
    return next((n for n in range(2, _MOST_PARTS) if size % n == 0), 0)


def _state(letters: Letters, letter: str, otherwise: State = V) -> State:
    return next((S(d) for d, dim in enumerate(letters) if letter in dim), otherwise)


def _prove(name: str, row: str, call: Call, splitting: _Splitting) -> None:
    """Raises RecipeError unless the op gives the same results and gradients on parts as on whole tensors."""
    operands = _examples(call.operands)
    run = _runner(call.node)
    split = on_parts(run, splitting.operands, splitting.results, splitting.parts)
    advice = (
        "Mark a letter that must stay whole with `!`, and one that is summed away with `| sum`."
    )
    claim = (
        f"The rule {row!r} of {name} does not hold: {splitting.text} into {splitting.parts} parts"
    )
    try:
        error = difference(split, run, operands, _differentiable(run, operands, call.wanted))
    except (RuntimeError, ValueError, IndexError) as fault:
        raise RecipeError(f"{claim} makes the op fail ({fault}). {advice}") from fault
    if not error <= _tolerance([*call.operands, *call.results]):
        raise RecipeError(
            f"{claim} changes results or gradients by {error:.2g} of their largest value. {advice}"
        )


def _differentiable(run: Any, operands: Sequence[Tensor], wanted: Iterable[int]) -> list[int]:
    """Positions whose gradient can be compared: none where the op has no backward, as in inference."""
    positions = sorted(i for i in wanted if operands[i].is_floating_point())
    try:
        difference(run, run, operands, positions)
    except (RuntimeError, NotImplementedError):
        return []
    return positions


def _tolerance(tensors: Sequence[Tensor]) -> float:
    floating = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    return max((_TOLERANCES.get(dtype, _HALF_TOLERANCE) for dtype in floating), default=0.0)


def _examples(operands: Sequence[Tensor]) -> list[Tensor]:
    """Random tensors of the captured shapes; a model on the meta device is tried on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return [_example(x, generator) for x in operands]


def _example(x: Tensor, generator: torch.Generator) -> Tensor:
    device = "cpu" if x.device.type == "meta" else x.device
    if x.is_floating_point() or x.is_complex():
        wide = torch.complex128 if x.is_complex() else torch.float64
        return torch.randn(x.shape, dtype=wide, generator=generator).to(device, x.dtype)
    return torch.randint(2, x.shape, generator=generator).to(device, x.dtype)


def _runner(node: fx.Node) -> Callable[..., Results]:
    """The op as a function of its tensor operands, with the call's other arguments."""

    def run(*operands: Tensor) -> Results:
        remaining = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))
        result: Any = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    return run
