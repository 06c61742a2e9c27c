"""What scripts may expect of a module holds for a compiled one, or is refused in words that help."""

from __future__ import annotations

import pytest

from tests.runtime.gloo_ranks import Ranks
from tests.support.contract.behaviour import BEHAVIOURS
from tests.support.contract.verdicts import differences, verdict_of_behaviour

pytestmark = pytest.mark.multiprocess

# Those that once failed.
MENDED = [
    "assigns a parameter",
    "copies a whole tensor",
    "hooks of the state",
    "loads into a layer",
    "registers a parameter",
    "replaces a layer",
]


@pytest.mark.parametrize("name", MENDED)
def test_what_once_failed_is_as_it_is_plainly(two_ranks: Ranks, name: str) -> None:
    for found in two_ranks.run(verdict_of_behaviour, name, "zero3"):
        assert found.word == "equal", found.text


@pytest.mark.slow
@pytest.mark.parametrize("door", ["ddp", "shard_", "backend"])
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_every_behaviour_is_as_it_is_plainly_or_refused(two_ranks: Ranks, name: str, door: str) -> None:
    for found in two_ranks.run(verdict_of_behaviour, name, door):
        assert found.word in ("equal", "refused"), found.text


def test_a_difference_is_named_by_its_place() -> None:
    assert not differences({"a": [1.0, "x"]}, {"a": [1.0 + 1e-12, "x"]})
    assert differences({"a": [1.0, 2]}, {"a": [1.5, 2]}) == ["a: 1.0, and plainly 1.5"]
    assert differences([1], [1, 2]) == ["[1], and plainly [1, 2]"]


@pytest.mark.parametrize(
    "name",
    [
        "a checkpoint of torch",
        "a gradient is assigned",
        "a missing key is an error",
        "a state is averaged with another",
        "freezes all",
        "state into a plain model",
    ],
)
def test_what_once_failed_with_stages_is_as_it_is_plainly(two_ranks: Ranks, name: str) -> None:
    for found in two_ranks.run(verdict_of_behaviour, name, "stages"):
        assert found.word == "equal", found.text
