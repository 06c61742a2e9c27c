"""The body of a mixture-of-experts layer: the ops that run on rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


class ExpertBody:
    """The graph of a mixture-of-experts layer between its two permutations, and how its operands enter.

    Args:
        body: the layer between the two permutations: a function of the sorted rows, the sorted ids, the
            end of every expert's rows (as `grouped_mm` takes it), and the weights.
        slots: for every operand in `rows`, the number of consecutive entries of `ids` that belong to one row (k of
            top-k, or 1).
        count: number of experts.
    """

    def __init__(self, body: fx.GraphModule, slots: Sequence[int], count: int) -> None:
        self.body, self.slots, self.count = body, tuple(slots), count
        self.inputs: list[fx.Node] = list(body.graph.find_nodes(op="placeholder"))
        self.calls = [n for n in body.graph.nodes if n.op == "call_function"]
        self.result: fx.Node = list(body.graph.nodes)[-1].args[0]

    @property
    def sorted_ids(self) -> fx.Node:
        return self.inputs[len(self.slots)]

    @property
    def ends(self) -> fx.Node:
        return self.inputs[len(self.slots) + 1]

    def outer(self, node: fx.Node) -> int | None:
        """The position of the operand that an input of the body is; None for sorted ids and ends."""
        position, rows = self.inputs.index(node), len(self.slots)
        if position in (rows, rows + 1):
            return None
        return position if position < rows else position - 1
