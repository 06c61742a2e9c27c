"""A thread that rests: it uses its share of a core, and rests no more when somebody waits for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch import nn

from autopar.runtime.checkpoint import background_save
from autopar.runtime.checkpoint.background_save import Pace
from autopar.runtime.checkpoint.checkpoint import Checkpoints


def _spend(seconds: float) -> None:
    while time.thread_time() < seconds:
        pass


def _in_a_thread(work: list[object], pace: Pace) -> threading.Thread:
    def run() -> None:
        _spend(0.02)
        begin_seconds = time.monotonic()
        pace.rest()
        work.append(time.monotonic() - begin_seconds)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_rest_is_as_long_as_the_share_demands() -> None:
    rested: list[object] = []
    _in_a_thread(rested, Pace(0.25, 60.0)).join(30)
    (seconds,) = rested
    assert isinstance(seconds, float) and seconds >= 3 * 0.02 - 1e-3  # a quarter is work


def test_who_hurries_does_not_rest() -> None:
    rested: list[object] = []
    pace = Pace(1e-9, 1e6)  # a rest of days
    thread = _in_a_thread(rested, pace)
    pace.hurry()
    thread.join(30)
    assert len(rested) == 1


def test_rests_end_by_themselves() -> None:
    rested: list[object] = []
    _in_a_thread(rested, Pace(1e-9, 0.1)).join(30)
    assert len(rested) == 1


def test_a_rest_ends_with_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[object] = []
    thread = _in_a_thread(rested, Pace(1e-9, 1e6))
    thread.join(0.3)
    assert not rested  # it rests
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    thread.join(30)
    assert len(rested) == 1


def test_finish_does_not_wait_for_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "_SHARE", 1e-9)
    with Checkpoints(tmp_path, timeout_seconds=1e6) as checkpoints:
        checkpoints.save(1, nn.Linear(4, 2))
        assert checkpoints.is_saving
        ended = threading.Thread(target=checkpoints.finish, daemon=True)
        ended.start()
        ended.join(30)
        assert not ended.is_alive()
    assert (tmp_path / "step-00000001").is_dir()
