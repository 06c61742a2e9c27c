"""What an explanation says of a plan in which single ranks run ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost_model import find_cluster
from autopar.errors import AutoparError
from autopar.explanation.explanation import Explanation
from autopar.explanation.pages import page_of
from autopar.ir import Mesh
from autopar.planning.planning import prepare_step
from tests.support.towers import Towers, towers_plan


@pytest.fixture(scope="module")
def explained() -> Explanation:
    with torch.device("meta"):
        model, x = Towers(1024, 8192), torch.empty(4096, 8)
    graph = prepare_step(model, (x,), loss_fn=torch.sum).analysis.graph
    plan = towers_plan(graph, "", {"a": 0, "b": 1}, Mesh.parse("dp=2"))
    return Explanation(graph, plan, find_cluster("h100x2"))


def test_it_says_who_runs_what_and_who_waits(explained: Explanation) -> None:
    text = str(explained)
    assert "rank 0 of dp runs 3 of " in text and "ops alone (a)" in text
    assert "rank 1 of dp runs 4 of " in text and "ops alone (b)" in text
    assert "for rank 1 of dp" in text
    assert "rank 0 alone" in text and "partial sums" not in text  # in the table of ops


def test_ranks_side_by_side_take_less_than_in_turn(explained: Explanation) -> None:
    assert explained.step_seconds < explained.closed_form.step_seconds
    assert explained.time.value == pytest.approx(explained.step_seconds, rel=1e-9)
    assert explained.memory.value == explained.memory_bytes


def test_the_timeline_ends_with_the_step(explained: Explanation) -> None:
    ends = [event.start_seconds + event.duration_seconds for event in explained.events()]
    assert max(ends) == pytest.approx(explained.step_seconds, rel=1e-6)


def test_a_faster_machine_is_simulated_again(explained: Explanation) -> None:
    faster = explained.what_if(memory_bandwidth=2, flops=2, host_speed=2, link_latency=0.5, link_bandwidth=2)
    assert faster.owned is not None
    assert faster.step_seconds == pytest.approx(explained.step_seconds / 2, rel=0.2)
    with pytest.raises(AutoparError, match="stages or owners"):
        explained.what_if(batch=2.0)


def test_data_and_page(explained: Explanation) -> None:
    found = explained.to_json()
    assert found["step_seconds"] == explained.step_seconds and found["sensitivity_per_percent"]
    assert any("work at the same time" in note for note in page_of(explained, "towers").notes)
    assert replace(explained, in_turn=True).owned is None
