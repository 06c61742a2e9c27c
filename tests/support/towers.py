"""Two towers of different width side by side, and plans that run each of them on one rank."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.ir import Graph, Mesh, O, ParameterPlan, Plan, R, is_legal


class Towers(nn.Module):
    """A linear head on the outputs of the towers `a` and `b`."""

    def __init__(self, narrow: int = 16, wide: int = 32) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, narrow), nn.Tanh(), nn.Linear(narrow, 4))
        self.b = nn.Sequential(
            nn.Linear(8, wide), nn.ReLU(), nn.LayerNorm(wide), nn.Linear(wide, 4)
        )
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
        mesh, fingerprint, "towers", 1,
        parameters={name: stored(name) for name in graph.parameters},
        inputs={name: (R,) for name in graph.inputs},
        ops={op.name: (label(op.module),) for op in graph.ops},
    )  # fmt: skip


def with_lone_ops(graph: Graph, plan: Plan, seed: int) -> Plan:
    """The plan with about a third of its choices in favour of one rank, and of its owned parameters used there alone.

    Tensors lie on the device and are saved as they are.
    """
    draw, sizes = random.Random(seed), plan.mesh.sizes
    ops = {}
    for op in graph.ops:
        labels = tuple(
            f"@{draw.randrange(size)}" if draw.random() < 1 / 3 else label
            for label, size in zip(plan.ops[op.name], sizes, strict=True)
        )
        ops[op.name] = labels if is_legal(graph, op, labels, plan.mesh) else plan.ops[op.name]
    parameters = {
        name: replace(
            how, tier="device", resident_tier="device",
            resident=tuple(
                at_rest if at_rest.kind == "O" and draw.random() < 1 / 2 else used
                for at_rest, used in zip(how.storage, how.resident, strict=True)
            ),
        )
        for name, how in plan.parameters.items()
    }  # fmt: skip
    return replace(plan, ops=ops, parameters=parameters, recompute="none", saved={})
