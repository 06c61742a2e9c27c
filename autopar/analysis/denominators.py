"""The denominator of a loss that is a ratio, as a separate graph from inputs and buffers.

The graph returns the denominator, and then the sums and means over rows from which it is computed. On a micro-batch it
returns the denominator of the micro-batch. Run again with the sums and means of the whole batch in place of the
micro-batch's, it returns the denominator of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autopar.analysis.parts import UNKNOWN, BatchPart, PartFinder
from autopar.capture.captured import Captured
from autopar.ops.nodes import bound_arguments

aten = torch.ops.aten

Base = Literal["sum", "mean"]  # what the values of the micro-batches give together: the batch's


def base_of(power: int) -> Base | None:
    """The base of a total of this power; None for other powers than those of sums and means."""
    return "sum" if power == 0 else "mean" if power == 1 else None


@dataclass(frozen=True)
class Denominator:
    """The denominator of a ratio, and the totals from which it is computed.

    Attributes:
        module: graph of the denominator and the totals from which it is computed. A placeholder has in
            `meta["reads"]` the name of its input, or `buffers.` and the name of its buffer.
        bases: kind of each of those totals.
    """

    module: fx.GraphModule
    bases: tuple[Base, ...]


def denominator_of(part: Captured, finder: PartFinder, ratio: BatchPart) -> Denominator | None:
    """The denominator of a ratio over micro-batches.

    None if it depends on a parameter, has several elements, or counts rows outside of its sums and means.

    Args:
        part: the step as captured for a micro-batch.
        finder: the parts of the step.
        ratio: a part of the kind `ratio`.
    """
    node = finder.counts.node(ratio.denominator)
    builder = _Slice(part, finder)
    op = finder.graph.by_name.get(ratio.denominator)
    if op is not None and finder.masked_mean(op) != UNKNOWN:
        result = builder.weight_of_targets(node)
        builder.totals = {result: "sum"}
    elif node.meta["val"].numel() == 1:
        result = builder.copy(node)
    else:
        return None
    if builder.is_unknown or not builder.totals:
        return None
    builder.graph.output([result, *builder.totals])
    module = fx.GraphModule(builder.root, builder.graph)
    return Denominator(module, tuple(builder.totals.values()))


class _Slice:
    """Copies the nodes from which a node is computed.

    Attributes:
        totals: copies of the sums and means over rows, each with its kind.
        is_unknown: whether a copied node depends on a parameter, or counts rows after the rows are added up.
    """

    def __init__(self, part: Captured, finder: PartFinder) -> None:
        self.finder, self.graph, self.root = finder, fx.Graph(), torch.nn.Module()
        self.part = part
        self.is_unknown = False
        self.totals: dict[fx.Node, Base] = {}
        self._copies: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """The copy of a node, after those of its operands; notes totals whose operands are rows."""
        if node in self._copies:
            return self._copies[node]
        if node.op == "placeholder":
            self.is_unknown |= node.name in self.part.parameters
            made = self._leaf(node)
        else:
            for operand in node.all_input_nodes:
                self.copy(operand)
            made = self.graph.node_copy(node, self._copies.__getitem__)
            self._note(node, made)
        self._copies[node] = made
        return made

    def _leaf(self, node: fx.Node) -> fx.Node:
        constant = self.part.constants.get(node.name)
        if constant is not None:
            self.root.register_buffer(node.name, constant.detach().cpu())
            return self.graph.get_attr(node.name)
        buffer = self.part.buffers.get(node.name)
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        place = contextlib.nullcontext() if first is None else self.graph.inserting_before(first)
        with place:
            made = self.graph.placeholder(node.name)
        made.meta["reads"] = f"buffers.{buffer}" if buffer else self.part.inputs.get(node.name, node.name)
        return made

    def _note(self, node: fx.Node, made: fx.Node) -> None:
        own = self._found(node)
        comes_of_rows = any(self._found(n).kind == "rows" for n in node.all_input_nodes)
        if own.kind == "total" and comes_of_rows:
            base = base_of(own.power)
            self.is_unknown |= base is None
            self.totals[made] = base or "sum"
        elif own.kind != "rows":
            self.is_unknown |= self.finder.counts_rows(self.finder.counts.name(node))

    def _found(self, node: fx.Node) -> BatchPart:
        return self.finder.part(self.finder.counts.name(node))

    def weight_of_targets(self, loss: fx.Node) -> fx.Node:
        """The divisor of cross-entropy's mean: the sum of the weights of the targets that are not ignored."""
        given: Mapping[str, Any] = bound_arguments(loss)
        target, weight = self.copy(given["target"]), given["weight"]
        if given["target"].meta["val"].is_floating_point():
            # Probabilities of classes: a mean over rows, whatever the classes.
            ones = self._call(aten.ones_like.default, target)
            return self._call(aten.sum.default, ones)
        counts = self._call(aten.ne.Scalar, target, given["ignore_index"])
        counts = self._call(aten._to_copy.default, counts, dtype=torch.float64)
        if weight is not None:
            classes = self._call(aten.clamp.default, target, 0)
            flat = self._call(aten.reshape.default, classes, [-1])
            weights = self._call(aten.index_select.default, self.copy(weight), 0, flat)
            counts = self._call(aten.mul.Tensor, self._call(aten.reshape.default, counts, [-1]), weights)
        return self._call(aten.sum.default, counts)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
