"""Rules that users register for ops of their own, in one line; they are proved before they are used.

    @torch.library.custom_op("mylib::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor: ...          # x of shape (b, s, h), weight (h,)

    autopar.register_rule("mylib::scale", "b s h, h -> b s h | flops 1 b s h | saves x0 x1")

An op is registered once for the process, as in `torch.library`, and so is its rule: `RULES` below is the
one table of this package that changes after import. It starts with the rows of public kernels
(`autopar.rules.kernels`), and also holds what a probe found of ops that nobody gave a rule (`autopar.rules.probed`).

[Note: proof of a registered rule] For every call in a captured graph the op is run on random tensors of
the captured shapes and dtypes, whole and on parts, once for every letter that the rule lets be split, and
results and gradients are compared: on smaller ones of the same letters where these have more than 16.8
million elements, if the op runs on them. Integers are drawn from {0, 1}, because every table has these rows. What
backward keeps of the whole tensors may not be more than the row says. Where the kernel does not run (a model
on the meta device is planned on a machine without its accelerator), a row is used without a proof, and plans
call it a guess.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from autopar._torch import schema
from autopar.errors import RecipeError
from autopar.ir import P, S, State, V
from autopar.rules.functions import function_name
from autopar.rules.kept.rows import row as kept_row
from autopar.rules.kernels import ROWS
from autopar.rules.notation import parse, spec_of
from autopar.rules.proofs import (
    MOST_ELEMENTS,
    Splitting,
    comparison,
    examples,
    forked_randomness,
    key_of,
    runner,
    tolerance_of,
    why_not_run,
)
from autopar.rules.spec import Call, Kept, Letters, RuleDoesNotApply, Spec
from autopar.rules.trial import kept_bytes


@dataclass(frozen=True)
class Registered:
    """A row of an op.

    Attributes:
        row: the row; "" for an op that nobody gave one.
        is_ours: whether it is of `autopar.rules.kernels`. An op of another version, for which it does not hold, is
            then one without a rule.
        findings: call -> what its proof found, since a model may call an op once per layer: why the row is a guess
            there, "" where it was proved. Without a row, the row that a probe found, or "".
    """

    row: str
    is_ours: bool = False
    findings: dict[str, str] = field(default_factory=dict)


RULES: dict[str, Registered] = {name: Registered(row, is_ours=True) for name, row in ROWS.items()}

_MOST_PARTS = 8
_LEAST_POSITIONS = 2048  # of a letter that stays whole and is made shorter for a proof


def register_rule(op: str | type[torch.autograd.Function], row: str) -> None:
    """Registers how an op can be split, its FLOPs and its saved tensors, as one line (docs/rules.md).

    Every captured call of the op proves the rule before a plan uses it. A second rule for an op replaces
    the first; one for an op that autopar knows already goes before its own.

    Args:
        op: name of a functional op of `torch.library`, such as `mylib::scale`, or a `torch.autograd.Function`.
        row: its operands and results in letters, `b s h, h -> b s h`, one for every tensor argument in the
            order of the schema, or of the call of `apply`. `| flops 2 i k j` says the FLOPs of forward, by default one
            for every point of all letters (two if some are summed away). `| saves x0 y0; [b s] float32` says what
            backward needs: operands, results and tensors of the op's own; by default all operands.

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
        kept_row(parse(row).saves or "")
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
            f"The op {op} changes its arguments, and autopar splits functional ops only; return the new value instead."
        )
    return f"{namespace}.{name}"


def registered_rule(name: str) -> Callable[[Call], Spec] | None:
    """The rule that a user or `autopar.rules.kernels` gives the op `name` (`mylib.scale`), which proves itself."""
    rule = RULES.get(name)
    return None if rule is None or not rule.row else lambda call: _proved(name, rule, call)


def _proved(name: str, rule: Registered, call: Call) -> Spec:
    try:
        spec = _fitted(name, rule.row, call)
        if (key := key_of(call)) not in rule.findings:
            rule.findings[key] = _finding(name, rule, call, spec)
    except RecipeError as error:
        if rule.is_ours:
            raise RuleDoesNotApply(str(error)) from error
        raise
    # A sum was proved of equal parts, and may be a mean that equal parts hide.
    return replace(spec, guess=rule.findings[key], equal=spec.sums)


def _finding(name: str, rule: Registered, call: Call, spec: Spec) -> str:
    """Proves a row on a call; why it is a guess if the op cannot run. Raises RecipeError where it does not hold."""
    with forked_randomness(call):
        small, its_spec = _small(call, spec)
        if small is not call and not why_not_run(small):
            call, spec = small, its_spec
        fault = why_not_run(call)
        if fault and (rule.is_ours or call.operands[0].device.type == "meta"):
            return "its kernel does not run on this machine, so its rule is not proved"
        for splitting in _splits(spec):
            _prove(name, rule.row, call, splitting)
        if spec.stated_kept is not None and not fault and not rule.is_ours:
            _check_kept(name, rule.row, call, spec)
    return ""


