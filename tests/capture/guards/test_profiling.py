"""A capture watches calls, and gives way to whoever watched them before."""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
from typing import Any

import torch
from torch import nn

import autopar
from autopar.capture.guards.profiling import profiled_by


def test_a_function_is_put_back() -> None:
    seen: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    with profiled_by(note):
        with profiled_by(None):
            seen.clear()
            len(str(seen))
            inside = list(seen)
        len("")
        assert sys.getprofile() is note
    assert inside == [] and "c_call" in seen
    assert sys.getprofile() is not note


def test_what_the_garbage_collector_calls_is_not_seen() -> None:
    seen: list[str] = []

    def collected(phase: str, info: dict[str, int]) -> None: ...

    gc.callbacks.append(collected)
    try:
        with profiled_by(lambda frame, event, argument: seen.append(frame.f_code.co_name)):
            gc.collect()
        assert "collected" not in seen and collected in gc.callbacks
    finally:
        gc.callbacks.remove(collected)


def test_training_runs_under_a_profiler() -> None:
    model = autopar.compile(nn.Linear(4, 2), loss_fn=nn.functional.mse_loss)
    with cProfile.Profile() as profile:
        model.step(torch.ones(2, 4), torch.zeros(2, 2))
        list(map(str, range(3)))
    calls = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "step" in calls
