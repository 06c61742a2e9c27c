"""A page shows what its explanation says."""

import dataclasses
import json

import pytest
import torch

from autopar.cli.output import write_files
from autopar.cost_model.machines.cluster import find_cluster
from autopar.explanation.advice import Question
from autopar.explanation.pages import change_line, page_of
from autopar.explanation.report import as_text, collectives
from autopar.explanation.sheet import Sheet
from autopar.explanation.what_would_change import Change
from autopar.ir import Mesh
from autopar.models import PRESETS, build
from autopar.search.request.request import Request
from autopar.units import format_seconds
from autopar.views import read_trace, to_html


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


def test_a_step_has_the_spread_of_published_runs_in_text_page_and_document(answer, page):
    """Between the bounds of its class lie 80 % of them; one line says so."""
    spread, seconds = answer.spread, answer.step_seconds
    assert spread is not None and spread.low < 1 < spread.high
    bounds = [format_seconds(bound * seconds) for bound in (spread.low, spread.high)]
    words = f"{bounds[0]} to {bounds[1]} ({spread.runs} runs)"
    assert ("80 % of such steps", words) in page.figures
    assert words in to_html(page)
    found = page.document["step_spread"]
    assert (found["low_seconds"], found["high_seconds"]) == (spread.low * seconds, spread.high * seconds)
    assert found["of"] == str(spread.group) and found["share"] == 0.8


def test_the_page_says_what_is_published_and_what_is_scaled(answer, page):
    origins = page.document["origins"]
    assert {"published", "scaled"} == {*origins.values()}
    assert origins["products"] == "published" and origins["attention"] == "scaled"
    (line,) = (note for note in page.notes if "autopar calibrate" in note)
    assert all(figure in line for figure in origins)


def test_collectives_add_up_to_the_traffic(answer):
    sent = sum(each.traffic_bytes for each in collectives(answer.step))
    assert sent == pytest.approx(answer.traffic.value)


def test_nothing_speaks_of_axes_of_one_rank(answer, page):
    single = [f"{name}=1" for name, size in answer.plan.mesh.axes if size == 1]
    shown = " ".join((page.subtitle, *page.notes))
    assert single and not any(each in shown for each in single)


def test_symbols_are_shown_with_their_words(answer, page):
    assert any(name.startswith("hidden (") for name in page.sensitivity)
    assert answer.symbol_in_words("batch") == "batch"


def test_changes_are_sentences(answer):
    now = answer.step_seconds
    other = Change("x", now * 0.9, "dp=2 zero3, 1 micro-batch of 1", now * 0.8)
    same = dataclasses.replace(other, best=answer.setting.name)
    assert change_line(answer, other) == (
        "With x: at least 20.0 % faster, as dp=2 zero3, 1 micro-batch of 1 (this plan: 10.0 % faster)."
    )
    assert change_line(answer, same) == "With x: the same choice, at least 20.0 % faster."
    unchanged = dataclasses.replace(other, same_seconds=now)
    assert change_line(answer, unchanged) == "With x: at least 20.0 % faster, as dp=2 zero3, 1 micro-batch of 1."


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


# --- a pipeline


@pytest.fixture(scope="module")
def staged():
    mesh = Mesh.parse("pp=2,dp=2")
    request = Request.on(find_cluster("h100x4"), mesh=mesh, schedule="1f1b", micro_batches=4)
    return Question("examples.gpt:tiny_example", request).answer()


@pytest.fixture(scope="module")
def staged_page(staged):
    return page_of(staged, "tiny")


def test_a_pipeline_says_what_is_simulated(staged, staged_page):
    notes = " ".join(staged_page.notes)
    assert "pp=2 runs 2 stages by 1f1b, 4 micro-batches" in notes
    assert "the closed form (p - 1) / (m + p - 1) gives 20.0 %" in notes
    assert "Step, memory and stages come from the simulated schedule" in notes
    assert "cannot run" not in notes and "of other candidates" not in notes
    assert staged_page.subtitle.startswith("pp=2,dp=2 on h100x4x1, 1f1b over 2 stages, 4 micro-batches")
    assert (
        "pipeline bubble",
        f"{100 * staged.simulation.bubble_fraction:.1f} % of the schedule",
    ) in staged_page.figures
    assert [p.name for p in staged.time.parts if "bubble" in p.name] == []  # one rank's waits are no bubble
    waits = staged.time.part("waiting for other stages").value
    busiest = max(staged.simulation.busy_seconds)
    assert waits == pytest.approx(staged.simulation.step_seconds - busiest)
    assert staged_page.simulation is staged.simulation
    assert [row.where for row in staged_page.stages] == ["token_embedding to blocks.0", "blocks.1 to head"]


def test_formulas_of_a_pipeline_are_of_the_closed_form(staged, staged_page):
    first = staged_page.formulas[0]
    assert first.value == format_seconds(staged.closed_form.step_seconds)
    assert not any(each.expression.is_Float for each in staged_page.formulas)


@pytest.mark.parametrize("width", [80, 160])
def test_a_pipeline_in_a_terminal(staged, staged_page, width):
    text = as_text(Sheet(staged, staged_page), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "Stages, one micro-batch each" in text and "rank 1 " in text


def test_a_pipeline_is_in_the_page_and_the_trace(staged_page, tmp_path):
    write_files(staged_page, tmp_path / "page.html", tmp_path / "step.json")
    assert 'id="pipeline"' in (tmp_path / "page.html").read_text()
    lanes = {event.lane for event in read_trace(tmp_path / "step.json")}
    assert {"rank 0", "rank 1", "rank 0 sends"} <= lanes
    assert all(lane.startswith("rank ") for lane in lanes)


def test_stages_of_few_layers_are_those_of_all():
    request = Request.on(
        find_cluster("h100x4"), mesh=Mesh.parse("pp=2,dp=2"), batch=16, recipe="pp:gpipe,dp:ddp", micro_batches=2
    )
    found = Question("gpt2", request, 64).answer()
    page = page_of(found, "gpt2")
    assert "pp=2,dp=2 on h100x4x1, gpipe over 2 stages" in page.subtitle
    assert sum(row.layers for row in page.stages) == 12
    assert page.stages[0].first == "embedding" and page.stages[1].last == "head"
    with torch.device("meta"):
        model = build(PRESETS["gpt2"].description)
    whole = sum(p.numel() for p in model.parameters())
    tied = model.embedding.weight.numel()  # both ends hold it
    assert sum(row.parameters for row in page.stages) == whole + tied
