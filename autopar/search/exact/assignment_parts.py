"""Time and memory of a step, composed from the decisions for the classes and entries of a folded graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.cost_model.buckets import hidden_by, message_bytes
from autopar.cost_model.items import MemoryItem, WorkItem
from autopar.cost_model.steps.step import Step
from autopar.ir import Layout, TieredLayout
from autopar.search.exact.decisions import Assignment
from autopar.search.exact.problem import Problem


def composed(problem: Problem, assignment: Assignment) -> Step:
    """Time and memory of the step of an assignment; they equal those of the plan for all layers."""
    steps, key = problem.prices.steps, assignment.key
    if key not in steps:
        parts, step = Parts(problem, assignment), problem.prices.step
        items, holdings = tuple(parts.items()), tuple(parts.holdings())
        steps[key] = replace(step, items=items, holdings=holdings, buckets_hide=parts.buckets_hide(), _sums={})
    return steps[key]


class Parts:
    """Work (items) and memory (holdings) of an assignment, for each class and entry once with its count."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.problem, self.assignment = problem, assignment
        self.layouts = [problem.layouts(i, labels) for i, labels in enumerate(assignment.labels)]
        self.targets = [self._targets(index) for index in range(len(problem.entries))]

    def items(self) -> Iterator[WorkItem]:
        """Work of ops, conversions and parameters."""
        prices = self.problem.prices
        for index, labels in enumerate(self.assignment.labels):
            yield from prices.op(index, labels)
        for index in range(len(self.problem.entries)):
            source = self._source(index)
            for target in self.targets[index]:
                yield from prices.conversions(index, source, target)
        for index, how in self.assignment.parameters.items():
            yield from prices.parameters(index, how)[0]

    def holdings(self) -> Iterator[MemoryItem]:
        """Memory of parameters, buffers, saved tensors, and of tensors that exist only while a block runs."""
        problem = self.problem
        for index, how in self.assignment.parameters.items():
            yield from problem.prices.parameters(index, how)[1]
        yield from problem.prices.buffers()
        yield MemoryItem("saved", "saved activations", "layers", self._saved_bytes())
        gathered = self._gathered_bytes()
        for block, counts in enumerate(problem.prices.blocks):
            yield MemoryItem("gathered", "gathered", "layers", gathered[block], "", block)
            working = sum(
                count * problem.prices.working_bytes(index, self.assignment.labels[index])
                for index, count in counts.items()
            )
            yield MemoryItem("working", "working", "layers", working, "", block)

    def buckets_hide(self) -> float:
        """The largest part of the messages of parameters that buckets of the usual size let hide."""
        entries, sizes = self.problem.entries, self.problem.sizes
        sent = (
            (message_bytes(entries[i].tensor, how, self.targets[i], sizes), entries[i].count)
            for i, how in self.assignment.parameters.items()
        )
        return hidden_by(sent, self.problem.bucket_bytes)

    def _source(self, index: int) -> TieredLayout:
        """Layout and tier of a tensor before any conversion."""
        entry, assignment = self.problem.entries[index], self.assignment
        if entry.producer is not None:
            made, position = entry.producer
            return TieredLayout(self.layouts[made].results[position])
        if entry.leaf == "parameter":
            return assignment.parameters[index].in_use
        return TieredLayout(assignment.inputs.get(index, self.problem.whole))

    def _targets(self, index: int) -> dict[Layout, None]:
        """The distinct layouts in which a tensor is needed."""
        entry = self.problem.entries[index]
        found = dict.fromkeys(self.layouts[i].operands[at] for i, at in entry.consumers)
        if entry.is_output:
            found[self.problem.graph.delivered(self._source(index).layout)] = None
        return found

    def _saved_bytes(self) -> float:
        problem, size = self.problem, 0.0
        for entry in problem.fold.saved:
            kept = set()
            for index, position, name in entry.savers:
                at = self.layouts[index]
                layout = (*at.operands, *at.results)[position]
                kept.add(problem.saved.memory(name, layout))
            size += entry.count * sum(problem.bytes(*memory) for memory in kept)
        return size

    def _gathered_bytes(self) -> Mapping[int | None, float]:
        """Index of a kind of block -> bytes of the parameters that it is the first to gather in some layout."""
        prices, found = self.problem.prices, defaultdict[int | None, float](float)
        for index in self.assignment.parameters:
            source = self._source(index)
            for uses, count in prices.uses(index).items():
                first: dict[Layout, int | None] = {}
                for use in uses:
                    first.setdefault(self.layouts[use.kind].operands[use.position], use.block)
                for target, block in first.items():
                    found[block] += count * prices.gathered_bytes(index, source, target)
        return found
