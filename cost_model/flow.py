"""In which layouts a plan's tensors are made and needed: what every way to price it begins with."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_model.memory import SavedTensors, keeps
from autopar.ir import Graph, Layout, Plan, R, Tier, TieredLayout, operand_layouts, result_layouts


class Flow:
    """The layouts of a graph's tensors under a plan.

    Attributes:
        operands, results: op name -> the layouts it takes and gives.
        produced: tensor name -> the layout it is made, held or fed in.
        tiers: tensor name -> tier, of the parameters that are not on the device in a step.
        targets: tensor name -> the distinct layouts its consumers need, each with the op that first does,
            "" for the end of the graph; in order of first use.
        saved: the memory that saved tensors lie in.
        saved_roots: tensors whose memory autograd keeps.
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
        self.saved_roots = {
            self.saved.root(name)
            for op in graph.ops
            if keeps(op, graph.tensors)
            for name in op.saved
        }

    def place(self, name: str) -> TieredLayout:
        """Where a tensor lies before its uses."""
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
