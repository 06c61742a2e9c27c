"""Who waits for whom where a collective broke, without ranks: the words, and a store that does not answer."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from autopar import _torch
from autopar.runtime.failures import stragglers


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of three ranks, of which this process is the first."""
    found = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: False)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(_torch, "default_store", lambda: found)
    monkeypatch.setattr(stragglers, "_PATIENCE_SECONDS", 0.3)
    return found


def test_ranks_that_say_nothing_are_named(store: dist.Store) -> None:
    dist.PrefixStore("autopar/waits", store).set("2", "Step 7: all_reduce")
    assert stragglers.who_waits("Step 7: all_gather") == (
        "rank 0 waited in Step 7: all_gather; rank 2 waited in Step 7: all_reduce. Rank 1 says nothing: it died, "
        "hangs, or computes"
    )


def test_ranks_that_all_answer_run_different_programs(store: dist.Store) -> None:
    for rank in "12":
        dist.PrefixStore("autopar/waits", store).set(rank, "Step 7: all_reduce")
    begin = time.monotonic()
    said = stragglers.who_waits("Step 7: all_reduce")
    assert said.startswith("ranks 0, 1, 2 waited in Step 7: all_reduce. All of them answer:")
    assert time.monotonic() - begin < 0.3  # it does not wait for more


def test_a_store_that_hangs_holds_nobody_up(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: released.wait(20) and store)
    begin = time.monotonic()
    assert stragglers.who_waits("Step 7: all_reduce") == ""
    assert time.monotonic() - begin < 10
    released.set()


def test_under_torchrun_a_rank_loses_no_time(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent ends it as soon as another rank has died, and its own error would be lost."""
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    begin = time.monotonic()
    assert stragglers.who_waits("Step 7: all_reduce") == "" and time.monotonic() - begin < 0.3


def test_a_store_that_has_gone_says_nothing(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("gone")

    monkeypatch.setattr(dist, "PrefixStore", gone)
    assert stragglers.who_waits("Step 7: all_reduce") == ""
