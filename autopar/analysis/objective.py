"""How the loss of a batch is made of the losses of its micro-batches.

A loss is a mean over rows, a sum over rows, or a ratio N / D of such, as a mean over what a mask leaves is: then the
loss of the batch is not the mean of the losses L_i of its parts, but

    N / D = sum_i (D_i / D) L_i

with D_i the denominator of part i and D that of the whole batch, both known from the inputs before any part is run. So
every loss of these kinds is a sum of the parts' losses with known shares, and so are its gradients.

The kinds are found from the choices that the rules give each op along the batch (docs/rules.md): what an op can do
on rows apart, and whether its result is then a part (S) or an addend (P).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autopar.capture.captured import Captured
from autopar.errors import StepError
from autopar.ir import PARTIAL, Choice, Graph, Op
from autopar.ops.nodes import bound_arguments

aten = torch.ops.aten

Base = Literal["sum", "mean"]  # what the parts' values of a tensor give together: the whole's
# How a tensor of the whole batch comes from those of its parts: `same` in each, the `rows` of each one after the
# other, their `sum` or `mean`, a `ratio` with one of these as numerator, or a `function` of them.
Kind = Literal["same", "rows", "sum", "mean", "ratio", "function", "unknown"]

_AVERAGES = ("aten.mean",)
_MASKED_MEANS = ("aten.cross_entropy_loss", "aten.nll_loss_nd")
_SUMMED, _AVERAGED = "sum", "mean"
_EQUAL_ROWS = ("aten.expand", "aten.full", "aten.ones", "aten.zeros")
_KNOWN_BEFORE = ("sum", "mean", "function")
_MEAN_REDUCTION = 1  # value of a loss op's `reduction` argument (torch.nn._reduction)


@dataclass(frozen=True)
class Objective:
    """The loss of a batch as a sum of its parts' losses with shares.

    Attributes:
        kind: `mean`, `sum` or `ratio` of rows, or `unknown`.
        base: kind of a ratio's numerator.
        denominator: for a ratio, the graph from inputs and buffers to the denominator and to the sums or means that
            it is a function of. Its placeholders are the names of inputs, and `buffers.` and the names of buffers.
        bases: kind of each of those, `sum` or `mean`.
    """

    kind: Literal["mean", "sum", "ratio", "unknown"] = "mean"
    base: Base = "sum"
    denominator: fx.GraphModule | None = field(default=None, compare=False)
    bases: tuple[Base, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the micro-batches with their shares give the loss of the whole batch."""
        return self.kind != "unknown"

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the inputs and buffers that the denominator is computed of."""
        if self.denominator is None:
            return ()
        return tuple(str(n.target) for n in self.denominator.graph.find_nodes(op="placeholder"))

    @torch.no_grad()
    def shares(self, parts: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """The share of each micro-batch's loss in the loss of the batch.

        Where the kind is unknown the loss is the mean over micro-batches.

        Args:
            parts: for every micro-batch the whole tensors on the CPU that are read, by name.

        Raises StepError where no element of a micro-batch counts: its loss would be 0 / 0. Where none of the whole
        batch does, the shares are nan, as the loss is on one device.
        """
        count = len(parts)
        if self.denominator is None or count == 1:
            return [1.0 if self.kind == "sum" or count == 1 else 1 / count] * count
        found = [self._run([part[name] for name in self.reads], {}) for part in parts]
        whole = {}
        for node, base, *values in zip(
            self._summands, self.bases, *(each[1:] for each in found), strict=True
        ):
            total = torch.stack(values).sum(0)
            whole[node] = total / count if base == "mean" else total
        (denominator, *_) = self._run([parts[0][name] for name in self.reads], whole)
        empty = [i for i, each in enumerate(found) if not each[0].item()]
        if empty and denominator.item():
            raise StepError(
                f"Micro-batch {empty[0] + 1} of {count} has no element that counts (all of its targets are "
                "ignored or masked), and its loss is 0 / 0. Take fewer micro-batches, or shuffle the batch."
            )
        scale = count if self.base == "mean" else 1
        return [(each[0].double() / (scale * denominator.double())).item() for each in found]

    @property
    def _summands(self) -> list[fx.Node]:
        assert self.denominator is not None, "a ratio"
        output = next(iter(self.denominator.graph.find_nodes(op="output")))
        return list(output.args[0][1:])

    def _run(self, inputs: Sequence[Tensor], known: dict[fx.Node, Tensor]) -> list[Tensor]:
        assert self.denominator is not None, "a ratio"
        result: list[Tensor] = fx.Interpreter(self.denominator).run(
            *inputs, initial_env=dict(known)
        )
        return result


@dataclass(frozen=True)
class BatchPart:
    """How one tensor comes from the micro-batches' tensors.

    Attributes:
        kind: one of `Kind`.
        base: kind of a ratio's numerator.
        denominator: name of the node that a ratio divides by; "" for other kinds.
    """

    kind: Kind
    base: Base = "sum"
    denominator: str = ""


_UNKNOWN, _SAME = BatchPart("unknown"), BatchPart("same")


def objective_of(captured: Captured, graph: Graph) -> Objective:
    """Finds how the loss of a captured step comes from its micro-batches' losses; unknown for what is none."""
    if not captured.is_step or not graph.outputs or not graph.ops:
        return Objective("unknown")
    finder = PartFinder(captured, graph)
    loss = finder.part(graph.outputs[-1])
    if finder.rows == 1:
        # Dims of one row have no factor to follow; the op of the loss still says whether it is a masked mean.
        maker = next((op for op in graph.ops if graph.outputs[-1] in op.results), None)
        loss = finder.masked_mean(maker) if maker is not None else _UNKNOWN
    return objective_in(captured, finder, loss)


