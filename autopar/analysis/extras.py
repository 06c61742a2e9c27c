"""Computes the extra results of a step from those of its micro-batches.

A step may return more than its loss (`autopar.capture.results`). Each of these results is, over micro-batches, one of

    the same in all      a table of positions                 the result of any micro-batch
    rows                 logits                               the results, concatenated
    a sum, mean, ratio   correct.sum(), accuracy              a sum with known shares, as the loss is

which `autopar.analysis.objective` finds for every tensor of the step. A result that is none of these (the maximum over
a batch, a product of two means) has no value of the whole batch, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.analysis.objective import BatchCapture, Objective, objective_in
from autopar.analysis.parts import PartFinder, batch_factors, places_of
from autopar.capture.captured import Captured
from autopar.capture.results import extra_names
from autopar.errors import StepError
from autopar.ir import Graph

_SINGLE_ROW = "each of them has a single row, so a dim of rows cannot be told from other dims of size 1"


@dataclass(frozen=True)
class Rows:
    """Where the batch is in a tensor.

    A dim may be a product of factors, such as batch x seq after a flatten; the batch is one of them.

    Attributes:
        dim: the dim that contains the batch.
        factor: position of the batch among the factors of that dim, major first.
    """

    dim: int
    factor: int


@dataclass(frozen=True)
class Extra:
    """An extra result of a step.

    Attributes:
        name: its place in what the user returned, such as `result[1]['acc']`.
        rows: position of the batch, for a result with a row for every sample.
        objective: how a sum, mean or ratio comes from those of the micro-batches; None for rows, and for a result that
            is the same in all of them.
        obstacle: op, with its line, because of which the result cannot be computed from micro-batches; "" for none.
    """

    name: str
    rows: Rows | None = None
    objective: Objective | None = None
    obstacle: str = ""

    @property
    def form(self) -> tuple[object, ...]:
        """What the result has in common in micro-batches of all sizes."""
        return self.name, self.rows, None if self.objective is None else self.objective.form


def extras_of(part: Captured, graph: Graph, batch: BatchCapture) -> tuple[Extra, ...]:
    """The extra results of a captured step, in the order of its outputs; none of a forward.

    Args:
        part: the step as captured for a micro-batch.
        graph: the analysis of that capture.
        batch: the step as captured for the batch.
    """
    outputs = graph.outputs[len(part.mutated) : -1]
    if not part.is_step or not outputs:
        return ()
    finder = PartFinder(batch.captured, batch.graph, part)
    if not finder.counts.is_alike:
        return tuple(Extra(name, obstacle=finder.obstacle("")) for name in _tensor_names(part))
    wholes = batch.graph.outputs[len(part.mutated) : -1]
    return tuple(
        _extra(part, finder, name, whole, _rows_in(graph, own))
        for name, whole, own in zip(_tensor_names(part), wholes, outputs, strict=True)
    )


def refuse_split_extras(extras: tuple[Extra, ...], micro_batches: int) -> None:
    """Raises StepError for a result that cannot be computed from this many micro-batches."""
    lost = next((each for each in extras if each.obstacle), None)
    if lost is not None and micro_batches > 1:
        raise StepError(
            f"{lost.name} cannot be computed from {micro_batches} micro-batches: {lost.obstacle}. Results that can be "
            "are rows of the batch, and sums, means and ratios of sums over it. Return the rows, and compute the rest "
            "outside of the step; or take micro_batches=1."
        )


def _tensor_names(captured: Captured) -> Iterator[str]:
    """The names of the leaves that are tensors; the others are built into the program."""
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    leaves = output[len(captured.mutated) : -1]
    for name, leaf in zip(extra_names(captured.out_spec), leaves, strict=True):
        if isinstance(leaf, fx.Node):
            yield name


def _extra(part: Captured, finder: PartFinder, name: str, tensor: str, rows: Rows | None) -> Extra:
    """An extra result.

    Args:
        part: the step as captured for a micro-batch.
        finder: the parts of the step.
        name: place of the result in what the user returned.
        tensor: name of the tensor in the capture of the batch.
        rows: place of the batch in the tensor of a micro-batch; None where it has none.
    """
    found = finder.part(tensor)
    if found.kind == "same" and found.power == 0:
        return Extra(name)
    if found.kind == "rows" and found.power == 0:
        return Extra(name, rows=rows, obstacle="" if rows else _SINGLE_ROW)
    objective = objective_in(part, finder, tensor)
    return Extra(name, objective=objective, obstacle=objective.obstacle)


def _rows_in(graph: Graph, tensor: str) -> Rows | None:
    """The position of the batch in a tensor; None if no dim contains it, as with a single row."""
    places = places_of(graph.tensors[tensor].factors, batch_factors(graph))
    return Rows(*places[0]) if len(places) == 1 else None
