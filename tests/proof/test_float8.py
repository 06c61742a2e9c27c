"""Plans of a model whose linear layers multiply in float8 equal one device that rounds in the same way.

Arithmetic is that of float64, so that ranks and the device differ in rounding to float8 alone if they round different
tiles: then by a 16th of a number, where float64 differs by 1e-16.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.export import run_with_loss
from autopar.cost_model import H100
from autopar.ir import Mesh, MixedPrecision
from autopar.planning.planning import make_plan
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from tests.support.llama import Llama
from tests.support.tables import often

POLICY = MixedPrecision("float64", product_dtype="float8")


class Perceptron(nn.Module):
    """Two layers, one of them with a bias, whose inner dim has six tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 768), nn.Linear(768, 256, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


def perceptron():
    return Perceptron().double(), tuple(torch.randn(2, 8, 4, 256, dtype=torch.float64))


def llama():
    sizes = {"vocab": 256, "width": 256, "inner": 512, "heads": 4, "kv_heads": 2}
    return Llama(layers=2, **sizes).double(), tuple(torch.randint(256, (2, 4, 8)))


SUBJECTS = {"perceptron": perceptron, "llama": llama}


@functools.cache
def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    return Subject.of(*SUBJECTS[name](), precision=POLICY)


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    often(
        [("perceptron", mesh, seed) for mesh in ("dp=2", "a=2,b=2", "x=4") for seed in range(3)]
        + [("llama", "a=2,b=2", 0)],
        [("perceptron", "dp=2", 0), ("perceptron", "a=2,b=2", 1), ("perceptron", "x=4", 2), ("llama", "a=2,b=2", 0)],
    ),
)
def test_random_plans_equal_one_device(name, mesh, seed):
    subject = subject_of(name)
    captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
    assert any(op.kind == "autopar.float8_linear" for op in graph.ops)
    plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint)
    report = subject.compare(plan)
    assert report.passed, f"{report}\n{plan}"


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        pytest.param("dp=2", "ddp", marks=pytest.mark.slow),
        ("tp=2", "tp"),
        ("dp=2,tp=2", {"dp": "zero3", "tp": "tp+sp"}),
    ],
    ids=str,
)
def test_recipes_equal_one_device(mesh, recipe):
    subject = subject_of("llama")
    plan = make_plan(subject.prepared, Request(H100, mesh=Mesh.parse(mesh), recipe=recipe))
    assert subject.compare(plan).passed


def test_tensor_parallelism_splits_rounded_layers():
    subject = subject_of("llama")
    plan = make_plan(subject.prepared, Request(H100, mesh=Mesh.of({"tp": 2}), recipe="tp"))
    ops = [op for op in subject.prepared.analysis.graph.ops if op.kind == "autopar.float8_linear"]
    whole = [op.module.rpartition(".")[2] for op in ops if plan.ops[op.name] == ("-",)]
    assert len(ops) == 2 * 7 + 1
    assert sorted(whole) == 2 * ["key"] + 2 * ["value"], "their 128 columns are one tile"


def test_rounding_changes_the_loss():
    """Else nothing above would be shown."""
    torch.manual_seed(0)
    model, batch = perceptron()
    rounded = run_with_loss(model, batch, {}, None, POLICY)
    gap = float(rounded.detach() / model(*batch).detach() - 1)
    assert 1e-6 < abs(gap) < 1e-2
