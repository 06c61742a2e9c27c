"""Odd scripts with the backend, on two ranks; benchmarks/parity/odd_scripts.py gives all of them to every door."""

from __future__ import annotations

import pytest

from tests.runtime.gloo_ranks import Ranks
from tests.support.odd.odd_scripts import verdict


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "door"),
    [
        ("annealed attribute", "backend"),
        ("copy of a layer", "compile"),
        ("list that the loss reads", "backend with the loss"),
        ("tensor that forward keeps", "backend"),
        ("global counter", "backend with the loss"),
        ("hook on the backward of a module, added before step 2", "backend"),
        ("descriptor", "backend"),
        ("classmethod", "backend"),
        ("hook on the gradient of an activation", "backend"),
    ],
)
def test_a_script_trains_as_it_does_plainly(two_ranks: Ranks, name: str, door: str) -> None:
    assert [found.word for found in two_ranks.run(verdict, name, door)] == ["equal", "equal"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "door", "cause"),
    [
        ("own random.Random", "backend", "self.own.random()"),
        ("class patched", "backend with the loss", "Patched.forward was replaced"),
        ("cached function", "backend with the loss", "cached_scale"),
    ],
)
def test_what_dynamo_does_not_see_is_refused_with_its_line(two_ranks: Ranks, name: str, door: str, cause: str) -> None:
    for found in two_ranks.run(verdict, name, door):
        assert found.word == "refused" and cause in found.text
