"""`recompute="partitioned"`: the plan of "full" with slices, also where nothing else fits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError, MeshError, PlanError, SearchError
from autopar.ir import R, S
from autopar.ir.recompute import RecomputeOption
from autopar.ir.saved import SavedLayout
from autopar.pipeline.composed import stored_bytes
from autopar.planning.planning import Prepared, prepare_forward, prepare_step, search_step
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned

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


def test_slices_of_a_recipe_are_named_once() -> None:
    """2d saves slices by itself, and recompute="partitioned" asks for them."""
    fields: dict[str, Any] = {"mesh": {"x": 2, "y": 2}, "recipe": "2d", "offload": False}
    request = Request(HARDWARE, recompute="partitioned", **fields)
    notes = search_step(prepared(), request).best.plan.notes
    assert len([n for n in notes if "kept in slices" in n or "kept in their layout" in n]) == 1


def test_offloaded_slices_lie_on_the_host() -> None:
    """The same slices, 131 kB / 2 of each of six blocks; the first block's input is a sum that nobody can slice."""
    on_device, on_host = searched("partitioned"), searched("offloaded")
    assert on_host.plan.saved == {"blocks.*.input": SavedLayout((S(0),), "host")}
    assert on_host.plan.ops == on_device.plan.ops
    stream = 8 * 128 * 32 * 4
    held = stored_bytes(on_host.graph, on_host.plan, HARDWARE, "host")
    assert held == stream + 5 * stream / 2
    assert on_device.price.peak_bytes - on_host.price.peak_bytes == held
    assert on_host.price.step_seconds > on_device.price.step_seconds
    assert any("in the host's memory until backward" in note for note in on_host.plan.notes)


def test_what_no_axis_replicates_is_offloaded_whole() -> None:
    request = Request(HARDWARE, recompute="offloaded", mesh={"dp": 2}, recipe="ddp")
    plan = search_step(prepared(), request).best.plan
    assert plan.saved == {"blocks.*.input": SavedLayout((R,), "host")}


@pytest.mark.slow  # four searches; the next one and test_stored.py find that the host stores
def test_the_search_offloads_where_nothing_else_fits() -> None:
    """Nobody asks for it: first parameters leave the device, then activations too; with more memory they come back."""
    bounds = [2_100_000, 2_300_000, 2_700_000]
    found = [searched(None, bound, offload=True) for bound in bounds]
    places = [{line.tier for line in each.plan.saved.values()} for each in found]
    assert places == [{"host"}, {"host"}, set()]
    assert {how.tier for how in found[0].plan.parameters.values()} == {"device", "host"}
    assert all(each.price.peak_bytes <= bound for each, bound in zip(found, bounds, strict=True))
    seconds = [each.price.step_seconds for each in found]
    assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(SearchError):
        searched(None, 1_800_000, offload=True)


def test_memory_for_a_plan_that_was_found_is_enough() -> None:
    """What leaves the device differs between layouts, so that the room for parameters is found in several tries."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=128, layers=4, heads=4, width=64))
    batch = (torch.randint(256, (8, 128)), torch.randint(256, (8, 128)))
    small = prepare_step(model, batch, loss_fn=loss_fn)
    h100 = replace(find_hardware("h100"), reserved_bytes=0)

    def found(bound: float, recompute: RecomputeOption | None = None) -> Planned:
        fields: dict[str, Any] = {"mesh": {"dp": 1}, "recompute": recompute}
        return search_step(small, Request(h100, memory_bytes=int(bound), **fields)).best

    more = found(4.9e6)
    assert {line.tier for line in more.plan.saved.values()} == {"host"}
    less = found(more.price.peak_bytes)
    assert less.price.peak_bytes <= more.price.peak_bytes
    assert less.price.step_seconds >= more.price.step_seconds
    assert found(4.9e6, "offloaded").price.step_seconds <= more.price.step_seconds


def test_a_bound_that_tensors_cannot_use_is_too_small() -> None:
    """An H100 has 1 GB for its context and libraries."""
    h100, (model, batch) = find_hardware("h100"), _model()
    request = Request(h100, mesh={"tp": 2}, memory_bytes=h100.reserved_bytes, offload=True, micro_batches=1)
    with pytest.raises(SearchError, match=r"1\.00 GB reserved"):
        search_step(prepare_step(model, batch, loss_fn=loss_fn), request)


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
    assert any("kept in their layout" in note for note in plan.notes)


def test_a_model_without_blocks_is_refused() -> None:
    class Free(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(2).mean()

    free = prepare_forward(Free(), (torch.randn(4, 4),))
    with pytest.raises(PlanError, match="nothing can be recomputed"):
        search_step(free, Request(HARDWARE, recompute="partitioned", mesh={"tp": 2}))


def test_a_plan_in_slices_is_what_the_word_asks_for() -> None:
    plan = searched("partitioned").plan
    explanation = autopar.explain(*_model(), loss_fn=loss_fn, mesh={"tp": 2}, recipe="tp", recompute="partitioned")
    assert explanation.plan.saved == {"blocks.*.input": SavedLayout((S(0),))} == plan.saved
    assert "blocks.*.input kept in slices along tp until backward" in str(explanation)
    with pytest.raises(AutoparError, match="recompute"):
        autopar.compile(_model()[0], plan=plan, loss_fn=loss_fn, recompute="none")
    with pytest.raises(MeshError):  # no rank runs here, which is asked after the words
        autopar.compile(_model()[0], plan=plan, loss_fn=loss_fn, recompute="partitioned")


def _model() -> tuple[nn.Module, Any]:
    batch = (torch.randint(256, (2, 16)), torch.randint(256, (2, 16)))
    return GPT(GPTConfig(seq_len=16, layers=2, heads=4, width=32)), batch
