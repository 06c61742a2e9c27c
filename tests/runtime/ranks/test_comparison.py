"""Ranks compare texts through the store of the process group."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopar.errors import StepError
from autopar.runtime.ranks import comparison
from autopar.runtime.ranks.comparison import Comparison

RANKS = 32


class _Counted:
    """A store that counts what is asked of it."""

    def __init__(self, asked: Counter[str]) -> None:
        self._store, self._asked, self._lock = dist.HashStore(), asked, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                self._asked[name] += 1
            return getattr(self._store, name)(*args)

        return call


def _compared(
    monkeypatch: pytest.MonkeyPatch, texts: list[list[str]], timeout_seconds: float = 30.0, replicas: int = 1
) -> tuple[list[list[Any]], Counter[str]]:
    """What each rank, a thread, finds in several comparisons; "" stands for a rank that does not come."""
    size = len(texts) // replicas
    asked, here = Counter[str](), threading.local()
    store, together = _Counted(asked), threading.Barrier(len(texts))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(texts))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(comparison, "_new_name", lambda: "name")
    monkeypatch.setattr(Comparison, "_store", lambda self: store)

    def run(rank: int) -> list[Any]:
        begin = rank - rank % size
        own = Comparison(timeout_seconds, range(begin, begin + size))
        here.rank, found = rank, list[Any]()
        together.wait(30.0)
        for text in filter(None, texts[rank]):
            try:
                found.append(own.gather(text, "Why.", "Remedy."))
            except StepError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(run, range(len(texts)))), asked


def test_a_comparison_asks_for_four_things_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes its text, and the first reads it; each reads the verdict, and takes its text of before away."""
    times = 5
    found, asked = _compared(monkeypatch, [[f"text {i}" for i in range(times)]] * RANKS)
    assert found == [[[f"text {i}"] * RANKS for i in range(times)]] * RANKS
    asked.pop("check")  # they grow with the time that a rank waits, one key at each look
    assert asked.total() <= times * (4 * RANKS + 2), asked


def test_every_rank_hears_what_each_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [f"text {rank % 3}" for rank in range(6)]
    found, _ = _compared(monkeypatch, [[text] for text in said])
    assert found == [[said]] * 6


def test_each_replica_hears_its_own_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas have one name, which the first rank of all tells them, and rows of their own."""
    said = [[f"step {i} of replica {rank // 2}" for i in range(4)] for rank in range(6)]
    found, _ = _compared(monkeypatch, said, timeout_seconds=1.0, replicas=3)
    assert found == [[[text] * 2 for text in own] for own in said]


def test_the_missing_rank_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_GRACE_SECONDS", 0.3)
    for absent in (0, 2):
        texts = [["text"] if rank != absent else [""] for rank in range(3)]
        found, _ = _compared(monkeypatch, texts, timeout_seconds=0.5)
        words = f"Why. Ranks [{absent}] did not come within 0.5 s"
        assert all(x[0].startswith(words) for rank, x in enumerate(found) if rank != absent)
        assert not found[absent]
