"""Choices: the ways to run an op along one mesh axis, each with a label.

A label says what the choice splits; see `Choice`. The labels of an op on all axes are its `Labels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.files import is_count
from autopar.ir.layout import State, by_depth, depths

UNSPLIT = "-"  # label of the choice that splits nothing: operands and results are in R

VARIED = "~"  # label of the choice with operands and results in V: every rank does all the work

PARTIAL = "+"  # first letter of the labels of choices that pass P through a linear op

EXCHANGED = ">"  # separates the two factors of labels such as `t>e`, see `Choice`

DEEPER = "^"  # stands before the depth in labels such as `k^1`, see `nested_labels`

OWNED = "@"  # first letter of labels such as `@1`, of an op that rank 1 of the axis runs alone


@dataclass(frozen=True)
class Choice:
    """One way to run an op along one mesh axis.

    Attributes:
        label: `-` (splits nothing), `~` (splits nothing, operands and results in V), a factor of the op's rule such
            as `k` or `k.1`, `+...` (a linear op applied to partial sums, P), or `t>e`: operands and results are split
            by the factor `t`, and inside the op ranks exchange rows so that the work is split by `e`. `@i`: rank i of
            the axis runs the op alone, with operands and results in O(i). `k^1`: `k` of an axis that lies deeper than
            an axis after it, see `nested_labels`.
        operands: the state that each tensor operand must be in, in the order of `Op.operands`.
        results: the state in which the op leaves each tensor result, in the order of `Op.results`.
        size: size of the factor that is split; for `t>e` the size of `e`; 0 where
            nothing is split.
        factor: name of the split factor in the whole graph; "" where nothing is split.
        stretch: imbalance of the work: the work of the busiest rank, divided by the mean over the ranks.
        needs_equal: whether the op is right on parts of one size alone.
    """

    label: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int = 0
    factor: str = ""
    stretch: float = 1.0
    needs_equal: bool = False

    @property
    def splits(self) -> bool:
        """Whether the work of the op is divided among the ranks of the axis."""
        return self.size > 0

    def at_depth(self, depth: int) -> Choice:
        """The same choice of an axis that lies at this depth among those that split the same factor."""

        def deeper(states: tuple[State, ...]) -> tuple[State, ...]:
            return tuple(x._replace(depth=depth) if x.kind == "S" else x for x in states)

        label = f"{self.label}{DEEPER}{depth}"
        return replace(self, label=label, operands=deeper(self.operands), results=deeper(self.results))


Labels = tuple[str, ...]  # the label of an op's choice on every mesh axis


def owner_of(label: str) -> int | None:
    """The rank that runs an op with this label alone, counted from 0 along the axis; None for other labels.

    >>> owner_of("@1"), owner_of("k")
    (1, None)
    """
    number = label.removeprefix(OWNED)
    return int(number) if label.startswith(OWNED) and is_count(number) else None


def plain(label: str) -> str:
    """A label without its depth.

    >>> plain("k^1"), plain("k")
    ('k', 'k')
    """
    return label.partition(DEEPER)[0]


def nested_labels(labels: Labels, order: Sequence[int]) -> Labels:
    """The same choices, where axes with the same label nest in another order than that of the mesh.

    Args:
        labels: a label for every axis; depths are ignored.
        order: positions of all axes, the major one first.

    >>> nested_labels(("k", "k", "-"), (1, 0, 2)), nested_labels(("k^1", "k", "-"), (0, 1, 2))
    (('k^1', 'k', '-'), ('k', 'k', '-'))
    """
    found = [plain(label) for label in labels]
    shared = [label if can_nest(label) else None for label in found]
    for axis, depth in depths(shared, order):
        found[axis] += f"{DEEPER}{depth}"
    return tuple(found)


def nesting_of(labels: Labels) -> list[int]:
    """Positions of the axes, of which those that split the same factor stand as they nest, the major one first.

    Operands are split by `t` under `t>e` as under `t`, so that such axes nest too.

    >>> nesting_of(("k^1", "b", "k")), nesting_of(("t^1", "t>e", "t"))
    ([2, 1, 0], [1, 2, 0])
    """
    if not any(DEEPER in label for label in labels):
        return list(range(len(labels)))
    factors = [split_factors(label)[0] for label in labels]
    return by_depth(factors, [_depth(label) for label in labels])


def _depth(label: str) -> int:
    """The depth in a label; 0 where it has none, or one that is not a number, which `is_least_deep` finds."""
    depth = label.partition(DEEPER)[2]
    return int(depth) if is_count(depth) else 0


def is_least_deep(labels: Labels) -> bool:
    """Whether the depths of labels are the least that tell how axes nest, so that equal choices have equal labels."""
    is_deep = any(DEEPER in label for label in labels)
    return not is_deep or labels == nested_labels(labels, nesting_of(labels))


def can_nest(label: str) -> bool:
    """Whether axes with this label may nest in any order: it splits a factor, and ranks exchange no rows in the op."""
    return label[0].isalnum() and EXCHANGED not in label


def runs_alone(labels: Labels) -> bool:
    """Whether one rank of some axis runs an op with these labels alone.

    >>> runs_alone(("-", "@1")), runs_alone(("-", "k"))
    (True, False)
    """
    return any(label.startswith(OWNED) for label in labels)


def split_factors(label: str) -> tuple[str, ...]:
    """The labels of a label such as `t.0>e`: the factor that is split outside the op, and the one split inside.

    >>> split_factors("t.0>e"), split_factors("t.0")
    (('t.0', 'e'), ('t.0',))
    """
    return tuple(plain(label).split(EXCHANGED))


def go_together(labels: Labels) -> bool:
    """Whether an op can run under these choices on several axes at once.

    It cannot if one axis has a label such as `t>e` (the op exchanges rows, and its work is split by `e`) and another
    axis splits `e` without an exchange.

    >>> go_together(("t.0>e", "t.1>e")), go_together(("t.0>e", "e"))
    (True, False)
    """
    exchanged = {_letter(split_factors(x)[-1]) for x in labels if EXCHANGED in x}
    return all(EXCHANGED in x or _letter(x) not in exchanged for x in labels)


def _letter(label: str) -> str:
    return plain(label).partition(".")[0]
