"""Masks on real ranks: of forward and backward, layers, steps, micro-batches, stages, blocks that run again,
and of a run that goes on from a checkpoint.

The loss is the sum of `w * dropout(1)` over layers, so that the gradient of `w` is the mask that backward
has, and the loss says whether it is forward's.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir import Graph, Mesh, Pipeline, Plan
from autopar.ir.recompute import Recompute
from autopar.pipeline.parts import block_starts
from autopar.planning.planning import prepare_step
from autopar.proof.random_plan import random_plan
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

P, ROWS, WIDTH, LAYERS, MICRO_BATCHES, STEPS = 0.25, 32, 32, 3, 2, 3
BATCH = torch.ones(MICRO_BATCHES * ROWS, WIDTH, dtype=torch.float64)
RECOMPUTES: tuple[Recompute, ...] = ("none", 1, "full")

Step = tuple[float, dict[str, Tensor]]  # the loss, and the mean mask of every layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        # A mean over groups of ROWS rows, which micro-batches of one group each give, too.
        groups = F.dropout(x, P).unflatten(0, (-1, ROWS))
        return total + (self.w * groups).sum((1, 2)).mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            total = layer(x, total)
        return total


def plan_of(kind: str) -> Plan:
    """`split`: drawn at random, with every mask cut in two; `staged`: with a layer on the first stage."""
    prepared = prepare_step(Masked(), (BATCH[:ROWS],))
    graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
    mesh = Mesh.of({"a": 1 if kind == "staged" else 2})
    plans = (random_plan(graph, mesh, seed=s, fingerprint=fingerprint, lone_ops=False) for s in itertools.count())
    plan = next(p for p in plans if kind != "split" or _splits_masks(graph, p))
    if kind == "staged":
        plan = replace(plan, pipeline=Pipeline(2, "1f1b", (block_starts(graph)[1],)))
    return replace(plan, micro_batches=MICRO_BATCHES)


def _splits_masks(graph: Graph, plan: Plan) -> bool:
    masks = [op for op in graph.ops if op.kind == "aten.native_dropout"]
    return all(op.choice(plan.ops[op.name][0]).splits for op in masks)


def compiled(plan: Plan) -> autopar.CompiledModule:
    model = Masked()
    torch.manual_seed(5)
    return autopar.compile(model, example_inputs=(BATCH,), plan=plan)


def stepped(model: autopar.CompiledModule) -> Step:
    model.zero_grad()
    loss = model.step(BATCH).item()
    found = {}
    for name, w in model.named_parameters():
        gradient = w.grad.full_tensor() if isinstance(w.grad, DTensor) else w.grad
        found[name.removeprefix("model.")] = gradient * (1 - P)
    return loss, found


@captured_once()
def runs(kind: str, folder: str) -> dict[str, list[Step]]:
    """Steps by the same plan with other blocks that run again, and on from a checkpoint after the first."""
    plan, found = plan_of(kind), {}
    for recompute in RECOMPUTES:
        model = compiled(replace(plan, recompute=recompute))
        steps = [stepped(model)]
        if recompute == 1:
            save_checkpoint(folder, model)
        found[str(recompute)] = steps + [stepped(model) for _ in range(STEPS - 1)]
    model = compiled(replace(plan, recompute=1))
    load_checkpoint(folder, model)
    found["loaded"] = [stepped(model) for _ in range(STEPS - 1)]
    return found


def assert_independent(masks: list[Tensor]) -> None:
    for x in masks:
        assert set(x.unique().tolist()) == {0.0, 0.5, 1.0}  # micro-batches differ
        rate = float(x.sum()) / x.numel()
        assert abs(rate - (1 - P)) < 5 * math.sqrt(P * (1 - P) / MICRO_BATCHES / x.numel())
    for a, b in itertools.combinations(masks, 2):
        together = ((a - 1 + P) * (b - 1 + P)).sum() / (P * (1 - P) / MICRO_BATCHES)
        assert abs(float(together)) < 5 * math.sqrt(a.numel())


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["split", "staged"])
def test_masks(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks = two_ranks.run(runs, kind, str(tmp_path / "checkpoint"))
    weights: dict[str, Any] = dict(Masked().named_parameters())
    steps: list[dict[str, Tensor]] = []
    for number in range(STEPS):
        loss, masks = joined([found["none"][number] for found in ranks])
        assert masks.keys() == weights.keys()
        seen = sum(float((weights[name].detach() * mask).sum()) for name, mask in masks.items())
        assert loss == pytest.approx(seen / (1 - P), rel=1e-9)
        steps.append(masks)
    assert_independent([mask for masks in steps for mask in masks.values()])
    for masks in steps:
        halves = [half for mask in masks.values() for half in mask.chunk(2)]
        assert_independent(halves)
        assert_independent([half for mask in masks.values() for half in mask.chunk(2, dim=1)])
    for name, first in (("1", 0), ("full", 0), ("loaded", 1)):
        for number in range(first, STEPS):
            _, masks = joined([found[name][number - first] for found in ranks])
            assert all(torch.equal(mask, steps[number][k]) for k, mask in masks.items()), name


def joined(ranks: list[Step]) -> Step:
    """What all ranks have; those that have the same have it alike."""
    masks: dict[str, Tensor] = {}
    for loss, found in ranks:
        assert loss == ranks[0][0]
        for name, mask in found.items():
            assert torch.equal(masks.setdefault(name, mask), mask)
    return ranks[0][0], masks


class Dropping(nn.Module):
    """Two layers with dropout, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def seeded_twice(options: dict[str, Any], seeds_of_ranks: str) -> list[float]:
    """Losses of two steps, of the same after the same seed, of a forward after it, and after another seed."""
    made = autopar.compile(Dropping(), **options)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rank = dist.get_rank() if dist.is_initialized() and seeds_of_ranks == "differ" else 0
    losses = []
    for seed, runs in ((3, (made.step, made.step)), (3, (made.step, made.step)), (4, (made.step,))):
        torch.manual_seed(seed + 100 * rank)
        losses += [run(x).item() for run in runs]
    return losses


