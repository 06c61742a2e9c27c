"""The work of an op as loop nests over the model's factors: the symbolic form of its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from autopar.ir import Leaf, Moved, Work
from autopar.rules.spec import Nest, Spec

LeavesOf = Callable[[str], tuple[Leaf, ...]]  # of a letter


def works(spec: Spec, leaves_of: LeavesOf) -> tuple[Work, ...]:
    """The loop nests of an op; their FLOPs add up to `spec.flops`, a whole number."""
    found = tuple(_work(nest, leaves_of) for nest in nests_of(spec))
    assert math.isclose(sum(work.flops for work in found), spec.flops, abs_tol=0.5), (spec, found)
    return found


def nests_of(spec: Spec) -> tuple[Nest, ...]:
    """The loop nests that a rule states; else one, a product of two operands where each point is multiplied and added.

    Its letters are the largest set such that `flops` is a small multiple of the product of their sizes.
    """
    if spec.nests:
        return spec.nests
    times, letters = _space(spec)
    if spec.flops != 2 * spec.points or len(spec.operands) < 2:
        return (Nest(times, letters),)
    return (Nest.of(times, letters, *map(_letters, (*spec.operands[:2], spec.results[0]))),)


def _space(spec: Spec) -> tuple[float, tuple[str, ...]]:
    for letters in _iteration_spaces(spec):
        points = math.prod(spec.sizes[letter] for letter in letters)
        if points and spec.flops % points == 0:
            return spec.flops / points, letters
    return float(spec.flops), ()


def _iteration_spaces(spec: Spec) -> Iterator[tuple[str, ...]]:
    yield tuple(spec.sizes)
    for tensor in (*spec.results, *spec.operands):
        yield tuple(dict.fromkeys(letter for dim in tensor for letter in dim))


def _work(nest: Nest, leaves_of: LeavesOf) -> Work:
    def leaves(letters: Iterable[str]) -> tuple[Leaf, ...]:
        return tuple(leaf for letter in letters for leaf in leaves_of(letter))

    rows, columns, inner, batch, groups = map(leaves, nest[1:6])
    moved = tuple(Moved(leaves(letters), itemsize_bytes) for letters, itemsize_bytes in nest.moved)
    return Work(nest.times, rows, columns, inner, batch, groups, nest.itemsize_bytes, nest.gradients, moved)


def _letters(tensor: Iterable[tuple[str, ...]]) -> set[str]:
    return {letter for dim in tensor for letter in dim}
