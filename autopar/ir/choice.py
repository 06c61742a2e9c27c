"""Choices: the ways to run an op along one mesh axis, each with a label.

A label says what the choice splits; see `Choice`. The labels of an op on all axes are its `Labels`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.layout import State

UNSPLIT = "-"  # label of the choice that splits nothing: operands and results are in R

VARIED = "~"  # label of the choice with operands and results in V: every rank does all the work

PARTIAL = "+"  # first letter of the labels of choices that pass P through a linear op

EXCHANGED = ">"  # separates the two factors of labels such as `t>e`, see `Choice`

OWNED = "@"  # first letter of labels such as `@1`, of an op that rank 1 of the axis runs alone


@dataclass(frozen=True)
class Choice:
    """One way to run an op along one mesh axis.

    Attributes:
        label: `-` (splits nothing), `~` (splits nothing, operands and results in V), a factor of the op's rule such
            as `k` or `k.1`, `+...` (a linear op applied to partial sums, P), or `t>e`: operands and results are split
            by the factor `t`, and inside the op ranks exchange rows so that the work is split by `e`. `@i`: rank i of
            the axis runs the op alone, with operands and results in O(i).
        operands: the state that each tensor operand must be in, in the order of `Op.operands`.
        results: the state in which the op leaves each tensor result, in the order of `Op.results`.
        size: size of the factor that is split, which the axis size must divide; for `t>e` the size of `e`; 0 where
            nothing is split.
        factor: name of the split factor in the whole graph; "" where nothing is split.
        stretch: imbalance of the work: the work of the busiest rank, divided by the mean over the ranks.
    """

    label: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int = 0
    factor: str = ""
    stretch: float = 1.0

    @property
    def splits(self) -> bool:
        """Whether the work of the op is divided among the ranks of the axis."""
        return self.size > 0


Labels = tuple[str, ...]  # the label of an op's choice on every mesh axis


def owner_of(label: str) -> int | None:
    """The rank that runs an op with this label alone, counted from 0 along the axis; None for other labels.

    >>> owner_of("@1"), owner_of("k")
    (1, None)
    """
    number = label.removeprefix(OWNED)
    return int(number) if label.startswith(OWNED) and number.isdecimal() else None


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
    return tuple(label.split(EXCHANGED))


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
    return label.partition(".")[0]
