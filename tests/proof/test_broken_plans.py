"""Plans with one fault fail, in any precision; benchmarks/parity/broken.py does the same for more of them."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.ir import Mesh
from autopar.program.program import Program, build_program
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from benchmarks.parity.broken import FAULTS, broken
from tests.support.llama import Llama
from tests.support.tables import often


# The fewest digits have most faults to hide.
@pytest.fixture(scope="module", params=often([torch.float64, torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    torch.manual_seed(0)
    model = Llama(vocab=32, width=32, inner=48, heads=4, kv_heads=2, layers=1).to(request.param)
    return Subject.of(model, (torch.randint(32, (4, 8)), torch.randint(32, (4, 8))))


@pytest.fixture(scope="module")
def program(subject: Subject) -> Program:
    """The program of a plan without fault, which passes."""
    prepared = subject.prepared
    plan = random_plan(
        prepared.analysis.graph, Mesh.parse("a=2,b=2"), seed=3, fingerprint=prepared.captured.fingerprint
    )
    found = build_program(prepared.captured, prepared.analysis, plan)
    assert subject.compare_program(found).passed
    return found


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "a missing scale"])
def test_a_plan_with_one_fault_fails(subject: Subject, program: Program, fault: str) -> None:
    wrong = broken(program, fault, random.Random(0))
    assert wrong is not None, "the plan has a place for the fault"
    report = subject.compare_program(wrong)
    assert any(v.arithmetic == "float64" for v in report.failures), report