SEEDED: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "1 rank, accumulation": {"micro_batches": 2},
    "dp": {"mesh": {"dp": 2}, "recipe": "ddp"},
    "tp": {"mesh": {"tp": 2}, "recipe": "tp"},
    "pp": {"mesh": {"pp": 2}, "micro_batches": 2},
    "compiled": {"mesh": {"dp": 2}, "recipe": "zero3", "executor": "aot_eager"},
}


ALWAYS = {  # one rank has no other seed to differ from
    ("1 rank", "alike"),
    ("1 rank, accumulation", "alike"),
    ("tp", "alike"),
    ("dp", "differ"),
    ("tp", "differ"),
    ("pp", "differ"),
    ("compiled", "differ"),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "seeds_of_ranks"), often(itertools.product(SEEDED, ("alike", "differ")), ALWAYS))
def test_a_seed_repeats_the_draws_of_the_steps_after_it(way: str, seeds_of_ranks: str, two_ranks: Ranks) -> None:
    options = SEEDED[way]
    if "mesh" in options:
        results = two_ranks.run(seeded_twice, options, seeds_of_ranks)
    else:
        results = [seeded_twice(options, seeds_of_ranks)]
    for first, second, again, again_second, other in results:
        assert (first, second) == (again, again_second)
        assert len({first, second, other}) == 3
    assert all(found == results[0] for found in results)


def test_a_model_without_draws_leaves_the_generator_alone() -> None:
    made = autopar.compile(Dropping().eval())
    x = torch.ones(2, 8, dtype=torch.float64)
    made.step(x)
    state = torch.get_rng_state()
    made.step(x)
    assert torch.equal(torch.get_rng_state(), state)
