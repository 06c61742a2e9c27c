"""Saved tensors in slices: the same training, bytes divided by the axis, one gather more a block, as priced."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor

import autopar
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Recompute
from autopar.ir.saved import SavedLayout
from autopar.pipeline.composed import step_of
from autopar.runtime.execute.executor import Runner
from autopar.runtime.parameters.gather import SavedView
from benchmarks.accuracy.saved_activations import kept_bytes
from tests.proof.test_communication import Counted
from tests.runtime.execute.test_recompute import HARDWARE, NO_PIPELINE, joined, planned, random_selection
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch
from tests.runtime.training import difference, full_state
from tests.support.staged import captured_once

LAYERS, ROWS, SEQ, WIDTH, FLOAT = 2, 4, 16, 32, 8
MICRO_BATCHES = 2
STREAM = ROWS // MICRO_BATCHES * SEQ * WIDTH * FLOAT  # what enters a block, of one micro-batch


def gpt() -> tuple[GPT, Batch]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=SEQ, layers=LAYERS, heads=4, width=WIDTH)).double()
    return model, (torch.randint(256, (ROWS, SEQ)), torch.randint(256, (ROWS, SEQ)))


class Measured(NamedTuple):
    """What a forward keeps and what its price is, and the collectives of a step."""

    kept_bytes: int
    priced_bytes: float
    collectives: Counter[str]


def measured(model: GPT, batch: Batch, plan: Plan, graph: Graph) -> Measured:
    compiled = autopar.compile(copy.deepcopy(model), loss_fn=loss_fn, plan=plan)
    compiled.step(*batch)
    compiled.zero_grad()
    with Counted() as counted:
        compiled.step(*batch)
    runner: Runner = compiled._kept.ready[True][0].bound._runner  # type: ignore[union-attr]
    part = [x[: ROWS // MICRO_BATCHES] for x in batch]
    runner.begin()
    kept = kept_bytes(lambda: runner.run(part), runner.leaves)
    priced = step_of(graph, plan, HARDWARE).held("saved activations", "first")
    return Measured(kept, float(priced), Counter(counted.number))


def ten_steps(model: Any, step: Any, batch: Batch) -> dict[str, Any]:
    """Trains with AdamW; the losses and the full parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for _ in range(10):
        losses.append(step(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


# What each rank has whole between the products of a layer, and the operands that sequence parallelism gathers for
# them, which Megatron-LM keeps in parts and gathers again (Korthikanti et al. 2022, section 4.2.2).
BETWEEN = ("attention_norm/layer_norm", "/add", "mlp_norm/layer_norm")
GATHERED = ("attention.query/linear<0", "mlp.up/linear<0")
# Recipe, tensors in slices, recomputations, and how many tensors they are in all blocks. The first block gets a
# partial sum, of which no rank has the whole, so that one of two inputs is sliced.
CASES: tuple[tuple[str, tuple[str, ...], tuple[str | int, ...], int], ...] = (
    ("tp", ("input", *BETWEEN), ("none",), LAYERS - 1 + 3 * LAYERS),
    ("tp+sp", GATHERED, ("none",), 2 * LAYERS),
    ("tp", ("input",), ("none", 1, "ops", "full"), LAYERS - 1),
)


@captured_once()
def on_two_ranks(
    recipe: str, names: tuple[str, ...], recomputes: tuple[str | int, ...]
) -> tuple[list[tuple[Measured, Measured]], dict[str, Any]]:
    """Figures whole and in slices for every recomputation; and ten steps of the last in slices."""
    model, batch = gpt()
    plan, graph = planned((model, batch, loss_fn), {"tp": 2}, recipe, MICRO_BATCHES, NO_PIPELINE)
    line = SavedLayout.parse("S(1)@tp", "it", plan.mesh)
    found, sliced = [], plan
    for word in recomputes:
        recompute: Recompute = random_selection(graph, plan, 1) if word == "ops" else word  # type: ignore[assignment]
        whole = replace(plan, recompute=recompute)
        sliced = replace(whole, saved={f"blocks.*.{name}": line for name in names})
        both = [measured(model, batch, each, graph) for each in (whole, sliced)]
        found.append((both[0], both[1]))
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=sliced)
    return found, ten_steps(compiled, compiled.step, batch)


def alone() -> dict[str, Any]:
    """Ten steps of one process without autopar."""
    model, batch = gpt()

    def step(*batch: Tensor) -> Tensor:
        parts = zip(*(x.chunk(MICRO_BATCHES) for x in batch), strict=True)
        loss = torch.stack([loss_fn(model(x), y) for x, y in parts]).mean()
        loss.backward()
        return loss.detach()

    return ten_steps(model, step, batch)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("recipe", "names", "recomputes", "tensors"), CASES)
def test_slices_train_as_one_process_and_are_priced_as_they_are(
    two_ranks: Ranks, recipe: str, names: tuple[str, ...], recomputes: tuple[str | int, ...], tensors: int
) -> None:
    expected = alone()
    for figures, trained in two_ranks.run(on_two_ranks, recipe, names, recomputes):
        assert difference(trained, expected) < 1e-9
        for whole, sliced in figures:
            assert whole.kept_bytes - sliced.kept_bytes == tensors * STREAM // 2
            assert whole.priced_bytes - sliced.priced_bytes == tensors * STREAM // 2
            assert sliced.kept_bytes == pytest.approx(sliced.priced_bytes, rel=0.01)
            more = sliced.collectives - whole.collectives
            assert more == {"all_gather": tensors * MICRO_BATCHES}  # one for each, and micro-batch


@captured_once()
def trained_otherwise(schedule: str, executor: str) -> dict[str, Any]:
    """Ten steps with checkpoints in slices, through pipeline stages (`schedule` is "" for none) or by an executor."""
    model, batch = gpt()
    pipeline = (schedule, 2) if schedule else NO_PIPELINE
    plan, _ = planned((model, batch, loss_fn), {"tp": 2}, "tp", MICRO_BATCHES, pipeline)
    names = ("input", *BETWEEN)
    line = SavedLayout.parse("S(1)@tp", "it", plan.mesh)
    plan = replace(plan, recompute=1, saved={f"blocks.*.{name}": line for name in names})
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan, executor=executor)
    return ten_steps(compiled, compiled.step, batch)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_stages_keep_slices(four_ranks: Ranks, schedule: str) -> None:
    expected, parts = alone(), four_ranks.run(trained_otherwise, schedule, "eager")
    assert difference(joined(parts, list(expected)), expected) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.slow
def test_compiled_regions_keep_slices(two_ranks: Ranks) -> None:
    expected = alone()
    for found in two_ranks.run(trained_otherwise, "", "aot_eager"):
        assert difference(found, expected) < 1e-9


def test_a_view_lies_as_it_did() -> None:
    """Transposed, conjugated and negated, on a tensor of other memory."""
    z = torch.randn(3, 4, dtype=torch.complex128)
    for view in (z.T, z[1:, ::2], z.conj(), z.T.conj().imag):
        assert torch.equal(SavedView.of(view).on(z.clone()), view)
