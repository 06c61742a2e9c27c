"""One line per op family: `b.. k, j k, +j -> b.. j | sum k`.

Grammar:
    row     = tensors "->" tensors {"|" clause}
    tensors = tensor {"," tensor}
    tensor  = ["+"] {dim}                      `+` the operand is added to the result (a bias)
    dim     = letter [".."] ["!"]              `..` any number of dims, `!` the letter stays whole
            | "(" letter {letter} ")"          one dim of several letters, such as the heads (g r) of g groups of r
    clause  = "sum" letter {letter}            letters that are summed away
            | "linear" position {position}     operands through which P passes, one at a time
            | "normalize" letter               letters the op normalizes over (they stay whole too)
            | "flops" number {letter} ["over" {letter}]
                                               forward FLOPs: the number for every point of these letters; `over` what
                                               a matrix product sums
            | "saves" row                      what the op keeps for backward, as in `autopar.rules.kept.rows`

Operands are matched with the tensors of the call in order; a trailing operand that the call lacks (an optional bias) is
left out. Where an operand has size 1, its letter is broadcast. An operand with fewer dims lacks the leading letters.
Several `flops` are added up.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.rules.spec import Call, Letters, Nest, Spec


@dataclass(frozen=True)
class Pattern:
    """One tensor of a row: the letters of its dims, and which of them stands for several dims, if one does.

    A dim of several letters has a space between them: `g r`.
    """

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
    nests: tuple[tuple[float, tuple[str, ...], tuple[str, ...]], ...] = ()
    saves: str | None = None


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
    nests: list[tuple[float, tuple[str, ...], tuple[str, ...]]] = []
    saves: str | None = None
    for clause in clauses:
        word, _, rest = clause.partition(" ")
        values = rest.split()
        if word == "flops":
            nests.append(_nest(values, text))
        elif word == "saves":
            saves = rest
        elif word in named:
            named[word] += values
        else:
            known = [*named, "flops", "saves"]
            raise ValueError(f"The rule {text!r} has the clause {word!r}; known are {known}.")
    normalized = frozenset(named["normalize"])
    return Row(
        operands,
        results,
        sums=frozenset(named["sum"]),
        whole=frozenset(whole) | normalized,
        linear=tuple(int(value) for value in named["linear"]),
        normalized=normalized,
        nests=tuple(nests),
        saves=saves,
    )


def _nest(words: Sequence[str], row: str) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """The coefficient, the letters and the summed letters of `flops 2 i j k over k`."""
    split = words.index("over") if "over" in words else len(words)
    letters, summed = tuple(words[1:split]), tuple(words[split + 1 :])
    try:
        if not set(summed) <= set(letters):
            raise ValueError
        return float(words[0]), letters, summed
    except (IndexError, ValueError):
        said = " ".join(["flops", *words])
        raise ValueError(
            f"Cannot read {said!r} in the rule {row!r}; write flops 4 b i, or flops 2 i j k over k."
        ) from None


def _pattern(text: str, whole: set[str], row: str) -> Pattern:
    letters: list[str] = []
    spread = ""
    additive = text.strip().startswith("+")
    # A dim of several letters is one word.
    words = re.findall(r"\([^()]*\)|[^\s()]+|[()]", text.strip().removeprefix("+"))
    for word in words:
        group = word.startswith("(") and word.endswith(")")
        parts = word[1:-1].split() if group else [word]
        names = [part.rstrip(".!") for part in parts]
        if not names or not all(name.isidentifier() for name in names):
            raise ValueError(f"Cannot read {word!r} in the rule {row!r}.")
        letters.append(" ".join(names))
        spread = names[0] if ".." in word else spread
        whole |= {name for name, part in zip(names, parts, strict=True) if part.endswith("!")}
    return Pattern(tuple(letters), spread, additive)


def spec_of(row: Row | str, call: Call) -> Spec:
    """The spec of a call whose tensors a row describes."""
    row = parse(row) if isinstance(row, str) else row
    patterns = row.operands[: len(call.operands)]
    names = [p.expand(t.ndim) for p, t in zip(patterns, call.operands, strict=True)]
    result_patterns = row.results[: len(call.results)]
    result_names = [p.expand(t.ndim) for p, t in zip(result_patterns, call.results, strict=True)]
    sizes = _sizes(names + result_names, [*call.operands, *call.results])
    spec = Spec(
        operands=tuple(_letters(n, t.shape, sizes) for n, t in zip(names, call.operands, strict=True)),
        results=tuple(_letters(n, t.shape, sizes) for n, t in zip(result_names, call.results, strict=True)),
        sizes=sizes,
        sums=_spread_out(row.sums, sizes),
        whole=_spread_out(row.whole, sizes),
        additive=frozenset(i for i, p in enumerate(patterns) if p.additive),
        normalized=_spread_out(row.normalized, sizes),
    )
    if row.nests:
        spec = _with_flops(spec, row)
    unused = set(row.linear) & spec.additive
    assert not unused, f"operands {unused} of {row} cannot be both linear and additive"
    alone = not spec.additive  # P may pass only where nothing else is added to the result
    return replace(spec, linear=tuple(frozenset({i}) for i in row.linear) if alone else ())


def result_shapes(
    text: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> list[tuple[int, ...]]:
    """The shapes of results that a row gives for parts of the operands.

    Args:
        text: the row.
        operands: operands of the call, whole or parts of them.
        results: results of the call on whole operands; their sizes are those of letters that no operand has.
    """
    row = parse(text)
    names = [p.expand(x.ndim) for p, x in zip(row.operands, operands, strict=False)]
    made = [p.expand(y.ndim) for p, y in zip(row.results, results, strict=False)]
    sizes = _sizes(names, operands)
    return [
        tuple(
            math.prod(sizes.get(x, 1) for x in name.split())
            if any(x in each.split() for own in names for each in own for x in name.split())
            else int(size)
            for name, size in zip(letters, y.shape, strict=True)
        )
        for letters, y in zip(made, results, strict=True)
    ]


def line(text: str, **changes: Any) -> Callable[[Call], Spec]:
    """The rule that a row describes, for an op with one FLOP per element of its results."""

    def rule(call: Call) -> Spec:
        spec = spec_of(text, call)
        return replace(spec, flops=sum(t.numel() for t in call.results), **changes)

    return rule


def _with_flops(spec: Spec, row: Row) -> Spec:
    """The spec with the FLOPs that its row states."""
    nests = tuple(_stated(spec, times, *(in_order(x, spec.sizes) for x in both)) for times, *both in row.nests)
    return replace(spec, nests=nests, flops=round(sum(nest.flops(spec.sizes) for nest in nests)))


def _stated(spec: Spec, times: float, letters: Sequence[str], summed: Sequence[str]) -> Nest:
    """A nest that a row states: a product only where it says what is summed; columns are the result's last dim."""
    left, right = ({x for dim in tensor for x in dim} for tensor in (*spec.operands, (), ())[:2])
    columns = ({*spec.results[0][-1]} if spec.results[0] else right - left) - {*summed}
    batch = (left & right) - columns - {*summed}
    return Nest.of(times, letters, {*letters} - columns, {*summed} | columns | batch, {*letters} - {*summed})


def _sizes(names: Sequence[Sequence[str]], tensors: Sequence[object]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    dims = [
        (name.split(), int(size))
        for letters, tensor in zip(names, tensors, strict=True)
        for name, size in zip(letters, tensor.shape, strict=True)  # type: ignore[attr-defined]
    ]
    for own, size in dims:
        if len(own) == 1:
            sizes[own[0]] = max(sizes.get(own[0], 1), size)
    for own, size in dims:
        missing = [letter for letter in own if letter not in sizes]
        if len(own) > 1 and missing:
            known = math.prod(sizes[letter] for letter in own if letter in sizes)
            assert len(missing) == 1 and size % known == 0, (own, size, sizes)
            sizes[missing[0]] = size // known
    return {letter: size for letter, size in sizes.items() if size > 1}


def _letters(names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> Letters:
    return tuple(
        tuple(x for x in n.split() if x in sizes) if size > 1 else () for n, size in zip(names, shape, strict=True)
    )


def in_order(letters: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The letters of a call that belong to letters of the row, in their order: `b` stands for `b1`, `b0`."""
    return tuple(name for x in letters for name in sizes if x in (name, name.rstrip("0123456789")))


def _spread_out(letters: frozenset[str], sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(in_order(letters, sizes))
