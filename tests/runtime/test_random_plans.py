"""Plans drawn at random, on real ranks, train as a single process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.runtime.ranks import Ranks
from tests.runtime.training import difference, randomly, single

pytestmark = pytest.mark.multiprocess

SEEDS = {  # the schedules that they draw
    2: "dualpipev", 3: "zbv", 5: "looped-bfs", 6: "1f1b", 7: "gpipe", 8: "interleaved", 14: "zb",
}  # fmt: skip


@functools.cache
def alone(name: str, micro_batches: int) -> dict[str, Any]:
    return single(name, micro_batches=micro_batches)


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have, as one has it: with stages each has the entries of its own."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def check(ranks: Ranks, name: str, mesh: dict[str, int], seed: int) -> None:
    parts = ranks.run(randomly, name, mesh, seed)
    expected = alone(name, parts[0][1])
    whole = together([part for part, _ in parts])
    for part, _ in parts:
        complete = {key: (whole | part)[key] for key in expected}
        assert difference(complete, expected) < 1e-9, seed


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "normed"])
def test_two_ranks(two_ranks: Ranks, name: str) -> None:
    for seed in range(3):
        check(two_ranks, name, {"a": 2}, seed)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "normed"])
def test_two_by_two_ranks(four_ranks: Ranks, name: str) -> None:
    for seed in range(2):
        check(four_ranks, name, {"a": 2, "b": 2}, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["gpt", "tied", "normed"])
def test_two_stages(two_ranks: Ranks, name: str, seed: int) -> None:
    check(two_ranks, name, {"pp": 2}, seed)


@pytest.mark.parametrize("seed", [2, 3, 6, 8, 14])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_two_stages_by_two(four_ranks: Ranks, name: str, seed: int) -> None:
    check(four_ranks, name, {"pp": 2, "a": 2}, seed)


@pytest.mark.parametrize("seed", [2, 3, 6, 14])
@pytest.mark.parametrize("name", ["gpt", "tied"])
def test_four_stages(four_ranks: Ranks, name: str, seed: int) -> None:
    check(four_ranks, name, {"pp": 4}, seed)
