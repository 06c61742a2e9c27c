"""The work of an op as loop nests over the model's factors: the symbolic form of its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from autopar.ir import Leaf, Work
from autopar.rules.spec import Spec

LeavesOf = Callable[[str], tuple[Leaf, ...]]  # of a letter


def works(spec: Spec, leaves_of: LeavesOf) -> tuple[Work, ...]:
    """The loop nests of an op; their FLOPs add up to `spec.flops`, a whole number."""
    nests = spec.nests or (_nest(spec),)
    found = tuple(_work(spec, coefficient, letters, leaves_of) for coefficient, letters in nests)
    assert math.isclose(sum(work.flops for work in found), spec.flops, abs_tol=0.5), (spec, found)
    return found


def _nest(spec: Spec) -> tuple[float, tuple[str, ...]]:
    """The largest set of letters such that `flops` is a small multiple of the product of their sizes."""
    for letters in _iteration_spaces(spec):
        points = math.prod(spec.sizes[letter] for letter in letters)
        if points and spec.flops % points == 0:
            return spec.flops / points, letters
    return float(spec.flops), ()


def _iteration_spaces(spec: Spec) -> Iterator[tuple[str, ...]]:
    yield tuple(spec.sizes)
    for tensor in (*spec.results, *spec.operands):
        yield tuple(dict.fromkeys(letter for dim in tensor for letter in dim))


def _work(spec: Spec, coefficient: float, letters: tuple[str, ...], leaves_of: LeavesOf) -> Work:
    """Sorts letters into rows, columns, inner and batch; all are rows if nothing is summed."""
    if not spec.nests and spec.flops != 2 * spec.points:
        return Work(coefficient, tuple(leaf for letter in letters for leaf in leaves_of(letter)))
    if spec.contracted is not None:
        return _stated_work(spec, coefficient, letters, leaves_of)
    left, right, result = _three(spec, letters)
    groups: dict[str, list[Leaf]] = {"rows": [], "columns": [], "inner": [], "batch": []}
    for letter in letters:
        place = (letter in left, letter in right, letter in result)
        groups[_GROUP.get(place, "rows")] += leaves_of(letter)
    if not groups["inner"]:
        groups = {"rows": [leaf for letter in letters for leaf in leaves_of(letter)]}
    return Work(coefficient, **{name: tuple(found) for name, found in groups.items()})


def _stated_work(spec: Spec, coefficient: float, letters: tuple[str, ...], leaves_of: LeavesOf) -> Work:
    """The work that a row states: a product only where it says what is summed; columns are the result's last dim."""
    inner = spec.contracted or frozenset()
    left, right = (_letters(tensor) for tensor in (*spec.operands, (), ())[:2])
    results = spec.results[0]
    columns = {*results[-1]} if results else right - left
    groups: dict[str, list[Leaf]] = {"rows": [], "columns": [], "inner": [], "batch": []}
    for letter in letters:
        shared = "batch" if letter in left & right else "rows"
        place = "inner" if letter in inner else "columns" if letter in columns else shared
        groups[place if inner.intersection(letters) else "rows"] += leaves_of(letter)
    return Work(coefficient, **{name: tuple(found) for name, found in groups.items()})


_GROUP = {
    (True, False, True): "rows",
    (False, True, True): "columns",
    (True, True, False): "inner",
    (True, True, True): "batch",
}


def _three(spec: Spec, letters: tuple[str, ...]) -> tuple[set[str], set[str], set[str]]:
    """Letters of the two operands and of the result of one nest."""
    if len(spec.operands) < 2:
        return set(), set(), set()
    if not spec.nests:
        return _letters(spec.operands[0]), _letters(spec.operands[1]), _letters(spec.results[0])
    # Attention: queries times keys over e, then scores times values over the keys.
    query, key, value = (_letters(tensor) & set(letters) for tensor in spec.operands[:3])
    if "e" in letters:
        return query, key, (query | key) - {"e"}
    return (query | value) - {"v"}, value, query | {"v"}


def _letters(tensor: Iterable[tuple[str, ...]]) -> set[str]:
    return {letter for dim in tensor for letter in dim}
