"""`recompute="partitioned"`: the plan of "full" with slices, also where nothing else fits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError, MeshError, PlanError, SearchError
from autopar.ir import S
from autopar.ir.saved import SavedLayout
from autopar.planning.planning import Prepared, prepare_forward, prepare_step, search_step
from autopar.search.given import Planned
from autopar.search.request import Request

HARDWARE = find_hardware("cpu-gloo")


@functools.cache
def prepared() -> Prepared:
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=128, layers=6, heads=4, width=32))
    batch = (torch.randint(256, (8, 128)), torch.randint(256, (8, 128)))
    return prepare_step(model, batch, loss_fn=loss_fn)


@functools.cache
def searched(recompute: str | None, memory_bytes: int | None = None, **others: Any) -> Planned:
    fields: dict[str, Any] = {"recipe": "tp", "mesh": {"tp": 2}, "offload": False} | others
    request = Request(HARDWARE, recompute=recompute, memory_bytes=memory_bytes, **fields)  # type: ignore[arg-type]
    return search_step(prepared(), request).best


def test_it_is_the_plan_of_full_with_slices_and_says_so() -> None:
    whole, sliced = searched("full"), searched("partitioned")
    assert sliced.plan.recompute == "full"
    assert sliced.plan.saved == {"blocks.*.input": SavedLayout((S(0),))}
    assert sliced.plan.ops == whole.plan.ops
    assert sliced.price.peak_bytes < whole.price.peak_bytes
    assert sliced.price.step_seconds > whole.price.step_seconds
    (note,) = (note for note in sliced.plan.notes if "slices" in note)
    assert note.startswith("blocks.*.input kept in slices along tp until backward: ")
    assert "less on the fullest rank for" in note


def test_it_fits_where_full_does_not() -> None:
    whole, sliced = searched("full").price.peak_bytes, searched("partitioned").price.peak_bytes
    between = int(whole + sliced) // 2
    assert searched("partitioned", between).price.peak_bytes <= between
    for recompute, bound in (("full", between), ("partitioned", int(sliced) - 1000)):
        with pytest.raises(SearchError):
            searched(recompute, bound)


def test_the_search_finds_slices_where_nothing_else_fits() -> None:
    """Nobody asks for them; with more memory than that they are gone, and the step is never slower."""
    least = searched("partitioned").price.peak_bytes
    whole = searched("full").price.peak_bytes
    found = [searched(None, int(least + part * (whole - least))) for part in (0.01, 1.01, 2)]
    assert found[0].plan.saved and not found[-1].plan.saved
    assert any("kept in slices along tp" in note for note in found[0].plan.notes)
    seconds = [each.price.step_seconds for each in found]
    assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(SearchError):
        searched(None, int(least * 0.95))


def test_nothing_is_sliced_that_no_axis_replicates() -> None:
    request = Request(HARDWARE, recompute="partitioned", mesh={"dp": 2}, recipe="ddp")
    plan = search_step(prepared(), request).best.plan
    assert (plan.recompute, plan.saved) == ("full", {})
    assert any("kept as it lies" in note for note in plan.notes)


def test_a_model_without_blocks_is_refused() -> None:
    class Free(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(2).mean()

    free = prepare_forward(Free(), (torch.randn(4, 4),))
    with pytest.raises(PlanError, match="nothing can run again"):
        search_step(free, Request(HARDWARE, recompute="partitioned", mesh={"tp": 2}))


def test_a_plan_in_slices_is_what_the_word_asks_for() -> None:
    plan = searched("partitioned").plan
    explanation = autopar.explain(
        *_model(), loss_fn=loss_fn, mesh={"tp": 2}, recipe="tp", recompute="partitioned"
    )
    assert explanation.plan.saved == {"blocks.*.input": SavedLayout((S(0),))} == plan.saved
    assert "blocks.*.input kept in slices along tp until backward" in str(explanation)
    with pytest.raises(AutoparError, match="recompute"):
        autopar.compile(_model()[0], plan=plan, loss_fn=loss_fn, recompute="none")
    with pytest.raises(MeshError):  # no rank runs here, which is asked after the words
        autopar.compile(_model()[0], plan=plan, loss_fn=loss_fn, recompute="partitioned")


def _model() -> tuple[nn.Module, Any]:
    batch = (torch.randint(256, (2, 16)), torch.randint(256, (2, 16)))
    return GPT(GPTConfig(seq_len=16, layers=2, heads=4, width=32)), batch
