"""The layouts in which a plan's tensors are produced and used; every price of a plan starts from them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autopar.cost_model.memory import SavedTensors, keeps
from autopar.ir import Graph, Layout, Op, Plan, R, Tier, TieredLayout, operand_layouts, result_layouts


class Flow:
    """The layouts of a graph's tensors under a plan.

    Attributes:
        operands, results: op name -> layouts of its operands, or of its results.
        produced: tensor name -> layout in which an op produces the tensor, a rank holds it, or it is fed as an input.
        tiers: tensor name of a parameter -> its tier during a step; parameters on the device are absent.
        targets: tensor name -> the layouts in which ops use the tensor, in order of first use, each with the first op
            that does; "" stands for the end of the graph.
        saved: for every saved tensor, the tensor whose memory it shares.
        saved_roots: names of the tensors whose memory autograd keeps.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.operands = {op.name: operand_layouts(op, plan.ops[op.name]) for op in graph.ops}
        self.results = {op.name: result_layouts(op, plan.ops[op.name]) for op in graph.ops}
        self.whole: Layout = (R,) * len(plan.mesh.axes)
        self.produced: Mapping[str, Layout] = self._produced(graph, plan)
        self.tiers: Mapping[str, Tier] = {
            tensor: plan.parameters[name].resident_tier
            for name, tensor in graph.parameters.items()
            if plan.parameters[name].resident_tier != "device"
        }
        self.targets = self._targets(graph)
        self.saved = SavedTensors(graph)
        self.saved_roots = {self.saved.root(name) for op in graph.ops if keeps(op, graph.tensors) for name in op.saved}

    def entering(self, op: Op, blocks: Mapping[str, Hashable]) -> tuple[Layout, ...]:
        """The layouts in which the operands of an op enter its block.

        An operand that is converted for the first op of the block that needs it so, enters as it was produced.

        Args:
            op: the op.
            blocks: op name -> its block.
        """
        return tuple(
            self.produced[name]
            if layout != self.produced[name] and blocks.get(self.targets[name][layout]) == blocks[op.name]
            else layout
            for name, layout in zip(op.operands, self.operands[op.name], strict=True)
        )

    def place(self, name: str) -> TieredLayout:
        """Layout and tier of a tensor before it is converted for its uses."""
        return TieredLayout(self.produced[name], self.tiers.get(name, "device"))

    def _produced(self, graph: Graph, plan: Plan) -> dict[str, Layout]:
        produced = {name: self.whole for name in graph.buffers.values()}
        produced |= {graph.inputs[name]: at for name, at in plan.inputs.items()}
        for name, tensor in graph.parameters.items():
            produced[tensor] = plan.parameters[name].resident
        for op in graph.ops:
            produced.update(zip(op.results, self.results[op.name], strict=True))
        return produced

    def _targets(self, graph: Graph) -> dict[str, dict[Layout, str]]:
        targets: dict[str, dict[Layout, str]] = {}
        for op in graph.ops:
            for name, layout in zip(op.operands, self.operands[op.name], strict=True):
                targets.setdefault(name, {}).setdefault(layout, op.name)
        for name in graph.outputs:
            delivered = graph.delivered(self.produced[name])
            targets.setdefault(name, {}).setdefault(delivered, "")
        return targets
