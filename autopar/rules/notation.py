"""One line per op family: `b.. k, j k, +j -> b.. j | sum k`.

Grammar:
    row     = tensors "->" tensors {"|" clause}
    tensors = tensor {"," tensor}
    tensor  = ["+"] {letter [".."] ["!"]}      `+` the operand is added to the result (a bias)
                                               `..` any number of dims, `!` the letter stays whole
    clause  = "sum" letter {letter}            letters that are summed away
            | "linear" position {position}     operands through which P passes, one at a time
            | "normalize" letter               letters the op normalizes over (they stay whole too)

Operands are matched with the tensors of the call in order; a trailing operand that the call lacks (an optional bias) is
left out. Where an operand has size 1, its letter is broadcast. An operand with fewer dims lacks the leading letters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.rules.spec import Call, Letters, Spec


@dataclass(frozen=True)
class Pattern:
    """One tensor of a row: its letters, and the position of the one that stands for several dims, if there is one."""

    letters: tuple[str, ...]
    spread: str = ""
    additive: bool = False

    def expand(self, rank: int) -> tuple[str, ...]:
        """A letter for each of `rank` dims. Raises AssertionError where the row does not fit."""
        extra = rank - len(self.letters) + bool(self.spread)
        assert self.spread or extra <= 0, (self, rank)
        missing = max(-extra, 0)  # leading dims that a tensor of lower rank broadcasts over
        result: list[str] = []
        for letter in self.letters[missing:]:
            spread = letter == self.spread
            # Numbered from the right, as broadcasting aligns dims.
            result += [f"{letter}{i}" for i in reversed(range(extra))] if spread else [letter]
        return tuple(result)


@dataclass(frozen=True)
class Row:
    """A parsed line."""

    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    sums: frozenset[str]
    whole: frozenset[str]
    linear: tuple[int, ...]
    normalized: frozenset[str]


@functools.cache
def parse(text: str) -> Row:
    """Reads a row. Raises ValueError that names the row and the word it cannot read."""
    head, *clauses = (part.strip() for part in text.split("|"))
    left, arrow, right = head.partition("->")
    if not arrow:
        raise ValueError(f"The rule {text!r} has no '->' between operands and results.")
    whole: set[str] = set()
    operands = tuple(_pattern(part, whole, text) for part in left.split(","))
    results = tuple(_pattern(part, whole, text) for part in right.split(","))
    named: dict[str, list[str]] = {"sum": [], "linear": [], "normalize": []}
    for clause in clauses:
        word, *values = clause.split()
        if word not in named:
            raise ValueError(f"The rule {text!r} has the clause {word!r}; known are {list(named)}.")
        named[word] += values
    normalized = frozenset(named["normalize"])
    linear = tuple(int(value) for value in named["linear"])
    return Row(
        operands,
        results,
        frozenset(named["sum"]),
        frozenset(whole) | normalized,
        linear,
        normalized,
    )


def _pattern(text: str, whole: set[str], row: str) -> Pattern:
    letters: list[str] = []
    spread = ""
    additive = text.strip().startswith("+")
    for word in text.strip().removeprefix("+").split():
        letter = word.rstrip(".!")
        if not letter.isidentifier():
            raise ValueError(f"Cannot read {word!r} in the rule {row!r}.")
        letters.append(letter)
        spread = letter if ".." in word else spread
        if word.endswith("!"):
            whole.add(letter)
    return Pattern(tuple(letters), spread, additive)


def spec_of(row: Row | str, call: Call) -> Spec:
    """The spec of a call whose tensors a row describes."""
    row = parse(row) if isinstance(row, str) else row
    patterns = row.operands[: len(call.operands)]
    names = [p.expand(t.ndim) for p, t in zip(patterns, call.operands, strict=True)]
    result_names = [p.expand(t.ndim) for p, t in zip(row.results, call.results, strict=True)]
    sizes = _sizes(names + result_names, [*call.operands, *call.results])
    spec = Spec(
        operands=tuple(
            _letters(n, t.shape, sizes) for n, t in zip(names, call.operands, strict=True)
        ),
        results=tuple(
            _letters(n, t.shape, sizes) for n, t in zip(result_names, call.results, strict=True)
        ),
        sizes=sizes,
        sums=_spread_out(row.sums, sizes),
        whole=_spread_out(row.whole, sizes),
        additive=frozenset(i for i, p in enumerate(patterns) if p.additive),
        normalized=_spread_out(row.normalized, sizes),
    )
    unused = set(row.linear) & spec.additive
    assert not unused, f"operands {unused} of {row} cannot be both linear and additive"
    alone = not spec.additive  # P may pass only where nothing else is added to the result
    return replace(spec, linear=tuple(frozenset({i}) for i in row.linear) if alone else ())


def line(text: str, **changes: Any) -> Callable[[Call], Spec]:
    """The rule that a row describes, for an op with one FLOP per element of its results."""

    def rule(call: Call) -> Spec:
        spec = spec_of(text, call)
        return replace(spec, flops=sum(t.numel() for t in call.results), **changes)

    return rule


def _sizes(names: Sequence[Sequence[str]], tensors: Sequence[object]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for letters, tensor in zip(names, tensors, strict=True):
        for letter, size in zip(letters, tensor.shape, strict=True):  # type: ignore[attr-defined]
            sizes[letter] = max(sizes.get(letter, 1), int(size))
    return {letter: size for letter, size in sizes.items() if size > 1}


def _letters(names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> Letters:
    return tuple(
        (n,) if size > 1 and n in sizes else () for n, size in zip(names, shape, strict=True)
    )


def _spread_out(letters: frozenset[str], sizes: dict[str, int]) -> frozenset[str]:
    """The letters of the call that belong to letters of the row: `b` covers `b0`, `b1` ..."""
    return frozenset(
        name for name in sizes if name in letters or name.rstrip("0123456789") in letters
    )
