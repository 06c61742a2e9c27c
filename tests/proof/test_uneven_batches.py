"""Batches and widths that the ranks do not divide, against the model on one device: ranks have torch.chunk's parts.

Plans are drawn at random, so that ops split the batch, leave it whole, and take it from each other in every layout; all
ranks are simulated in one process, and loss, gradients and running statistics compared in float64.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir import Graph, Mesh, Plan, split_counts
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from tests.support.odd.odd_widths import OddWidths, batch, loss_of


class Text(nn.Module):
    """Attention with dropout; its loss is a mean over the targets that are not masked, and two means over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(16, 12), nn.LayerNorm(12), nn.Dropout(0.2)
        self.qkv, self.out, self.head = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        heads = (y.unflatten(-1, (2, 6)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 0.1 * x.square().mean() + 0.01 * logits.mean(0).square().sum()


class Image(nn.Module):
    """A convolution with batch norm, and a mean over rows and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 5)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        found = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).mean((2, 3))
        return F.mse_loss(self.head(self.drop(found)), wanted)


class Pairs(nn.Module):
    """The batch where ops count along it: classes, a table, queries of causal attention, groups of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor, order: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        loss = F.cross_entropy(5 * a @ b.T, torch.arange(len(x)))
        looked_up = F.embedding(order, a).tanh()
        attended = F.scaled_dot_product_attention(a[None], b[None], looked_up[None], is_causal=True)
        own = F.conv1d(attended.reshape(1, -1, 2), b.reshape(-1, 3, 1), groups=len(x))
        return loss + own.square().mean()


class Regression(nn.Module):
    """A mean over rows and outputs, and one that rows weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 4)

    def forward(self, x: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        found = self.down(F.gelu(self.norm(self.up(x))))
        far = (found - wanted).square()
        return far.mean() + (far.sum(1) * weights).sum() / weights.sum()


class Few(nn.Module):
    """Ops that torch does not run without rows, and a cut of the batch in two."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        found = F.pixel_shuffle(self.norm(self.convolution(x)), 2)
        early, late = torch.cat([torch.fft.rfft(found).abs(), found[..., :5]]).chunk(2)
        return (early * late).flatten(1).quantile(0.3, dim=1).sum()


@functools.cache
def subject(kind: str, rows: int) -> Subject:
    torch.manual_seed(0)
    if kind == "image":
        return Subject.of(Image().double(), (torch.randn(rows, 3, 6, 6).double(), torch.randn(rows, 5).double()))
    if kind == "widths":
        return Subject.of(OddWidths(0.2).double(), batch(rows), loss_fn=loss_of)
    if kind == "pairs":
        return Subject.of(Pairs().double(), (*torch.randn(2, rows, 4).double(), torch.randperm(rows)))
    if kind == "regression":
        x, wanted = torch.randn(rows, 5).double(), torch.randn(rows, 4).double()
        return Subject.of(Regression().double(), (x, wanted, torch.rand(rows).double()))
    if kind == "calm":
        return Subject.of(OddWidths().double(), batch(rows), loss_fn=loss_of)
    if kind == "few":
        return Subject.of(Few().double(), (torch.randn(rows, 1, 6, 6).double(),))
    tokens, targets = torch.randint(0, 16, (2, rows, 6))
    targets[0, :4] = targets[-1, 2:] = -100  # ranks count different numbers of targets
    return Subject.of(Text().double(), (tokens, targets))


def uneven_splits(graph: Graph, plan: Plan) -> int:
    """Number of ops that take parts of different sizes."""
    return sum(
        any(choice.size % count for choice, count in split_counts(op, plan.ops[op.name], plan.mesh)) for op in graph.ops
    )


SLOW = pytest.mark.slow
CASES = [
    ("text", "a=5", 7, range(1)),
    ("image", "a=3", 7, range(1)),
    ("widths", "a=3", 6, range(1)),
    ("widths", "a=2,b=2", 5, range(5, 6)),  # one rank alone runs an op of several results
    ("pairs", "a=3", 7, range(4)),
    ("few", "a=3", 4, range(2)),  # of 4 rows 3 ranks have 2, 2 and none
    *(
        pytest.param(kind, mesh, rows, range(20), marks=SLOW)
        for kind in ("text", "image", "widths")
        for mesh in ("a=3", "a=5", "a=2,b=2", "a=2,b=3", "pp=2,a=3")
        for rows in (7, 32)
    ),
]


@pytest.mark.parametrize(("kind", "mesh", "rows", "seeds"), CASES)
def test_random_plans_give_the_results_of_one_device(kind: str, mesh: str, rows: int, seeds: range) -> None:
    of = subject(kind, rows)
    graph, fingerprint = of.prepared.analysis.graph, of.prepared.captured.fingerprint
    plans = [random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=fingerprint) for seed in seeds]
    assert any(uneven_splits(graph, plan) for plan in plans)
    for plan in plans:
        report = of.compare(plan)
        assert report.passed, report


UNEQUAL = [
    ("regression", "a=3", 4, range(6)),
    ("calm", "pp=2,a=2", 3, range(2)),
    *(
        pytest.param(kind, mesh, rows, range(6, 26), marks=SLOW)
        for kind in ("regression", "calm")
        for mesh in ("a=3", "a=2,b=2", "pp=2,a=3", "pp=4")
        for rows in (3, 8)
    ),
]


@pytest.mark.parametrize(("kind", "mesh", "rows", "seeds"), UNEQUAL)
def test_micro_batches_of_two_sizes_give_the_results_of_the_batch(
    kind: str, mesh: str, rows: int, seeds: range
) -> None:
    """Of some micro-batches the last ones have a row less; three ranks cut 8 rows in 3, 3, 2 and 7 in 3, 3, 1."""
    of = subject(kind, rows)
    graph, fingerprint = of.prepared.analysis.graph, of.prepared.captured.fingerprint
    for seed in seeds:
        drawn = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=fingerprint)
        plan = flushed(drawn, micro_batches=max(2, drawn.micro_batches))
        report = of.of_unequal(1 + seed % (plan.micro_batches - 1)).compare(plan)
        assert report.passed, report


def flushed(plan: Plan, micro_batches: int) -> Plan:
    """A plan that updates once a step, after so many micro-batches, which run one at a time."""
    pipeline = plan.pipeline
    if pipeline is not None and pipeline.update_every:
        pipeline = replace(pipeline, schedule="1f1b")
    return replace(plan, pipeline=pipeline, micro_batches=micro_batches, overlap_batches=1)
