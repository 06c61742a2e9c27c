"""Random ops under plans drawn at random: replicas bit for bit, parts as if of different throws of a coin.

The results of all ranks are put together to what a single device would have, and split again: a rank that
drew otherwise than its replicas is seen there. Whether parts are independent is asked of blocks of the
whole, whatever the plan splits: two that were drawn from one key would agree in every place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.analysis.factors import Analysis, analyze
from autopar.capture.captured import Captured
from autopar.capture.export import capture_forward
from autopar.ir import Mesh, R
from autopar.ops.sharding import shard
from autopar.passes import clean_up
from autopar.program.program import Program, build_program
from autopar.proof import lockstep
from autopar.proof.random_plan import random_plan

SHAPE = (32, 8, 8, 8)
MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2})
PLANS = [(mesh, seed) for mesh in MESHES for seed in range(2)]
DEVIATIONS = 6.0  # one in 500 million is as far off by chance, and some 50,000 are compared

# What an op draws of x, brought to a mean of 0 and a deviation of 1.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: (F.dropout(torch.ones_like(x), 0.25) * 0.75 - 0.75) / 0.1875**0.5,
    "dropout again": lambda x: (F.dropout(torch.ones_like(x), 0.25) * 0.75 - 0.75) / 0.1875**0.5,
    "feature dropout": lambda x: (F.dropout2d(torch.ones_like(x), 0.5) * 0.5 - 0.5) / 0.5,
    "stochastic depth": lambda x: x.new_empty(SHAPE[0], 1, 1, 1).bernoulli_(0.5).expand(SHAPE) * 2 - 1,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)) * 2 - 1,
    "rand_like": lambda x: (torch.rand_like(x) - 0.5) * 12**0.5,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: (torch.randint_like(x, 1, 3) - 1.5) * 2,
    "exponential": lambda x: torch.empty_like(x).exponential_() - 1,
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "normal of deviations": lambda x: torch.normal(0.0, torch.ones_like(x)),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "poisson": lambda x: torch.poisson(torch.ones_like(x)) - 1,
    "rrelu": lambda x: (F.rrelu(-torch.ones_like(x), 0.0, 1.0, training=True) + 0.5) * 12**0.5,
    "multinomial": lambda x: (
        torch.multinomial(torch.ones_like(x).flatten(0, 2).repeat(1, 2), 8).view(SHAPE) / 21.25**0.5 - 7.5 / 21.25**0.5
    ),
    "rand": lambda x: x * 0 + (torch.rand(SHAPE) - 0.5) * 12**0.5,
}
COARSE = {"feature dropout": (2, 3), "stochastic depth": (1, 2, 3)}  # dims that have one draw
DEPENDENT = {"multinomial"}  # without replacement the numbers of a row differ


class Draws(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: draw(x) for name, draw in DRAWS.items()}


@cache
def captured() -> tuple[Captured, Analysis]:
    found = capture_forward(Draws().train(), (torch.ones(SHAPE),), {})
    clean_up(found.module)
    return found, analyze(found)


def program_of(mesh: dict[str, int], seed: int) -> Program:
    capture, analysis = captured()
    plan = random_plan(analysis.graph, Mesh.of(mesh), seed=seed, fingerprint=capture.fingerprint)
    return build_program(capture, analysis, plan)


def whole_results(program: Program, seed: int) -> dict[str, Tensor]:
    """What all ranks drew, put together, by name; replicas are compared bit for bit."""
    mesh = program.plan.mesh
    (spec,) = program.inputs
    ones = torch.ones(SHAPE)
    parts = [shard(ones, spec.dims, spec.layout, mesh, r) for r in range(mesh.size)]
    torch.manual_seed(seed)
    with torch.no_grad():
        found = lockstep.run(program, [parts])
    whole = (R,) * len(mesh.axes)
    together = {}
    for name, result, ranks in zip(DRAWS, program.outputs, found, strict=True):
        full = lockstep.convert(ranks, result.dims, result.layout, whole, mesh)[0]
        for rank, part in enumerate(ranks):
            again = shard(full, result.dims, result.layout, mesh, rank)
            assert torch.equal(part.reshape(again.shape), again), (name, rank)
        together[name] = full.reshape(SHAPE).double()
    return together


def of_one_draw_each(name: str, x: Tensor) -> Tensor:
    for dim in COARSE.get(name, ()):
        assert (x == x.narrow(dim, 0, 1)).all(), name
        x = x.narrow(dim, 0, 1)
    return x


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what two independent throws have."""
    return float((a * b).sum()) / math.sqrt(a.numel())


def blocks(x: Tensor) -> list[Tensor]:
    """Halves or quarters of every dim: parts of any split of the dims by these meshes."""
    cut = [min(4 if d == 0 else 2, size) for d, size in enumerate(x.shape)]
    grid = [x]
    for dim, count in enumerate(cut):
        grid = [part for each in grid for part in each.chunk(count, dim)]
    return grid


@pytest.mark.parametrize(("mesh", "seed"), PLANS)
def test_replicas_agree_and_parts_are_independent(mesh: dict[str, int], seed: int) -> None:
    found = whole_results(program_of(mesh, seed), seed)
    for name, x in found.items():
        x = of_one_draw_each(name, x)
        assert abs(float(x.sum())) < DEVIATIONS * math.sqrt(x.numel()), name
        assert float(x.pow(2).mean()) == pytest.approx(1, abs=0.9 if name in COARSE else 0.1), name
        parts = blocks(x) if name not in DEPENDENT else list(x.chunk(4))
        if name in DEPENDENT:  # a row sums up to less than independent numbers do
            parts = [part[..., :1] for part in parts]
        for a, b in itertools.combinations(parts, 2):
            assert abs(correlation(a, b)) < DEVIATIONS, (name, a.shape)
            assert a.numel() < 16 or not torch.equal(a, b), (name, a.shape)


@pytest.mark.parametrize(("mesh", "seed"), PLANS[::2])
def test_one_seed_gives_one_draw_and_no_two_ops_have_the_same(mesh: dict[str, int], seed: int) -> None:
    program = program_of(mesh, seed)
    found, again, other = (whole_results(program, number) for number in (1, 1, 2))
    for name, x in found.items():
        assert torch.equal(x, again[name]), name
        assert not torch.equal(x, other[name]), name
    assert abs(correlation(found["dropout"], found["dropout again"])) < DEVIATIONS
    assert abs(correlation(found["dropout"], other["dropout"])) < DEVIATIONS
    assert abs(correlation(found["randn_like"], found["normal_"])) < DEVIATIONS


def test_all_but_factories_can_be_split() -> None:
    """So that nobody's draws are the same for every part of the batch for want of a rule."""
    _, analysis = captured()
    drawn = [op for op in analysis.graph.ops if any(d in op.kind for d in KINDS)]
    assert len(drawn) >= len(DRAWS)
    assert all(op.has_rule for op in analysis.graph.ops if op.operands)
    split = {op.kind for op in drawn if any(choice.splits for choice in op.choices)}
    assert {op.kind for op in drawn} - split <= {"aten.rand"}


KINDS = ("dropout", "bernoulli", "rand", "exponential", "normal", "poisson", "rrelu", "multinomial")
