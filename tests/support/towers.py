"""Two towers of different width side by side, and plans that run each of them on one rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ir import Graph, Mesh, O, ParameterPlan, Plan, R


class Towers(nn.Module):
    """A linear head on the outputs of the towers `a` and `b`."""

    def __init__(self, narrow: int = 16, wide: int = 32) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, narrow), nn.Tanh(), nn.Linear(narrow, 4))
        self.b = nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.LayerNorm(wide), nn.Linear(wide, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


def towers_plan(graph: Graph, fingerprint: str, owners: dict[str, int], mesh: Mesh) -> Plan:
    """A plan that runs the ops of each submodule in `owners` on this rank of the only axis, and all others on all.

    The owner also stores the submodule's parameters.
    """

    def label(module: str) -> str:
        owner = owners.get(module.partition(".")[0])
        return "-" if owner is None else f"@{owner}"

    def stored(name: str) -> ParameterPlan:
        owner = owners.get(name.partition(".")[0])
        layout = (R if owner is None else O(owner),)
        return ParameterPlan(layout, layout)

    return Plan(
        mesh,
        fingerprint,
        "towers",
        1,
        parameters={name: stored(name) for name in graph.parameters},
        inputs={name: (R,) for name in graph.inputs},
        ops={op.name: (label(op.module),) for op in graph.ops},
    )
