"""The report as one HTML file that needs no network, no script and no font."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from autopar import units
from autopar.cost_model.breakdown import Breakdown
from autopar.ir.files import save_text
from autopar.views import palette
from autopar.views.bars import memory_headline, savings, shown, time_headline
from autopar.views.block import block_graph
from autopar.views.comparison import batch_table, picture, sensitivity_bars, table
from autopar.views.formulas import formulas
from autopar.views.gantt import gantt
from autopar.views.markup import Markup, escape, join, json_script, tag
from autopar.views.page import Page
from autopar.views.roofline import roofline
from autopar.views.stack import legend, stacked_bar
from autopar.views.stages import stage_table
from autopar.views.tables import branches
from autopar.views.timeline import timeline

DEEPEST, SMALLEST = 4, 0.002  # of the trees: levels, and shares that are summed up


def write_html(page: Page, path: Path | str) -> None:
    """Writes the report to `path`. Raises AutoparError for a file that cannot be written."""
    save_text(to_html(page), path)


_UNITS = Markup("Made by autopar. Memory and traffic are of one rank, time is of one step; GB is 1,000,000,000 bytes.")
_DOCUMENT = Markup(" This file also has all figures as JSON, in the element <code>script#document</code>.")


def to_html(page: Page) -> str:
    """The report as text."""
    footer = join((_UNITS, _DOCUMENT if page.document else None))
    return html_of(page.title, _header(page), list(_sections(page)), page.document, footer)


def html_of(
    title: str, header: Markup, sections: Sequence[Section], document: Mapping[str, Any], footer: Markup
) -> str:
    """A page in the style of the report.

    Args:
        title: title of the window.
        header: the part above the sections.
        sections: the parts of the page; one without a body is left out.
        document: figures of the page, which scripts find in the element `script#document`.
        footer: the last line.
    """
    shown_sections = [section for section in sections if section.body]
    return Template(_read("page.html")).substitute(
        title=escape(title),
        style=_read("page.css"),
        header=header,
        navigation=join(tag("a", s.title, href=f"#{s.identifier}") for s in shown_sections),
        sections=join(s.element() for s in shown_sections),
        document=json_script(document, "document"),
        footer=footer,
    )


def _read(name: str) -> str:
    return resources.files("autopar.views").joinpath("templates", name).read_text(encoding="utf-8")


class Section:
    """A titled part of the page; one without a body is left out."""

    def __init__(self, identifier: str, title: str, lead: str, *body: Markup | None) -> None:
        self.identifier, self.title, self.lead, self.body = identifier, title, lead, join(body)

    def element(self) -> Markup:
        lead = tag("p", self.lead, class_="lead") if self.lead else None
        return tag("section", tag("h2", self.title), lead, self.body, id=self.identifier)


def _header(page: Page) -> Markup:
    tiles = (tag("div", tag("dt", label), tag("dd", value), class_="tile") for label, value in page.figures)
    return tag(
        "header",
        tag("h1", page.title),
        tag("p", page.subtitle, class_="subtitle"),
        tag("dl", *tiles, class_="tiles"),
        tag("dl", *_pairs(page), class_="asked") if page.asked else None,
    )


def _pairs(page: Page) -> Iterator[Markup]:
    """The request, as a list of terms and values."""
    for what, value in page.asked:
        yield tag("div", tag("dt", what), tag("dd", value))


def _sections(page: Page) -> Iterator[Section]:
    axes = palette.of_axes(page.axes)
    yield _memory(page)
    yield _time(page)
    yield _pipeline(page)
    if page.simulation is None:  # else the picture of the pipeline shows when what runs
        steps = timeline(page.events, axes) if page.events else Markup("")
        yield Section("timeline", "Timeline", "One predicted step of one rank.", steps)
    block = block_graph(page.block, axes) if page.block else Markup("")
    yield Section("block", "Block", "The repeated block as the plan runs it.", block)
    dots = roofline(page.roofline, page.peak_flops, page.memory_bytes_per_second)
    lead = "Reached FLOP/s of ops, under the limits of the device. Larger dots take more of the step."
    yield Section("roofline", "Roofline", lead, dots)
    yield _batches(page)
    yield _comparison(page)
    lead = "Change of the step time when one number grows by 1 % and all else stays."
    yield Section("sensitivity", "What would change it", lead, sensitivity_bars(page.sensitivity))
    yield Section("traffic", "Traffic", "Sent by a rank in a step.", _traffic(page))
    typeset = formulas(page.formulas) if page.formulas else Markup("")
    yield Section("formulas", "Formulas", "", typeset)
    notes = tag("ul", *(tag("li", note) for note in page.notes)) if page.notes else Markup("")
    yield Section("notes", "Notes", "", notes)
    lines = tag("pre", tag("code", "\n".join(page.launch))) if page.launch else Markup("")
    yield Section("launch", "Launch", "The call of `compile` for this plan, and the command that starts it.", lines)


def _memory(page: Page) -> Section:
    parts = shown(page.memory)
    colours = palette.in_order(part.name for part in parts)
    bound = (page.memory_bound_bytes, "bound")
    return Section(
        "memory",
        "Memory",
        f"Of a rank: {memory_headline(page.memory, page.memory_bound_bytes)}.",
        stacked_bar("Memory of a rank by kind", parts, colours, bound),
        legend(parts, colours, page.memory.value),
        _tree(page.memory),
    )


def _time(page: Page) -> Section:
    parts = shown(page.time)
    colours = palette.with_axes((part.name for part in parts), palette.of_axes(page.axes))
    hidden = savings(page.time)
    step = (page.time.value, "step") if hidden else None
    return Section(
        "time",
        "Time",
        f"Of a step: {time_headline(page.time)}.",
        stacked_bar("Time of a step", parts, colours, step),
        legend((*parts, *hidden), colours, page.time.value),
        _tree(page.time),
    )


def _pipeline(page: Page) -> Section:
    lead = "One step of all pipeline ranks, simulated action by action. Memory is without what is reserved."
    if page.simulation is None:
        return Section("pipeline", "Pipeline", lead)
    return Section("pipeline", "Pipeline", lead, gantt(page.simulation), stage_table(page.stages))


def _traffic(page: Page) -> Markup:
    if page.traffic.value <= 0:
        return Markup("")
    parts = shown(page.traffic)
    colours = palette.with_axes((part.name for part in parts), palette.of_axes(page.axes))
    bar = stacked_bar("Traffic of a rank by kind", parts, colours)
    return join((bar, legend(parts, colours, page.traffic.value), _tree(page.traffic)))


def _batches(page: Page) -> Section:
    lead = "Batches that were tried for a step, each with its fastest plan."
    return Section("batches", "Batches", lead, batch_table(page.batches) if page.batches else None)


def _comparison(page: Page) -> Section:
    lead = (
        "Time against memory of every candidate, numbered as in the table; the line joins those"
        " that no other beats in both. A ring marks the chosen one, a cross what does not fit."
    )
    if not page.candidates:
        return Section("candidates", "Candidates", lead)
    return Section(
        "candidates", "Candidates", lead, picture(page.candidates, page.memory_bound_bytes), table(page.candidates)
    )


def _tree(breakdown: Breakdown) -> Markup | None:
    """The breakdown with all its parts, in a collapsed element."""
    if not any(part.parts for part in breakdown.parts):
        return None
    rows = (
        tag(
            "tr",
            tag("td", branch.name, style=f"padding-left:{0.5 + 1.4 * branch.depth:g}rem"),
            tag("td", branch.value, class_="number"),
            tag("td", units.format_share(branch.share, 1.0), class_="number"),
            tag("td", _share_bar(branch.share), class_="bar"),
            tag("td", branch.note, class_="quiet"),
        )
        for branch in branches(breakdown, DEEPEST, SMALLEST)
    )
    table = tag("div", tag("table", tag("tbody", *rows), class_="tree"), class_="scroll")
    return tag("details", tag("summary", "In detail"), table)


def _share_bar(share: float) -> Markup | None:
    if share <= 0:
        return None
    width = f"min-width:1px;width:{100 * min(1.0, share):.2f}%"
    return tag("span", class_="share-bar", style=width, aria_hidden="true")
