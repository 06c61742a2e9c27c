"""Recorded plans and prices: a slice of them, and what the comparison finds."""

from __future__ import annotations

import pytest

from benchmarks.goldens.__main__ import difference, recorded, untrue
from benchmarks.goldens.answers import goldens


@pytest.mark.parametrize("name", ["gpt2 h100x4 dp=4 b16", "gpt2 h100x8 dp=2,tp=4 b256"])
def test_plans_and_prices_are_those_that_were_recorded(name: str) -> None:
    (asked,) = (each for each in goldens() if each.name == name)
    found = asked.answer()
    assert difference(found, recorded()[name]) == ""
    assert [*untrue(found)] == []


def test_other_prices_layouts_and_timelines_are_found() -> None:
    before = recorded()["gpt2 h100x4 dp=4 b16"]
    assert difference({**before, "search_seconds": 0.0}, before) == ""
    assert difference({**before, "step_seconds": "1"}, before) == f"step_seconds {before['step_seconds']} -> 1"
    assert difference({**before, "plan": {**before["plan"], "recipe": "tp"}}, before) == "plan: recipe"
    assert [*untrue({**before, "timeline_seconds": "1"})] != []
