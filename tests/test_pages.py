"""A page shows what its explanation says."""

import dataclasses
import json

import pytest

from autopar.advice import Change, Question
from autopar.cost_model.cluster import find_cluster
from autopar.pages import change_line, page_of, word_of
from autopar.report import as_text, collectives
from autopar.sheet import Sheet
from autopar.views import to_html


@pytest.fixture(scope="module")
def answer():
    return Question("gpt2", find_cluster("h100x4"), batch=16, seq=64).answer()


@pytest.fixture(scope="module")
def page(answer):
    return page_of(answer, "gpt2")


def test_the_document_is_what_the_page_shows(answer, page):
    document = json.loads(json.dumps(page.document, allow_nan=False))
    assert document["step_seconds"] == answer.step_seconds
    assert document["notes"] == list(page.notes)
    assert len(document["events"]) == len(page.events)
    assert len(document["block"]) == len(page.block)
    assert len(document["candidates"]) == len(page.candidates)
    assert document["time"]["seconds"] == page.time.value


def test_collectives_add_up_to_the_traffic(answer):
    sent = sum(each.traffic_bytes for each in collectives(answer.step))
    assert sent == pytest.approx(answer.traffic.value)


def test_nothing_speaks_of_axes_of_one_rank(answer, page):
    single = [f"{name}=1" for name, size in answer.plan.mesh.axes if size == 1]
    shown = " ".join((page.subtitle, *page.notes))
    assert single and not any(each in shown for each in single)


def test_symbols_are_shown_with_their_words(answer, page):
    assert any(name.startswith("hidden (") for name in page.sensitivity)
    assert word_of(answer, "batch") == "batch"


def test_changes_are_sentences(answer):
    now = answer.step_seconds
    other = Change("x", now * 0.9, "dp=2 zero3, 1 x 1", now * 0.8)
    same = dataclasses.replace(other, best=answer.setting.name)
    assert change_line(answer, other) == (
        "With x: dp=2 zero3, 1 x 1, 20.0 % faster (this one: 10.0 % faster)."
    )
    assert change_line(answer, same) == "With x: the same choice, 20.0 % faster."
    unchanged = dataclasses.replace(other, same_seconds=now)
    assert change_line(answer, unchanged) == "With x: dp=2 zero3, 1 x 1, 20.0 % faster."


@pytest.mark.parametrize("width", [80, 140])
def test_the_sheet_keeps_to_its_width(answer, page, width):
    text = as_text(Sheet(answer, page), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "What would change the choice" in text


def test_the_page_is_html(page):
    text = to_html(page)
    assert "gpt2" in text and 'id="document"' in text


def test_a_plan_that_does_not_fit_says_so(answer):
    tight = dataclasses.replace(answer, memory_bound_bytes=10**8)
    assert any("DOES NOT FIT" in note for note in page_of(tight, "gpt2").notes)
