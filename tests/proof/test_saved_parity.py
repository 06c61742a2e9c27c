"""Plans that keep what enters blocks in slices give the loss and every gradient of one device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.ir import Mesh, ParameterPlan, Plan, R, S, V
from autopar.ir.saved import SavedLayout
from autopar.pipeline.saved_values import SavedValues
from autopar.planning.planning import unsplit_plan
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.runtime.execute import saved
from benchmarks.zoo.models import build
from tests.proof.test_parity import conv, llama
from tests.support.tables import often

SUBJECTS = {
    "llama": llama,
    "conv": conv,
    "gpt2": lambda: build("gpt2", dtype=torch.float64),
    "t5": lambda: build("t5", dtype=torch.float64),
}


def in_slices(subject: Subject, plan: Plan) -> Plan:
    """The plan with slices wherever it can have them; one that has none yet is made to recompute its blocks."""
    if plan.saved:
        return plan
    plan = replace(plan, recompute="full")
    values = SavedValues(subject.prepared.analysis.graph, plan)
    return replace(plan, saved=values.partitioned())


def replicated(subject: Subject, mesh: str) -> Plan:
    """Every rank does all, so that all that a block keeps can be sliced along every axis."""
    axes = Mesh.parse(mesh)
    whole = ParameterPlan((R,) * len(axes.axes), (R,) * len(axes.axes))
    parameters = dict.fromkeys(subject.prepared.analysis.graph.parameters, whole)
    plan = unsplit_plan(subject.prepared, axes, parameters, 1)
    values = SavedValues(subject.prepared.analysis.graph, plan)
    lines = {each.name: values.sliced(each, lambda _, states: states[0]) for each in values.all}
    return replace(plan, saved={name: line for name, line in lines.items() if line is not None})


class Gathers:
    """Counts what backward gathers, and can give the slices in a wrong order."""

    def __init__(self, patch: pytest.MonkeyPatch, *, reverses: bool = False) -> None:
        self.count = 0
        gather = saved._KeptParts.gather

        def counted(parts: saved._KeptParts) -> None:
            self.count += 1
            if reverses:
                parts._parts = parts._parts[::-1]
            gather(parts)

        patch.setattr(saved._KeptParts, "gather", counted)


@pytest.mark.parametrize(
    "name", ["llama", "conv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))]
)
def test_random_plans_with_slices(name: str) -> None:
    subject = Subject.of(*SUBJECTS[name]())
    captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
    for mesh, seed in itertools.product(("a=2", "a=2,b=2", "pp=2,a=2"), range(2)):
        drawn = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint, lone_ops=False)
        plan = in_slices(subject, drawn)
        assert Plan.parse(str(plan)) == plan
        report = subject.compare(plan)
        assert report.passed, f"{mesh} {seed}\n{report}"


@pytest.mark.parametrize("mesh", often(["a=2", "a=2,b=2"], ["a=2,b=2"]))
def test_slices_in_a_wrong_order_are_found(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the comparison says something: every rank has its slice, and backward gathers them."""
    subject = Subject.of(*llama())
    plan = replicated(subject, mesh)
    slices = SavedValues(subject.prepared.analysis.graph, plan).slices
    assert len(slices) > 10 and all(kept.slice_layout.count(R) == 0 for kept in slices)
    with monkeypatch.context() as patched:
        gathers = Gathers(patched)
        assert subject.compare(plan).passed and gathers.count == len(slices)
    Gathers(monkeypatch, reverses=True)
    assert not subject.compare(plan).passed


class Twice(nn.Module):
    """One block, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x)).square().sum()


def test_each_call_of_a_block_has_a_slice_of_its_own() -> None:
    """The first call splits the rows of its input, and the second has all of them: other slices, of one name."""
    torch.manual_seed(0)
    subject = Subject.of(Twice().double(), (torch.randn(4, 4).double(),))
    plan = replicated(subject, "a=2")
    lines = {"block.0./linear<0": SavedLayout((S(1),), "host")}
    ways = {name: ParameterPlan((R,), (V,)) for name in plan.parameters}
    ops = {**plan.ops, "linear": ("b0",), "tanh": ("d0",)}
    plan = replace(plan, ops=ops, parameters=ways, saved=lines)
    slices = SavedValues(subject.prepared.analysis.graph, plan).slices
    assert [each.name for each in slices] == 2 * ["block.0./linear<0"]
    assert subject.compare(plan).passed
