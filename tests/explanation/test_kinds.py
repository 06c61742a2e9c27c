"""Ways to share a step among kinds of machines: which is chosen, and what is said of the others."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autopar.cost_model import H100
from autopar.cost_model.machines.cluster import Cluster, cluster_of_kinds
from autopar.errors import SearchError
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.explanation.kinds import best_of, ways_of
from autopar.explanation.pages import page_of
from autopar.explanation.sheet import Sheet
from autopar.search.request.request import Request
from tests.support.machines import times


def asked(*factors: float, **options) -> Question:
    cluster = cluster_of_kinds([Cluster(times(H100, each), 1) for each in factors])
    return Question("gpt2", Request.on(cluster, batch=16, **options), 64)


def test_ways_by_hand() -> None:
    request = asked(1, 0.5, 0.25).request
    words = ["equal shares", "a pipeline across", *(f"x{each}x1x1 alone" for each in ("1", "0.5", "0.25"))]
    pairs = ["x1x1x1+x0.5x1x1 alone", "x1x1x1+x0.25x1x1 alone", "x0.5x1x1+x0.25x1x1 alone"]
    ways = ways_of(request, (1, 3))
    assert [each.words for each in ways] == [*words, *pairs]
    assert [each.request.stages for each in ways] == [(1,), (3,), *[None] * 6]
    assert [each.request.ranks for each in ways] == [3, 3, 1, 1, 1, 2, 2, 2]
    assert [each.words for each in ways_of(request, (1,))][:2] == ["equal shares", "x1x1x1 alone"]


def test_the_slow_kind_is_left_out_where_it_is_very_slow() -> None:
    found = asked(1, 0.01, stages=(1,)).answer()
    chosen = next(each for each in found.candidates if each.chosen)
    assert chosen.name.startswith("x1x1x1 alone: ")
    assert str(found.cluster) == "x1x1x1" and found.plan.mesh.ranks == 1
    named = [each.name.partition(":")[0] for each in found.candidates]
    assert {"equal shares", "x0.01x1x1 alone"} <= {*named}
    assert found.kind_lines[0].startswith("Kinds of machines: x1x1x1 alone is fastest")


def test_two_kinds_that_are_nearly_alike_work_together() -> None:
    """All ranks wait for the slower one, which has 99 % of the rate of the other."""
    found = asked(1, 0.99).answer()
    assert found.plan.world_mesh.ranks == 2
    text = " ".join(found.kind_lines)
    assert "Rank 0 is x1x1x1, rank 1 is x0.99x1x1." in text
    assert "Not searched: parts of the batch by kind" in text


def test_who_waits_is_on_the_screen_and_in_the_document() -> None:
    found = asked(1, 0.5, mesh="pp=2", micro_batches=4, schedule="1f1b").answer()
    page = page_of(found, "gpt2")
    lines = [note for note in page.notes if "Pipeline rank" in note]
    assert len(lines) == 2 and "layers in 1 stage, " in lines[0]
    assert "for x0.5, which computes longest" in lines[0] or "for x1, which computes longest" in lines[1]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(Sheet(found, page))
    text = console.export_text()
    assert "Pipeline rank 1 on x0.5" in text
    assert '"hardware"' not in text and 'hardware="x1x1x1+x0.5x1x1"' in text
    assert "--node-rank NODE" in text
    assert [note for note in page.document["notes"] if "Pipeline rank" in note] == lines


def test_what_has_no_plan_is_said_and_where_nothing_has_one_its_error() -> None:
    question = asked(1, 0.5)
    ways = ways_of(question.request, (1,))
    alone = asked(1).answer()

    def answer(request: Request) -> Explanation:
        if request.ranks == 2:
            raise SearchError("No plan fits.\nMore.")
        return alone

    found = best_of(ways, answer)
    assert "Without a plan: equal shares (No plan fits.)" in found.kind_lines

    def refuse(request: Request) -> Explanation:
        raise SearchError(f"None on {request.ranks}.")

    with pytest.raises(SearchError, match="None on 2"):
        best_of(ways, refuse)
