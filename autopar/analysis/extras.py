"""How the extra results of a step are put together from those of its micro-batches.

A step may return more than its loss (`autopar.capture.results`). Each of these results is, over micro-batches, one of

    the same in all      a table of positions                 that of any micro-batch
    rows                 logits                               one micro-batch's after the other's
    a sum, mean, ratio   correct.sum(), accuracy              a sum with known shares, as the loss is

which `autopar.analysis.objective` finds for every tensor of the step. A result that is none of these (the maximum over
a batch, a product of two means) has no value of the whole batch, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.analysis.objective import Objective, PartFinder, objective_in
from autopar.capture.captured import Captured
from autopar.capture.remedies import traced_line
from autopar.capture.results import extra_names
from autopar.errors import StepError
from autopar.ir import Graph


@dataclass(frozen=True)
class Rows:
    """The place of the batch among the factors of a tensor's dims.

    Attributes:
        dim: position of the dim.
        factor: position among the factors of that dim.
    """

    dim: int
    factor: int


@dataclass(frozen=True)
class Extra:
    """An extra result of a step.

    Attributes:
        name: its place in what the user returned, such as `result[1]['acc']`.
        rows: the place of the batch, for a result with a row for every sample.
        objective: how a sum, mean or ratio comes from those of the micro-batches; None for rows, and for what is the
            same in all of them.
        obstacle: the op that stands in the way, with its line, for a result that cannot be put together.
    """

    name: str
    rows: Rows | None = None
    objective: Objective | None = None
    obstacle: str = ""


def extras_of(captured: Captured, graph: Graph) -> tuple[Extra, ...]:
    """The extra results of a captured step, in the order of its outputs; none of a forward."""
    outputs = graph.outputs[len(captured.mutated) : -1]
    if not captured.is_step or not outputs:
        return ()
    finder = PartFinder(captured, graph)
    return tuple(
        _extra(captured, finder, name, tensor)
        for name, tensor in zip(_tensor_names(captured), outputs, strict=True)
    )


def refuse_split_extras(extras: tuple[Extra, ...], micro_batches: int) -> None:
    """Raises StepError for a result that so many micro-batches do not give."""
    lost = next((each for each in extras if each.obstacle), None)
    if lost is not None and micro_batches > 1:
        raise StepError(
            f"{lost.name} cannot be put together from {micro_batches} micro-batches: {lost.obstacle}. What can be are "
            "rows of the batch, and sums, means and ratios of sums over it: return the rows, and compute the rest "
            "outside of the step; or take micro_batches=1."
        )


def _tensor_names(captured: Captured) -> Iterator[str]:
    """The names of the leaves that are tensors; the others are built into the program."""
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    leaves = output[len(captured.mutated) : -1]
    for name, leaf in zip(extra_names(captured.out_spec), leaves, strict=True):
        if isinstance(leaf, fx.Node):
            yield name


def _extra(captured: Captured, finder: PartFinder, name: str, tensor: str) -> Extra:
    part = finder.part(tensor)
    if finder.rows == 1 and part.kind != "same":
        return Extra(
            name,
            obstacle="each of them has a single row, so that its rows cannot be told from its dims",
        )
    if part.kind == "same":
        return Extra(name)
    if part.kind == "rows":
        return Extra(name, rows=_rows_in(finder, tensor))
    objective = objective_in(captured, finder, part)
    if objective.is_known:
        return Extra(name, objective=objective)
    return Extra(name, obstacle=_obstacle(captured, finder, tensor))


def _rows_in(finder: PartFinder, tensor: str) -> Rows:
    places = [
        Rows(dim, i)
        for dim, factors in enumerate(finder.graph.tensors[tensor].factors)
        for i, factor in enumerate(factors)
        if factor in finder.batch
    ]
    assert len(places) == 1, f"the rows of {tensor} run along one dim"
    return places[0]


def _obstacle(captured: Captured, finder: PartFinder, tensor: str) -> str:
    """The first op on the way to a tensor whose result the micro-batches do not give, with its line."""
    made_by = {name: op for op in finder.graph.ops for name in op.results}
    found, waiting = "", [tensor]
    while waiting:
        op = made_by.get(waiting.pop())
        if op is None:
            continue
        found = f"{op.kind.removeprefix('aten.')} ({traced_line(finder.nodes[op.name])})"
        waiting = [x for x in op.operands if finder.part(x).kind in ("unknown", "function")][:1]
    return f"{found} is neither a row for every sample nor a sum, mean or ratio over them"