def objective_in(captured: Captured, finder: PartFinder, total: BatchPart) -> Objective:
    """How a total comes from those of micro-batches; unknown for what is neither mean, sum nor ratio."""
    if total.kind in ("mean", "sum"):
        return Objective("mean" if total.kind == "mean" else "sum")
    if total.kind != "ratio":
        return Objective("unknown")
    return _ratio(captured, finder, total) or Objective("unknown")


class PartFinder:
    """Goes through the ops of a step in order, and finds for every tensor how it comes from micro-batches.

    Attributes:
        graph: the step.
        nodes: name -> node of the captured graph.
        batch: names of the factors that are the batch.
        rows: number of rows of a micro-batch.
        parts: name of a tensor -> how it comes from the micro-batches' tensors.
    """

    def __init__(self, captured: Captured, graph: Graph) -> None:
        self.graph = graph
        self.nodes = {node.name: node for node in captured.module.graph.nodes}
        self.batch = {
            graph.tensors[t].factors[0][0]
            for t in graph.inputs.values()
            if graph.tensors[t].factors and graph.tensors[t].factors[0]
        }
        self.rows = _rows(graph)
        self.parts: dict[str, BatchPart] = {}
        for name in graph.inputs.values():
            tensor = graph.tensors[name]
            self.parts[name] = BatchPart("rows") if tensor.dims else _SAME
            if tensor.dims and len(tensor.dims[0]) != 1:
                self.parts[name] = _UNKNOWN
        for op in graph.ops:
            for result, part in zip(op.results, self._results(op), strict=True):
                self.parts[result] = part

    def part(self, tensor: str) -> BatchPart:
        """How micro-batches make up a tensor; a parameter, buffer or constant is the same in all of them."""
        return self.parts.get(tensor, _SAME)

    def _results(self, op: Op) -> list[BatchPart]:
        parts = [self.part(name) for name in op.operands]
        kinds = {part.kind for part in parts}
        if "unknown" in kinds:
            return [_UNKNOWN] * len(op.results)
        if kinds <= {"same"}:
            return [self._made(op, name) for name in op.results]
        if "rows" in kinds:
            return self._of_rows(op, parts) if kinds <= {"rows", "same"} else self._none(op)
        return [self._of_totals(op, parts)] * len(op.results)

    @staticmethod
    def _none(op: Op) -> list[BatchPart]:
        return [_UNKNOWN] * len(op.results)

    def _made(self, op: Op, result: str) -> BatchPart:
        """A tensor that no input went into: the same in every part, or equal rows in all."""
        if not any(f in self.batch for dim in self.graph.tensors[result].factors for f in dim):
            return _SAME
        return BatchPart("rows") if op.kind in _EQUAL_ROWS else _UNKNOWN

    def _of_rows(self, op: Op, parts: list[BatchPart]) -> list[BatchPart]:
        """An op whose operands are split along the batch, each row for itself."""
        choice = next(
            (c for c in op.choices if c.factor in self.batch and _takes_rows(c, parts)), None
        )
        if choice is None:
            return self._none(op)
        masked = self.masked_mean(op)
        if masked == _UNKNOWN and any(choice.label in each.labels for each in op.collectives):
            return self._none(op)  # its parts need each other, as those of a batch norm do
        total = BatchPart("mean" if op.kind in _AVERAGES else "sum")
        if masked != _UNKNOWN:
            total = masked
        made = {"S": BatchPart("rows"), "P": total}
        return [made.get(state.kind, _UNKNOWN) for state in choice.results]

    def masked_mean(self, op: Op) -> BatchPart:
        """The ratio that a masked mean is; unknown for any other op."""
        is_masked = op.kind in _MASKED_MEANS and self._averages(op)
        return BatchPart("ratio", "sum", op.name) if is_masked else _UNKNOWN

    def _averages(self, op: Op) -> bool:
        return bound_arguments(self.nodes[op.name]).get("reduction") == _MEAN_REDUCTION

    def _of_totals(self, op: Op, parts: list[BatchPart]) -> BatchPart:
        """An op on sums and means over the batch."""
        totals = {part for part in parts if part.kind != "same"}
        if op.kind == "aten.div" and len(parts) == 2 and self._divides(op, parts):
            return BatchPart("ratio", _base(parts[0]), op.operands[1])
        if op.kind in ("aten.add", "aten.sub") and totals == {BatchPart("mean")}:
            return BatchPart("mean")  # the mean of x_i + c is that of x_i, and c
        if self._may_count_rows(op, totals):
            return _UNKNOWN
        if len(totals) == 1 and _linear(op, parts):
            return totals.pop()
        if any(self.graph.tensors[t].needs_grad for t in op.operands):
            return _UNKNOWN
        return BatchPart("function") if all(t.kind in _KNOWN_BEFORE for t in totals) else _UNKNOWN

    def _divides(self, op: Op, parts: list[BatchPart]) -> bool:
        """Whether a total is divided by what is known before a gradient is taken."""
        over, under = parts
        return (
            over.kind in ("sum", "mean")
            and under.kind in _KNOWN_BEFORE
            and not self.graph.tensors[op.operands[1]].needs_grad
        )

    def _may_count_rows(self, op: Op, totals: set[BatchPart]) -> bool:
        """Whether a number by which the op scales may be a count of rows, of which a micro-batch has fewer.

        A count is a multiple of the rows. A sum is divided by it to make a mean, and a mean is multiplied
        by it to make a sum; a sum that is divided by a multiple of the rows is therefore not understood.
        """
        if op.kind not in ("aten.mul", "aten.div"):
            return False
        numbers = [abs(x) for x in self.nodes[op.name].args if isinstance(x, (int, float)) and x]
        if op.kind == "aten.div":
            numbers = [1 / x for x in numbers]
        if BatchPart("mean") not in totals:
            numbers += [1 / x for x in numbers]
        elif self.rows == 1:
            numbers = [x for x in numbers if x == 1]
        return any(
            round(x) and round(x) % self.rows == 0 and abs(x - round(x)) < 1e-6 for x in numbers
        )


