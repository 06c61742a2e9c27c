"""The constitution: any legal plan gives the loss and every gradient of one device.

Every choice of every op, every storage and every residence are drawn at random, and all ranks are
simulated. benchmarks/parity/parity.py does the same for 26 architectures and more seeds.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir import Mesh
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from benchmarks.zoo.models import build
from tests.support.llama import Llama
from tests.support.tables import often

MESHES = ["a=2", "a=4", "a=2,b=2", "a=2,b=2,c=2", "a=3", "a=5", "a=2,b=3"]
SEEDS = range(3)
# These seeds draw the schedules interleaved, zbv, zb, 1f1b, v-half and v-min.
STAGES = [("pp=2", 4), ("pp=2,a=2", 9), ("a=2,pp=2", 8), ("pp=4", 7), ("pp=4", 23), ("pp=4", 3)]


def llama():
    torch.manual_seed(0)
    model = Llama(vocab=32, width=32, inner=48, heads=4, kv_heads=2, layers=2).double()
    return model, (torch.randint(32, (4, 8)), torch.randint(32, (4, 8)))


class FusedConvNet(nn.Module):
    """Grouped convolution, batch statistics, a fused projection and a tied matrix."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1, groups=4)
        self.norm = nn.BatchNorm1d(16)
        self.fused = nn.Linear(16, 24)
        self.table = nn.Embedding(8, 16)

    def forward(self, tokens, targets):
        x = self.table(tokens).reshape(4, 8, 16)
        x = self.norm(self.conv(x)).transpose(1, 2)  # (4, 16, 16)
        q, k, v = self.fused(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        y = torch.cat([y, y], -1).mean(1) @ self.table.weight.T
        return F.cross_entropy(y, targets)


def conv():
    torch.manual_seed(0)
    return FusedConvNet().double(), (torch.randint(8, (4, 8)), torch.randint(8, (4,)))


SUBJECTS = {
    "llama": llama,
    "conv": conv,
    **{name: (lambda n=name: build(n)) for name in ("gpt2", "t5", "mixtral", "swin")},
}


# Every model, every mesh and every one of the stages, the larger models on few ranks; `make slow` runs all, and
# benchmarks/parity more models.
OFTEN = {
    ("llama", "a=2,b=2,c=2", 0),
    ("conv", "a=2", 1),
    ("gpt2", "a=2,b=2", 2),
    ("t5", "a=2", 0),
    ("mixtral", "a=4", 2),
    ("swin", "a=2", 2),
    ("conv", "a=3", 1),
    ("conv", "a=5", 0),
    ("llama", "a=2,b=3", 1),
    ("conv", "pp=2", 4),
    ("llama", "pp=2,a=2", 9),
    ("gpt2", "a=2,pp=2", 8),
    ("llama", "pp=4", 7),
    ("conv", "pp=4", 23),
    ("conv", "pp=4", 3),
}


@functools.cache
def subject_of(name):
    """A captured model, with the results of one device that earlier plans were compared with."""
    return Subject.of(*SUBJECTS[name]())


@pytest.mark.parametrize(("name", "mesh", "seed"), often(itertools.product(SUBJECTS, MESHES, SEEDS), OFTEN))
def test_random_plans_equal_one_device(name, mesh, seed):
    subject = subject_of(name)
    prepared = subject.prepared
    plan = random_plan(prepared.analysis.graph, Mesh.parse(mesh), seed=seed, fingerprint=prepared.captured.fingerprint)
    report = subject.compare(plan)
    assert report.passed, f"{report}\n{plan}"


@pytest.mark.parametrize(
    ("name", "mesh", "seed"), often([(name, *stages) for name in SUBJECTS for stages in STAGES], OFTEN)
)
def test_random_stages_equal_one_device(name, mesh, seed):
    """Cuts at any op."""
    subject = subject_of(name)
    prepared = subject.prepared
    plan = random_plan(prepared.analysis.graph, Mesh.parse(mesh), seed=seed, fingerprint=prepared.captured.fingerprint)
    report = subject.compare(plan)
    assert report.passed, f"{report}\n{plan}"


@pytest.mark.parametrize("name", often(SUBJECTS, ("llama", "conv", "mixtral")))
def test_a_wrong_plan_is_found(name):
    """The proof can fail: one parameter's gradient counted twice, or on one rank only."""
    subject = subject_of(name)
    graph = subject.prepared.analysis.graph
    plan = random_plan(graph, Mesh.parse("a=2"), seed=0, fingerprint=subject.prepared.captured.fingerprint)
    reference = subject.reference(micro_batches=1)
    (results,) = reference.steps
    weakened = dict(results.gradients)
    doubled = next(n for n, g in weakened.items() if g is not None and g.abs().max() > 0)
    weakened[doubled] = weakened[doubled] * 2
    wrong = {1: replace(reference, steps=(replace(results, gradients=weakened),))}
    report = replace(subject, references=wrong).compare(plan)
    assert not report.passed
    assert report.worst_parameter == doubled
