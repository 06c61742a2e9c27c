"""Computes the loss of a batch from the losses of its micro-batches.

A loss is a mean over rows, a sum over rows, or a ratio N / D of them, such as a mean over unmasked tokens. The loss of
the batch is then not the mean of the losses L_i of its parts, but

    N / D = sum_i (D_i / D) L_i

with D_i the denominator of part i and D that of the whole batch, both known from the inputs before any part is run. For
a mean they are numbers of rows: of 30 rows in parts of 8, 8, 7 and 7 the first has a share of 8 / 30. So every loss of
these kinds is a sum of the parts' losses with known shares, and so are its gradients.
`autopar.analysis.parts` finds the kind of a loss.

[Note: a loss of several terms] A sum of such losses, each over a mask or rows of its own, has no such shares: the terms
have theirs, f_t,i = D_t,i / D_t. Every micro-batch then computes

    L = sum_i sum_t f_t,i L_t,i

with the shares as inputs of its program, by which `autopar.program.term_shares` multiplies the terms where they are
added. `_TermFinder` finds them.

[Note: batch statistics] A batch norm sees one micro-batch at a time, as it does where a loop accumulates gradients. The
loss is then not that of the batch, and a warning says so; a loss that is not a mean besides is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx

from autopar.analysis.denominators import Base, base_of, denominator_of
from autopar.analysis.parts import PartFinder
from autopar.capture.captured import Captured
from autopar.errors import StepError
from autopar.ir import Graph


@dataclass(frozen=True)
class Objective:
    """The loss of a batch as a sum of its parts' losses with shares.

    Attributes:
        kind: `mean`, `sum` or `ratio` of rows, a sum of several such `terms`, or `unknown`.
        base: kind of a ratio's numerator.
        denominator: for a ratio, the graph from inputs and buffers to the denominator and to the sums or means that
            it is a function of. See `Denominator` for its placeholders.
        bases: kind of each of those, `sum` or `mean`.
        obstacle: for an unknown kind, the op because of which it is unknown, and its line.
        terms: the terms of a sum, each with an objective of its own.
        normalizes: whether the kind is unknown because of batch norms alone, see [Note: batch statistics].
    """

    kind: Literal["mean", "sum", "ratio", "terms", "unknown"] = "mean"
    base: Base = "sum"
    denominator: fx.GraphModule | None = field(default=None, compare=False)
    bases: tuple[Base, ...] = ()
    obstacle: str = ""
    terms: tuple[LossTerm, ...] = ()
    normalizes: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the micro-batches with their shares give the loss of the whole batch."""
        return self.kind != "unknown"

    @property
    def counts(self) -> bool:
        """Whether shares depend on what the micro-batches contain, so that they are those of one batch alone."""
        return self.kind in ("sum", "ratio", "terms")

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the inputs and buffers from which the denominators are computed."""
        if self.denominator is None:
            return tuple(dict.fromkeys(name for term in self.terms for name in term.objective.reads))
        return tuple(n.meta["reads"] for n in self.denominator.graph.find_nodes(op="placeholder"))

    @property
    def form(self) -> tuple[object, ...]:
        """What the objectives of micro-batches of all sizes have in common."""
        terms = tuple((term.objective.form, term.may_be_empty) for term in self.terms)
        return self.kind, self.base, self.bases, self.reads, self.normalizes, terms

    @torch.no_grad()
    def shares(self, parts: Sequence[MicroBatch], *, skips_empty: bool = False) -> list[float]:
        """The share of each micro-batch's loss in the loss of the batch.

        For an unknown kind, the loss is the mean over rows.

        Args:
            parts: the micro-batches, whose objectives have the form of this one.
            skips_empty: whether a micro-batch of which no element counts is left out of the loss, with a share of 0.

        Raises StepError if no element of a micro-batch counts and it is not left out, because its loss would be 0 / 0.
        If none of the whole batch counts, the shares are nan, like the loss on a single device.
        """
        count, rows = len(parts), sum(part.rows for part in parts)
        if self.terms and count > 1:
            return self._shares_of_terms(parts, skips_empty=skips_empty)
        if self.denominator is None or count == 1:
            return [1.0 if self.kind == "sum" or count == 1 else part.rows / rows for part in parts]
        found = [part.objective._run(part.read(self.reads), {}) for part in parts]
        whole = {}
        for node, base, *values in zip(self._summands, self.bases, *(each[1:] for each in found), strict=True):
            sums = [part.rows * x if base == "mean" else x for part, x in zip(parts, values, strict=True)]
            total = torch.stack(sums).sum(0)
            whole[node] = total / rows if base == "mean" else total
        (denominator, *_) = self._run(parts[0].read(self.reads), whole)
        empty = [i for i, each in enumerate(found) if not each[0].item()]
        skips_empty = skips_empty and len(empty) < count
        if empty and denominator.item() and not skips_empty:
            raise _nothing_counts(empty[0], count)
        is_mean = self.base == "mean"
        divisor = denominator.double() * (rows if is_mean else 1)
        scales = [part.rows if is_mean else 1 for part in parts]
        return [(scale * x[0].double() / divisor).item() for scale, x in zip(scales, found, strict=True)]

    def term_shares(self, parts: Sequence[MicroBatch]) -> list[list[float]]:
        """For every micro-batch the share of each of its terms in that of the batch; 0 where nothing counts."""
        found = [
            term.objective.shares([part.of_term(number) for part in parts], skips_empty=True)
            for number, term in enumerate(self.terms)
        ]
        return [list(own) for own in zip(*found, strict=True)]

    def _shares_of_terms(self, parts: Sequence[MicroBatch], *, skips_empty: bool) -> list[float]:
        """1 for a micro-batch, whose terms have shares of their own; 0 for one that has no share in any."""
        found = self.term_shares(parts)
        for number, own in enumerate(found):
            lost = [term for term, share in zip(self.terms, own, strict=True) if not share and not term.may_be_empty]
            if (lost and any(own)) or not (all(own) or skips_empty):
                raise _nothing_counts(number, len(parts))
        return [float(any(own)) for own in found]

    def shares_of_groups(self, shares: Sequence[float], size: int) -> list[float]:
        """The share of each micro-batch in the loss of its group.

        Args:
            shares: share of each micro-batch in the loss of the whole batch.
            size: number of consecutive micro-batches that form a group.

        >>> Objective("mean").shares_of_groups([0.25, 0.25, 0.25, 0.25], 2)
        [0.5, 0.5, 0.5, 0.5]
        """
        if self.kind in ("sum", "terms"):
            return list(shares)
        totals = [sum(shares[i : i + size]) for i in range(0, len(shares), size)]
        return [share / totals[i // size] for i, share in enumerate(shares)]

    @property
    def _summands(self) -> list[fx.Node]:
        assert self.denominator is not None, "a ratio"
        output = next(iter(self.denominator.graph.find_nodes(op="output")))
        return list(output.args[0][1:])

    def _run(self, inputs: Sequence[Tensor], known: Mapping[fx.Node, Tensor]) -> list[Tensor]:
        """The denominator and its totals, some of which are given."""
        assert self.denominator is not None, "a ratio"
        result: list[Tensor] = fx.Interpreter(self.denominator).run(*inputs, initial_env=dict(known))
        return result


class MicroBatch(NamedTuple):
    """A micro-batch, as its share in a loss depends on it.

    Attributes:
        values: the whole tensors that the objective reads, by name, on the CPU.
        rows: its rows, in whatever unit all micro-batches count theirs in.
        objective: the objective as captured for micro-batches of its size.
    """

    values: Mapping[str, Tensor]
    rows: int
    objective: Objective

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """The tensors of these names."""
        return [self.values[name] for name in names]

    def of_term(self, number: int) -> MicroBatch:
        """The micro-batch, as the share of a term in that of the batch depends on it."""
        return self._replace(objective=self.objective.terms[number].objective)


def equal_parts(objective: Objective, values: Sequence[Mapping[str, Tensor]]) -> list[MicroBatch]:
    """Micro-batches of one size, by the tensors that an objective reads of them."""
    return [MicroBatch(each, 1, objective) for each in values]


@dataclass(frozen=True)
class LossTerm:
    """A term of a loss, see [Note: a loss of several terms].

    Attributes:
        name: node of the term, in the capture for a micro-batch.
        user: node of the op that adds it, or an op that is linear in it.
        objective: how the term of the batch comes from those of its micro-batches.
        may_be_empty: whether a program leaves the term out for a micro-batch of which no element counts in it.
    """

    name: str
    user: str
    objective: Objective
    may_be_empty: bool = False


def _nothing_counts(number: int, count: int) -> StepError:
    return StepError(
        f"Micro-batch {number + 1} of {count} has no element that counts (all of its targets are ignored or masked), "
        "and its loss, or a term of it, is 0 / 0. Take fewer micro-batches, or shuffle the batch."
    )


@dataclass(frozen=True)
class BatchCapture:
    """A step as captured for the whole batch.

    Attributes:
        captured: the capture.
        graph: its analysis.
    """

    captured: Captured
    graph: Graph


def objective_of(part: Captured, batch: BatchCapture) -> Objective:
    """The way in which the loss of a step comes from its micro-batches' losses; unknown if there is none.

    Args:
        part: the step as captured for a micro-batch. Where that is the batch's own capture, every number is taken
            for one that counts no rows.
        batch: the step as captured for the batch.
    """
    graph = batch.graph
    if not part.is_step or not graph.outputs or not graph.ops:
        return Objective("unknown", obstacle="the step computes nothing")
    finder = PartFinder(batch.captured, graph, part)
    found = objective_in(part, finder, graph.outputs[-1])
    if found.is_known:
        return found
    terms = _TermFinder(part, finder).of(graph.outputs[-1])
    if terms:
        return Objective("terms", terms=terms)
    finder = PartFinder(batch.captured, graph, part, normalizes=True)
    return replace(found, normalizes=objective_in(part, finder, graph.outputs[-1]).kind == "mean")


def objective_in(part: Captured, finder: PartFinder, tensor: str) -> Objective:
    """The way in which a tensor comes from those of micro-batches; unknown unless it is a mean, sum or ratio."""
    found = finder.part(tensor)
    base = base_of(found.power)
    if found.kind == "total" and base is not None:
        return Objective(base)
    if found.kind == "same" and found.power == -1:
        return Objective("sum")  # the number of rows is the sum of theirs
    if found.kind == "same" and found.power == 0:
        return Objective("mean")
    denominator = None
    if found.kind == "ratio" and base is not None:
        denominator = denominator_of(part, finder, found)
    if denominator is None or base is None:
        return Objective("unknown", obstacle=finder.obstacle(tensor))
    return Objective("ratio", base, denominator.module, denominator.bases)


class _TermFinder:
    """Finds the terms of a loss, see [Note: a loss of several terms].

    Args:
        part: the step as captured for a micro-batch.
        finder: the parts of the step.
    """

    def __init__(self, part: Captured, finder: PartFinder) -> None:
        self._part, self._finder = part, finder

    def of(self, tensor: str) -> tuple[LossTerm, ...]:
        """The terms of a loss; none if it is not a sum of such, or nothing is known of one of them."""
        found: list[LossTerm] = []
        waiting = [tensor]
        while waiting:
            op = self._finder.graph.producer.get(waiting.pop())
            addends = None if op is None else self._finder.addends(op)
            if op is None or not addends:
                return ()
            user = self._finder.counts.node(self._finder.nodes[op.name].name).name
            for addend in addends:
                objective = objective_in(self._part, self._finder, addend)
                if objective.is_known:
                    found.append(LossTerm(self._node(addend), user, objective))
                else:
                    waiting.append(addend)
        return tuple(dict.fromkeys(found))

    def _node(self, tensor: str) -> str:
        """The node of a tensor of one element in the capture for a micro-batch."""
        op = self._finder.graph.producer.get(tensor)
        name = tensor if op is None else self._finder.nodes[op.name].name
        return self._finder.counts.node(name).name