def _base(part: BatchPart) -> Base:
    return "mean" if part.kind == "mean" else "sum"


def _takes_rows(choice: Choice, parts: list[BatchPart]) -> bool:
    """Whether a choice takes parts of what has rows, and the whole of what is the same everywhere."""
    pairs = zip(choice.operands, parts, strict=True)
    return all((state.kind == "S") == (part.kind == "rows") for state, part in pairs)


def _linear(op: Op, parts: list[BatchPart]) -> bool:
    """Whether an op passes totals on as it would their addends."""
    return any(
        choice.label.startswith(PARTIAL)
        and all(
            (state.kind == "P") == (part.kind != "same")
            for state, part in zip(choice.operands, parts, strict=True)
        )
        for choice in op.choices
    )


def _rows(graph: Graph) -> int:
    """Rows of the captured batch; 1 without inputs that have rows."""
    return max(
        (graph.tensors[t].shape[0] for t in graph.inputs.values() if graph.tensors[t].dims),
        default=1,
    )


# --- the denominator as a graph of its own


def _ratio(captured: Captured, finder: PartFinder, loss: BatchPart) -> Objective | None:
    """None where the denominator depends on a parameter, or has several elements."""
    builder = _Slice(captured, finder)
    node = finder.nodes[loss.denominator]
    is_masked = node.target in _MASKED_TARGETS
    if not is_masked and node.meta["val"].numel() != 1:
        return None
    if is_masked:
        denominator = builder.weight_of_targets(node)
        summands, bases = [denominator], [_SUMMED]
    else:
        denominator = builder.copy(node)
        summands, bases = builder.totals, builder.bases
    if denominator is None or builder.has_parameter or not summands:
        return None
    builder.graph.output([denominator, *summands])
    module = fx.GraphModule(builder.root, builder.graph)
    return Objective("ratio", loss.base, module, tuple(bases))  # type: ignore[arg-type]


