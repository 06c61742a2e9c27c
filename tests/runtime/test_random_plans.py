"""Plans drawn at random, on real ranks, train as a single process does."""

from __future__ import annotations

import pytest

from tests.runtime.ranks import Ranks
from tests.runtime.training import difference, randomly, single

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "normed"])
def test_two_ranks(two_ranks: Ranks, name: str) -> None:
    expected = single(name)
    for seed in range(3):
        for found in two_ranks.run(randomly, name, {"a": 2}, seed):
            assert difference(found, expected) < 1e-9, seed


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "normed"])
def test_two_by_two_ranks(four_ranks: Ranks, name: str) -> None:
    expected = single(name)
    for seed in range(2):
        for found in four_ranks.run(randomly, name, {"a": 2, "b": 2}, seed):
            assert difference(found, expected) < 1e-9, seed
