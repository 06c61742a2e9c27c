"""Joins a program with that of smaller micro-batches: of 30 samples in 4 micro-batches two have 8 and two have 7.

Both are programs of one model with one layout of its parameters. A step runs the first micro-batches by one, the last
by the other, and adds their gradients up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import StepError
from autopar.program.program import Program


def with_smaller(program: Program, smaller: Program, first: int) -> Program:
    """The program whose micro-batches from number `first` on run by another one.

    Raises StepError where their results have nothing in common by which those of the batch are known.
    """
    difference = _difference(program, smaller)
    if difference:
        raise StepError(
            f"Micro-batches of {_rows(program)} and of {_rows(smaller)} rows {difference}, so that they give no result "
            "of the batch. Take a number of micro-batches that divides the batch, or a batch that it divides."
        )
    return replace(program, smaller=smaller, first_smaller=first)


def stages_with_smaller(stages: Sequence[Program], smaller: Sequence[Program], first: int) -> list[Program]:
    """The programs of stages, whose micro-batches from number `first` on run by others."""
    assert len(stages) == len(smaller), "both have the stages of one plan"
    return [replace(own, smaller=less, first_smaller=first) for own, less in zip(stages, smaller, strict=True)]


def _rows(program: Program) -> int:
    return max((spec.shape[0] for spec in program.inputs if spec.shape), default=1)


def _difference(program: Program, smaller: Program) -> str:
    """What two programs of a model have not in common, as a verb and its object; "" if nothing."""
    if program.parameters != smaller.parameters or program.mutated != smaller.mutated:
        return "use different parameters, or change different buffers"
    if program.objective.form != smaller.objective.form:
        return "compute different losses"
    extras = zip(program.extras, smaller.extras, strict=False)
    if len(program.extras) != len(smaller.extras) or any(a.form != b.form for a, b in extras):
        return "return different results"
    return ""