_MASKED_TARGETS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)


class _Slice:
    """Copies the nodes that a node is computed of."""

    def __init__(self, captured: Captured, finder: PartFinder) -> None:
        self.finder, self.graph, self.root = finder, fx.Graph(), torch.nn.Module()
        self.captured = captured
        self.has_parameter = False
        self.totals: list[fx.Node] = []
        self.bases: list[str] = []
        self._copies: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """The copy of a node, after those of its operands; notes totals whose operands are rows."""
        if node in self._copies:
            return self._copies[node]
        if node.op == "placeholder":
            self.has_parameter |= node.name in self.captured.parameters
            made = self._leaf(node)
        else:
            for operand in node.all_input_nodes:
                self.copy(operand)
            made = self.graph.node_copy(node, self._copies.__getitem__)
            self._note(node, made)
        self._copies[node] = made
        return made

    def _leaf(self, node: fx.Node) -> fx.Node:
        constant = self.captured.constants.get(node.name)
        if constant is not None:
            self.root.register_buffer(node.name, constant.detach().cpu())
            return self.graph.get_attr(node.name)
        buffer = self.captured.buffers.get(node.name)
        name = f"buffers.{buffer}" if buffer else self.captured.inputs.get(node.name, node.name)
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        if first is None:
            return self.graph.placeholder(name)
        with self.graph.inserting_before(first):
            return self.graph.placeholder(name)

    def _note(self, node: fx.Node, made: fx.Node) -> None:
        kind = self.finder.part(node.name).kind
        comes_of_rows = any(self.finder.part(n.name).kind == "rows" for n in node.all_input_nodes)
        if kind in (_SUMMED, _AVERAGED) and comes_of_rows:
            self.totals.append(made)
            self.bases.append(kind)

    def weight_of_targets(self, loss: fx.Node) -> fx.Node:
        """What cross-entropy's mean divides by: the weights of the targets that are not ignored."""
        given: Mapping[str, Any] = bound_arguments(loss)
        values = given.get("self", given.get("input"))
        assert isinstance(values, fx.Node), "a loss of some values"
        target, weight = self.copy(given["target"]), given["weight"]
        dtype = values.meta["val"].dtype
        if (
            given["target"].meta["val"].is_floating_point()
        ):  # a mean over rows, whatever the classes
            ones = self._call(aten.ones_like.default, target)
            return self._call(aten.sum.default, ones)
        counts = self._call(aten.ne.Scalar, target, given["ignore_index"])
        counts = self._call(aten._to_copy.default, counts, dtype=dtype)
        if weight is not None:
            classes = self._call(aten.clamp.default, target, 0)
            flat = self._call(aten.reshape.default, classes, [-1])
            weights = self._call(aten.index_select.default, self.copy(weight), 0, flat)
            counts = self._call(
                aten.mul.Tensor, self._call(aten.reshape.default, counts, [-1]), weights
            )
        return self._call(aten.sum.default, counts)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
