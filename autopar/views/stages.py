"""The stages of a pipeline as a table, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar import units
from autopar.views.markup import Markup, join, tag
from autopar.views.page import StageRow
from autopar.views.tables import ROOMY

HEAD = (
    "stage",
    "rank",
    "modules",
    "layers",
    "parameters",
    "forward",
    "backward",
    "sends",
    "in flight",
    "kept",
    "peak of rank",
)
WORDS = 3  # columns from the left, the others are figures
NARROW = ("stage", "rank", "modules", "forward", "backward", "in flight", "peak of rank")


@dataclass(frozen=True)
class StageSummary:
    """Contents and cost of every stage, the slowest and the fullest marked; a narrow terminal gets fewer columns."""

    stages: tuple[StageRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = HEAD if options.max_width >= ROOMY else NARROW
        table = Table(
            title="Stages, one micro-batch each (* slowest, ! on the fullest rank)",
            title_justify="left",
            show_edge=False,
            pad_edge=False,
        )
        for name in shown:
            words = name in HEAD[:WORDS]
            table.add_column(
                name,
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=name not in ("modules", "in flight"),
            )
        for row in self.stages:
            cells = dict(zip(HEAD, _cells(row), strict=True))
            cells["stage"] += "".join(mark for mark, _ in _marks(row, self.stages))
            table.add_row(*(Text(cells[name]) for name in shown))
        yield table


def stage_table(stages: Sequence[StageRow]) -> Markup:
    """The table of stages for the page."""
    head = tag("tr", *(tag("th", name, scope="col") for name in HEAD))
    rows = (_html_row(row, stages) for row in stages)
    return tag("div", tag("table", tag("thead", head), tag("tbody", join(rows))), class_="scroll")


def _html_row(row: StageRow, stages: Sequence[StageRow]) -> Markup:
    number, rank, where, *figures = _cells(row)
    badges = (tag("span", words, class_="badge") for _, words in _marks(row, stages))
    return tag(
        "tr",
        tag("td", number),
        tag("td", rank),
        tag("td", where, " ", *badges),
        *(tag("td", words, class_="number") for words in figures),
    )


def _marks(row: StageRow, stages: Sequence[StageRow]) -> Iterator[tuple[str, str]]:
    if row.seconds == max(each.seconds for each in stages) and len(stages) > 1:
        yield "*", "slowest"
    if row.rank_bytes == max(each.rank_bytes for each in stages) and len(stages) > 1:
        yield "!", "fullest rank"


def _cells(row: StageRow) -> tuple[str, ...]:
    sends = (row.send_seconds, row.gradient_seconds)
    return (
        str(row.number),
        str(row.rank),
        row.where,
        str(row.layers) if row.layers else "",
        units.format_count(row.parameters),
        units.format_seconds(row.forward_seconds),
        units.format_seconds(row.backward_seconds),
        " + ".join(units.format_seconds(each) for each in sends if each) or "-",
        f"{row.in_flight} x {units.format_bytes(row.saved_bytes)}",
        units.format_bytes(row.kept_bytes),
        units.format_bytes(row.rank_bytes),
    )
