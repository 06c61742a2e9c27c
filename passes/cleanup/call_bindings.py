"""aten.add.Tensor(x, y) -> torch.add(x, y): the same operator, which the host calls in less time."""

from __future__ import annotations

from torch import fx

from autopar._torch import BINDINGS, OpOverload
from autopar.ops.collectives import Collective, run_collective


def call_bindings(module: fx.GraphModule) -> None:
    """Lets nodes call the Python functions of their operators, where there are such functions, and of collectives.

    It is the last pass over a graph that runs op by op: all other passes know ops by their overloads.
    """
    for node in module.graph.nodes:
        if call := Collective.of(node):
            node.target, node.args = run_collective, (call.name, *call.args)
        elif isinstance(node.target, OpOverload):
            node.target = BINDINGS.get(node.target, node.target)
    module.recompile()
