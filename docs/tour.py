"""A tour of autopar: a toy model from its module to one training step, with what each station makes.

    python docs/tour.py

Five values flow through the project, each made from the one before: Captured -> Graph -> Plan -> Program -> step. This
script makes and prints each of them for a model of two layers on four ranks, without a cluster: all ranks run in this
process. What stands behind a station is named there, as `room/module.py`; docs/design.md has the map.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.cost_model.steps.run import Term
from autopar.ir import Mesh, Plan
from autopar.ir.layout import format_layout
from autopar.pipeline.composed import step_of
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.program.program import Program, build_program
from autopar.proof.subject import Subject
from autopar.search.request.request import Request

MESH = Mesh.of({"dp": 2, "tp": 2})
MACHINE = find_hardware("h100")
BATCH = (torch.randn(8, 64), torch.randint(0, 8, (8,)))


class Toy(nn.Module):
    """Two linear layers and a loss, as a user writes them: nothing here knows autopar."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch of shape [8, 64]."""
        return F.cross_entropy(self.down(torch.relu(self.up(x))), target)


def station(number: int, name: str, places: str) -> None:
    """The heading of a station."""
    print(f"\n{number}. {name}  ({places})")


def capture(model: nn.Module) -> Prepared:
    """Module -> graph of ATen ops. What the user's Python has read becomes guards; clean-up passes make it plain."""
    station(1, "Captured: what the model computes", "capture/export.py, passes/__init__.py")
    prepared = prepare_step(model, BATCH)
    for node in prepared.captured.module.graph.nodes:
        print(f"    {node.name:20} {node.op:14} {node.target if node.op == 'call_function' else ''}")
    return prepared


def analyse(prepared: Prepared) -> None:
    """Graph -> factors and choices: how each op may be split, by its row in rules/."""
    station(2, "Graph: what may be split", "rules/, analysis/")
    for op in prepared.analysis.graph.ops:
        for choice in op.choices:
            operands, results = (", ".join(map(str, x)) for x in (choice.operands, choice.results))
            print(f"    {op.name:20} {choice.label:4} {operands} -> {results}")


def search(prepared: Prepared) -> Plan:
    """Graph and machine -> plan: one choice for each op and axis, one storage for each parameter."""
    station(3, "Plan: what will be split", "search/, cost_model/")
    plan = make_plan(prepared, Request(MACHINE, mesh=MESH, recipe="dp:ddp,tp:tp"))
    for name, how in plan.parameters.items():
        at_rest, in_use = (format_layout(x, MESH) for x in (how.storage, how.resident))
        print(f"    parameter {name:12} at rest {at_rest or 'whole':12} in use {in_use or 'whole'}")
    for name, labels in plan.ops.items():
        along = ", ".join(f"{axis}: {label}" for (axis, _), label in zip(MESH.axes, labels, strict=False))
        print(f"    op {name:20} {along}")
    return plan


def price(prepared: Prepared, plan: Plan) -> None:
    """Plan and machine -> seconds and bytes, each a sum of terms with a cause."""
    station(4, "Price: why this one", "cost_model/pricer.py, cost_model/steps/step.py")
    step = step_of(prepared.analysis.graph, plan, MACHINE)
    print(f"    a step takes {1e6 * float(step.seconds()):.1f} µs on {MACHINE.name}:")
    terms: list[Term] = [term for term in step.time() if float(term.value)]
    for term in terms:
        print(f"    {1e6 * float(term.value):8.1f} µs  {term.name}")


def rewrite(prepared: Prepared, plan: Plan) -> Program:
    """Graph and plan -> the program of one rank: local ops, and collectives where layouts meet."""
    station(5, "Program: what one rank runs", "passes/partition.py, program/program.py")
    program = build_program(prepared.captured, prepared.analysis, plan)
    for node in program.module.graph.nodes:
        if node.op == "call_function":
            operands = ", ".join(str(x) for x in node.all_input_nodes)
            print(f"    {node.name:28} {node.target!s:40} ({operands})")
    return program


def prove(model: nn.Module, plan: Plan) -> None:
    """Program -> a step of all ranks in lockstep, beside the plain model in float64."""
    station(6, "Step: all ranks, compared with one device", "proof/lockstep.py, proof/subject.py")
    print(Subject.of(model, BATCH).compare(plan))


def main() -> None:
    """Walks through all stations."""
    torch.manual_seed(0)
    model = Toy()
    prepared = capture(model)
    analyse(prepared)
    plan = search(prepared)
    price(prepared, plan)
    rewrite(prepared, plan)
    prove(model, plan)
    print("\nOn a cluster, autopar.compile(model, mesh=...).step(x, target) runs this program on every rank.")


if __name__ == "__main__":
    main()