def _small(call: Call, spec: Spec) -> tuple[Call, Spec]:
    """A call on parts of its operands that have few elements together, with its spec; the call if there are none.

    Letters that can be split become shorter, and then others that are long, each by the number of parts that it is
    tried in, so that it can still be cut.
    """
    sizes = dict(spec.sizes)

    def shapes(tensors: Iterable[Letters]) -> list[list[int]]:
        return [[math.prod(sizes[x] for x in dim) for dim in letters] for letters in tensors]

    def shorter(x: str) -> int:
        parts = max(_parts(sizes[x]), 1)
        new = sizes[x] // parts
        is_enough = new % parts == 0 and (spec.splittable(x) or new >= _LEAST_POSITIONS)
        return new if new < sizes[x] and is_enough else 0

    while sum(map(math.prod, shapes([*spec.operands, *spec.results]))) > MOST_ELEMENTS:
        letters = [x for x in sizes if shorter(x)]
        if not letters:
            break
        longest = max(letters, key=lambda x: (spec.splittable(x), sizes[x]))
        sizes[longest] = shorter(longest)
    if sizes == spec.sizes:
        return call, spec
    small = copy.copy(call)
    for name, own in (("operands", spec.operands), ("results", spec.results)):
        made = zip(getattr(call, name), shapes(own), strict=True)
        setattr(small, name, [x.new_empty(shape) for x, shape in made])
    return small, replace(spec, sizes=sizes)


def stated_row(name: str) -> str:
    """The row of an op; "" without one."""
    return RULES[name].row if name in RULES else ""


def _check_kept(name: str, row: str, call: Call, spec: Spec) -> None:
    """Raises RecipeError if the op keeps more for backward than its row says, on the device of the model."""
    if call.operands[0].device.type == "meta" or not call.wanted:
        return
    found = kept_bytes(runner(call.node), examples(call.operands), sorted(call.wanted))
    stated = spec.stated_kept
    assert stated is not None
    said = sum(call.operands[i].nbytes for i in stated.operands)
    said += sum(call.results[i].nbytes for i in stated.results)
    said += sum(
        each.times * each.dtype.itemsize * math.prod(spec.sizes[x] for dim in each.letters for x in dim)
        for each in stated.hidden
    )
    if found > said:
        raise RecipeError(
            f"The rule {row!r} of {name} says that backward keeps {said} bytes, but it keeps {found}. Add the missing "
            "ones after `saves`: x0 for the first operand, y0 for the first result, and [b s] float32 for a tensor of "
            "the op's own."
        )


def _fitted(name: str, row: str, call: Call) -> Spec:
    """The row on the shapes of a call, with all that it states. Raises RecipeError where it does not fit."""
    tensors = [*call.operands, *call.results]
    shapes = ", ".join(str(list(t.shape)) for t in call.operands)
    shapes += " -> " + ", ".join(str(list(t.shape)) for t in call.results)
    parsed = parse(row)
    counts = len(call.operands), len(call.results)
    if len(parsed.operands) < counts[0] or len(parsed.results) < counts[1]:
        raise RecipeError(
            f"The rule {row!r} of {name} has {len(parsed.operands)} operands and {len(parsed.results)} "
            f"results, but the model calls it with {counts[0]} and {counts[1]}: {shapes}. Write one list "
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
            if dim and (points := math.prod(spec.sizes[x] for x in dim)) != size:
                raise RecipeError(
                    f"In the rule {row!r} of {name} the letter {' '.join(dim)!r} is {points} in one "
                    f"tensor and {size} in another of the call {shapes}; use two letters."
                )
    # A letter that no small number divides was not tried, nor one whose parts do not lie together.
    untried = {x for x, size in spec.sizes.items() if not _parts(size)} | _minor(spec)
    flops = spec.flops or (2 if spec.sums else 1) * spec.points
    spec = replace(spec, whole=spec.whole | untried, flops=flops)
    if parsed.saves is None:
        return spec
    return replace(spec, stated_kept=kept_row(parsed.saves)(call, spec) if call.wanted else Kept())


def _minor(spec: Spec) -> set[str]:
    """Letters behind others of one dim, such as r of (g r)."""
    return {x for tensor in [*spec.operands, *spec.results] for dim in tensor for x in dim[1:]}


def _splits(spec: Spec) -> Iterator[Splitting]:
    """Every choice that `autopar.analysis.factors` will offer."""
    for letter, size in spec.sizes.items():
        count = _parts(size)
        if spec.splittable(letter) and count:
            summed = letter in spec.sums
            operands = tuple(
                P if summed and i in spec.additive else _state(t, letter) for i, t in enumerate(spec.operands)
            )
            results = tuple(_state(t, letter, P) for t in spec.results)
            yield Splitting(f"splitting the letter {letter!r}", operands, results, count)
    for positions in spec.linear:
        operands = tuple(P if i in positions else V for i in range(len(spec.operands)))
        text = f"a partial sum in operand {', '.join(map(str, sorted(positions)))}"
        yield Splitting(text, operands, (P,) * len(spec.results), 2)


def _parts(size: int) -> int:
    """The smallest of a few numbers of equal parts into which a size can be cut; 0 if there is none."""
    return next((n for n in range(2, _MOST_PARTS) if size % n == 0), 0)


def _state(letters: Letters, letter: str, otherwise: State = V) -> State:
    return next((S(d) for d, dim in enumerate(letters) if letter in dim), otherwise)


def _prove(name: str, row: str, call: Call, splitting: Splitting) -> None:
    """Raises RecipeError unless the op gives the same results and gradients on parts as on whole tensors."""
    advice = "Mark a letter that must stay whole with `!`, and one that is summed away with `| sum`."
    claim = f"The rule {row!r} of {name} does not hold: {splitting.text} into {splitting.parts} parts"
    try:
        error = comparison(call, splitting)
    except (RuntimeError, ValueError, IndexError) as fault:
        raise RecipeError(f"{claim} makes the op fail ({fault}). {advice}") from fault
    if not error <= tolerance_of(call):
        raise RecipeError(f"{claim} changes results or gradients by {error:.2g} of their largest value. {advice}")
