"""The page read back by a parser: it is whole, says every number, needs nobody, and trusts no name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from autopar import units
from autopar.cost_model.breakdown import Breakdown, Candidate, Event
from autopar.views import BlockCollective, BlockNode, RooflinePoint, to_html, write_html
from autopar.views.markup import VOID
from tests.views import sample

HOSTILE = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


class Reader(HTMLParser):
    """Checks that elements nest, and collects names, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def text() -> str:
    return to_html(sample.page())


@pytest.fixture(scope="module")
def reader(text) -> Reader:
    return read(text)


def test_elements_are_balanced_and_identifiers_unique(reader):
    found = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(found) == len(set(found)) == 11  # ten sections and the document
    links = [a["href"] for name, a in reader.elements if name == "a"]
    assert {link.removeprefix("#") for link in links} == set(found) - {"document"}


def test_every_number_is_written(reader):
    page, words = sample.page(), " ".join(reader.words)
    for cost in (page.memory, page.time, page.traffic):
        for depth, node in cost.walk():
            if node.value > 0.002 * cost.value or (depth == 1 and node.value):
                assert node.name in words and units.format_as(node.unit, node.value) in words, node.name
    for each in page.candidates:
        assert each.name in words and units.format_seconds(each.step_seconds) in words
        assert each.why_not in words
    for name, value in page.sensitivity.items():
        assert (name in words and units.format_change(value) in words) == (abs(value) >= 1e-5)
    for label, value in page.figures:
        assert label in words and value in words
    assert all(node.module.rpartition(".")[2] in words for node in page.block)
    assert all(note in words for note in page.notes)


def test_the_pipeline_is_a_picture_and_a_table(reader):
    words = " ".join(reader.words)
    assert "One step of all pipeline ranks" in words
    for row in sample.page().stages:
        assert row.where in words and units.format_seconds(row.backward_seconds) in words
        assert f"{row.in_flight} x {units.format_bytes(row.saved_bytes)}" in words
    one_rank = "One predicted step of one rank."  # which it stands in the place of
    assert one_rank not in words
    assert one_rank in to_html(sample.page(simulation=None, stages=()))


def test_it_needs_no_network_and_runs_no_script(text, reader):
    assert not re.findall(r"https?://|url\(|@import", text)
    for name, attributes in reader.elements:
        assert name not in ("link", "iframe", "img", "object", "embed")
        assert not {"src", "srcset"} & set(attributes)
        assert not any(key.startswith("on") for key in attributes)
        assert name != "script" or attributes["type"] == "application/json"


def test_drawings_have_names_and_tables_have_heads(reader):
    drawings = [attributes for name, attributes in reader.elements if name == "svg"]
    assert len(drawings) == 14 and all(a["aria-label"] and a["role"] == "img" for a in drawings)
    assert all(a["scope"] == "col" for name, a in reader.elements if name == "th")


def test_the_document_reads_back(text):
    page = sample.page()
    inside = re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.S)
    assert inside is not None and json.loads(inside[1]) == page.document


def hostile_page():
    def renamed(cost: Breakdown) -> Breakdown:
        parts = tuple(map(renamed, cost.parts))
        return dataclasses.replace(cost, name=cost.name + HOSTILE, note=HOSTILE, parts=parts)

    page = sample.page()
    return sample.page(
        title=HOSTILE,
        subtitle=HOSTILE,
        figures=((HOSTILE, HOSTILE),),
        notes=(HOSTILE,),
        memory=renamed(page.memory),
        time=renamed(page.time),
        traffic=renamed(page.traffic),
        events=tuple(
            Event(e.lane + HOSTILE, HOSTILE, e.start_seconds, e.duration_seconds, {HOSTILE: HOSTILE})
            for e in page.events[:400]
        ),
        candidates=(Candidate(HOSTILE, 1.0, 1e9, 1e9, HOSTILE, True, why_not=HOSTILE),),
        roofline=(RooflinePoint(HOSTILE, 10.0, 1e12, 1.0),),
        sensitivity={HOSTILE: 0.5},
        block=(
            BlockNode(HOSTILE, "input"),
            BlockNode(
                "b",
                HOSTILE,
                HOSTILE,
                ((HOSTILE, HOSTILE),),
                1.0,
                (HOSTILE, "w" + HOSTILE),
                (
                    BlockCollective(HOSTILE, HOSTILE, 1.0, 1.0, HOSTILE),
                    BlockCollective("tp", HOSTILE, 1.0, 1.0, "w" + HOSTILE),
                ),
            ),
        ),
        stages=tuple(row._replace(first=HOSTILE, last=HOSTILE + "x") for row in page.stages),
        document={HOSTILE: HOSTILE},
    )


def test_hostile_names_stay_text():
    reader = read(to_html(hostile_page()))
    names = [name for name, _ in reader.elements]
    assert names.count("script") == 1 and "img" not in names
    assert any(HOSTILE in words for words in reader.words)


def test_empty_sections_are_left_out():
    empty = sample.page(
        events=(),
        simulation=None,
        stages=(),
        candidates=(),
        roofline=(),
        block=(),
        formulas=(),
        sensitivity={},
        notes=(),
    )
    reader = read(to_html(empty))
    found = [a["id"] for name, a in reader.elements if name == "section"]
    assert found == ["memory", "time", "traffic"]


def test_what_is_unknown_or_endless_does_not_break_a_picture():
    candidates = (
        Candidate("unknown", math.inf, math.nan, 0.0, "", False),
        *sample.candidates(),
        Candidate("far", 1e6, 1e13, 1e9, "tp", True),
    )
    text = to_html(sample.page(candidates=candidates))
    read(text)
    assert "unknown" in text and "nan" not in re.sub(r">[^<]*<", "><", text)


def test_hidden_work_lies_beyond_the_line():
    parts = (*sample.time().parts, sample.leaf("hidden behind compute", "seconds", -0.4))
    time = dataclasses.replace(sample.time(), parts=parts, value=sample.time().value - 0.4)
    words = " ".join(read(to_html(sample.page(time=time))).words)
    assert "step 2.29 s" in words and "400 ms beyond it are hidden" in words and "-400 ms" in words


def test_a_rank_without_traffic_and_a_single_event():
    nothing = Breakdown("traffic", "bytes", sample.parameters, 0.0)
    page = sample.page(traffic=nothing, events=(Event("compute", "all", 0.0, 1.0),))
    reader = read(to_html(page))
    assert "traffic" not in [a["id"] for name, a in reader.elements if name == "section"]


def test_it_is_written_as_utf_8(tmp_path, text):
    path = tmp_path / "report.html"
    write_html(sample.page(), path)
    assert path.read_text(encoding="utf-8") == text
