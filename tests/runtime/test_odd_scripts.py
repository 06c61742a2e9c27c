"""Odd scripts with the backend, on two ranks; benchmarks/parity/odd_scripts.py gives all of them to every door."""

from __future__ import annotations

import pytest

from tests.runtime.ranks import Ranks
from tests.support.odd_scripts import verdict


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "door"),
    [
        ("annealed attribute", "backend"),
        ("list that the loss reads", "backend with the loss"),
        ("tensor that forward keeps", "backend"),
        ("global counter", "backend with the loss"),
        ("hook on the backward of a module, added before step 2", "backend"),
    ],
)
def test_a_script_trains_as_it_does_plainly(two_ranks: Ranks, name: str, door: str) -> None:
    assert [found.word for found in two_ranks.run(verdict, name, door)] == ["equal", "equal"]


@pytest.mark.multiprocess
def test_a_draw_that_dynamo_would_repeat_is_refused_with_its_line(two_ranks: Ranks) -> None:
    for found in two_ranks.run(verdict, "own random.Random", "backend"):
        assert found.word == "refused" and "self.own.random()" in found.text
