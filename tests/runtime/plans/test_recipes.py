"""Every recipe, on real ranks, trains as a single process does; also with micro-batches."""

from __future__ import annotations

import pytest

from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import compiled, difference, single

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero2", "zero3", "tp", "tp+sp", "auto"])
# Two micro-batches do all that one does, and add up.
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_axis(two_ranks: Ranks, recipe: str, micro_batches: int) -> None:
    expected = single("gpt")
    results = two_ranks.run(compiled, "gpt", {"dp": 2}, recipe, micro_batches)
    assert all(difference(found, expected) < 1e-9 for found in results)


@pytest.mark.parametrize(
    "recipe",
    [
        {"dp": "zero3", "tp": "tp+sp"},
        {"dp": "zero1", "tp": "tp"},
        pytest.param({"dp": "ddp", "tp": "zero3"}, marks=pytest.mark.slow),
        {"dp": "zero3", "tp": "zero3"},
        pytest.param({"dp": "zero2", "tp": "zero2"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_axes(four_ranks: Ranks, recipe: dict[str, str]) -> None:
    expected = single("gpt")
    results = four_ranks.run(compiled, "gpt", {"dp": 2, "tp": 2}, recipe, 2)
    assert all(difference(found, expected) < 1e-9 for found in results)
