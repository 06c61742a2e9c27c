"""Saved tensors in slices: the same training, bytes divided by the axis, one gather more a block, as priced."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn

import autopar
from autopar.ir import Graph, Plan
from autopar.ir.saved import SavedLayout
from autopar.pipeline.composed import step_of
from autopar.pipeline.saved_values import SavedValues
from autopar.pipeline.stage_costs import stage_table
from autopar.runtime.executor import Runner
from benchmarks.accuracy.saved_activations import kept_bytes
from tests.proof.test_communication import Counted
from tests.runtime.models import Batch
from tests.runtime.ranks import Ranks
from tests.runtime.test_recompute import HARDWARE, NO_PIPELINE, Layers, mean_square, planned
from tests.runtime.training import difference, full_state
from tests.support.staged import captured_once

LAYERS, ROWS, SEQ, WIDTH = 3, 4, 16, 32
FLOAT = 4


def gpt(dtype: torch.dtype = torch.float32) -> tuple[GPT, Batch]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=SEQ, layers=LAYERS, heads=4, width=WIDTH)).to(dtype)
    return model, (torch.randint(256, (ROWS, SEQ)), torch.randint(256, (ROWS, SEQ)))


def checkpointed(
    mesh: dict[str, int], recipe: str, micro_batches: int, saved: str, recompute: Any = "full"
) -> tuple[Plan, Graph]:
    """A plan that recomputes blocks; `saved` is a state such as `S(0)@tp` for all that enters them, or ""."""
    model, batch = gpt()
    plan, graph = planned((model, batch, loss_fn), mesh, recipe, micro_batches, NO_PIPELINE)
    lines = {"blocks.*.input": SavedLayout.parse(saved, "it", plan.mesh)} if saved else {}
    return replace(plan, recompute=recompute, saved=lines), graph


def trained_ten_steps(model: Any, step: Any, batch: Batch) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for _ in range(10):
        losses.append(step(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


@captured_once()
def on_two_ranks(micro_batches: int, saved: str) -> dict[str, Any]:
    """What a rank has after ten steps, and what a step keeps and sends with a saved line and without."""
    model, batch = gpt(torch.float64)
    part = tuple(x[: len(x) // micro_batches] for x in batch)
    prepared_plan, _ = planned((model, batch, loss_fn), {"tp": 2}, "tp", micro_batches, NO_PIPELINE)
    line = {"blocks.*.input": SavedLayout.parse(saved, "it", prepared_plan.mesh)}
    found: dict[str, Any] = {}
    for name, lines in (("whole", {}), ("slices", line)):
        plan = replace(prepared_plan, recompute="full", saved=lines)
        compiled = autopar.compile(copy.deepcopy(model), loss_fn=loss_fn, plan=plan)
        compiled.step(*batch)
        compiled.zero_grad()
        with Counted() as counted:
            compiled.step(*batch)
        compiled.zero_grad()
        runner: Runner = compiled._kept.ready[True][0].bound._runner  # type: ignore[union-attr]
        runner.begin()
        kept = kept_bytes(lambda: runner.run(part), runner.leaves)  # noqa: B023
        runner.end()
        found[name] = (kept, Counter(counted.number), Counter(counted.bytes))
    compiled = autopar.compile(copy.deepcopy(model), loss_fn=loss_fn, plan=plan)
    return {**found, "trained": trained_ten_steps(compiled, compiled.step, batch)}


def test_try(two_ranks: Ranks) -> None:
    for r in two_ranks.run(on_two_ranks, 2, "S(1)@tp"):
        print(r["whole"], r["slices"])
