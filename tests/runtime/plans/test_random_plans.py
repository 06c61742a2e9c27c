"""Plans drawn at random, on real ranks, train as a single process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, randomly, single
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


@functools.cache
def alone(name: str, micro_batches: int) -> dict[str, Any]:
    return single(name, micro_batches=micro_batches)


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have, as one has it: with stages each has the entries of its own."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def distance(ranks: Ranks, name: str, mesh: dict[str, int], seed: int, lone_ops: bool | None = None) -> float:
    """The largest difference of a rank from one process, under the plan that a seed draws.

    Plans with stages have ops on single ranks where these are asked for.
    """
    if "pp" in mesh:
        lone_ops = bool(lone_ops)
    parts = ranks.run(randomly, name, mesh, seed, "cpu", lone_ops)
    expected = alone(name, parts[0][1])
    whole = together([part for part, _ in parts])
    return max(difference({key: (whole | part)[key] for key in expected}, expected) for part, _ in parts)


@pytest.mark.parametrize(
    ("name", "seed"),
    often(
        [("mlp", 0), ("gpt", 0), ("gpt", 1), ("tied", 0), ("normed", 1)],
        [("mlp", 0), ("gpt", 1), ("tied", 0), ("normed", 1)],
    ),
)
def test_two_ranks(two_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(two_ranks, name, {"a": 2}, seed) < 1e-9


# Three ranks divide no dim of a parameter of "odd". Some seeds leave ops to single ranks, or store on the host.


@pytest.mark.parametrize("seed", range(8))
def test_three_ranks(three_ranks: Ranks, seed: int) -> None:
    assert distance(three_ranks, "odd", {"a": 3}, seed) < 1e-9


SLOW = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 14))])
def test_three_ranks_split_widths_they_do_not_divide(three_ranks: Ranks, seed: int) -> None:
    assert distance(three_ranks, "odd widths", {"a": 3}, seed) < 1e-9


# Under seed 3 a parameter is viewed by its factors, and then padded before it is gathered.


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=SLOW) for seed in range(4, 20))])
def test_four_ranks_split_widths_they_do_not_divide(four_ranks: Ranks, seed: int) -> None:
    assert distance(four_ranks, "odd widths", {"a": 2, "b": 2}, seed) < 1e-9


@pytest.mark.parametrize(
    ("name", "seed"),
    often([("mlp", 0), ("gpt", 1), ("tied", 1), ("normed", 0)], [("gpt", 1), ("tied", 1), ("normed", 0)]),
)
def test_two_by_two_ranks(four_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(four_ranks, name, {"a": 2, "b": 2}, seed) < 1e-9


# Seeds that draw an exchange of rows for experts along an axis: with their inner width split along the other, and
# between the stages of v-min and zb.


@pytest.mark.parametrize(
    ("mesh", "seed"),
    often(
        [({"a": 2, "b": 2}, 3), ({"pp": 2, "a": 2}, 29), ({"pp": 2, "a": 2}, 0)],
        [({"a": 2, "b": 2}, 3), ({"pp": 2, "a": 2}, 0)],
    ),
)
def test_rows_change_hands(four_ranks: Ranks, mesh: dict[str, int], seed: int) -> None:
    assert distance(four_ranks, "routed", mesh, seed) < 1e-9


# Cuts at any op; the seed draws the schedule.


@pytest.mark.parametrize(
    ("name", "seed"),
    [("gpt", 1), ("tied", 9), ("normed", 2), ("tied", 7), ("normed", 13), ("gpt", 4), ("gpt", 8)],
    ids=["dualpipev", "zbv", "looped-bfs", "1f1b", "gpipe", "interleaved", "zb"],
)
def test_two_stages(two_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(two_ranks, name, {"pp": 2}, seed) < 1e-9


@pytest.mark.parametrize(
    ("name", "seed"),
    often([("mlp", 7), ("gpt", 4), ("gpt", 8)], [("mlp", 7), ("gpt", 8)]),
    ids=["1f1b", "interleaved", "zb"],
)
def test_two_stages_by_two(four_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(four_ranks, name, {"pp": 2, "a": 2}, seed) < 1e-9


@pytest.mark.parametrize(
    ("name", "seed"),
    often([("tied", 0), ("gpt", 1), ("gpt", 23), ("gpt", 3)], [("tied", 0), ("gpt", 3)]),
    ids=["1f1b", "dualpipev", "v-half", "v-min"],
)
def test_four_stages(four_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(four_ranks, name, {"pp": 4}, seed) < 1e-9


# Single ranks of a stage run a third of the ops alone.


@pytest.mark.parametrize(
    ("name", "seed"),
    often([("gpt", 9), ("tied", 2), ("gpt", 1)], [("tied", 2)]),
    ids=["zbv", "looped-bfs", "dualpipev"],
)
def test_two_stages_of_owners(four_ranks: Ranks, name: str, seed: int) -> None:
    assert distance(four_ranks, name, {"pp": 2, "a": 2}, seed, lone_ops=True) < 1e-9
