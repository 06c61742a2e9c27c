"""The reports that `autopar explain` and `autopar fit` print in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.explanation.explanation import Explanation
from autopar.explanation.fitting import Fit
from autopar.explanation.launch import asked
from autopar.explanation.pages import change_lines
from autopar.explanation.report import collective_table, collectives, op_table, parameter_table, used_axes
from autopar.units import format_bytes, format_seconds
from autopar.views import BatchTable, CandidateTable, Page, SensitivityTable, StageSummary, Tree, memory_bar, time_bar
from autopar.views.bars import headline
from autopar.views.gantt import Gantt

_DEPTH, _SMALLEST = 2, 0.02  # levels of a tree; parts below this share are summed up
_STRONGEST = 12  # rows of the table of sensitivities


@dataclass(frozen=True)
class Sheet:
    """The output of `autopar explain` in a terminal, as a rich renderable.

    First the question and the notes, then bars of memory and time, the pipeline, tables of layouts and
    collectives, trees of costs, the other candidates, what would change the choice, and the lines to launch it.

    Attributes:
        advice: the plan with its costs, and the candidates that it was compared with.
        page: the contents of the report, as data for tables and figures.
    """

    advice: Explanation
    page: Page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self._parts():
            yield part
            yield Text()

    def _parts(self) -> Iterator[RenderableType]:
        advice, page = self.advice, self.page
        plan = used_axes(advice.plan)
        yield headline(page)
        yield _pairs(page.asked)
        changes = change_lines(advice)
        yield Group(*(Text(f"- {note}") for note in page.notes if note not in changes))
        yield memory_bar(page.memory, page.memory_bound_bytes)
        yield time_bar(page.time, page.axes)
        if page.simulation is not None:
            yield Gantt(page.simulation)
            yield StageSummary(page.stages)
        yield parameter_table(plan, advice.graph)
        yield op_table(plan, advice.graph, advice.op_seconds, advice.factor_words)
        if collectives(advice.step):
            yield collective_table(advice.step)
        yield Group(
            Text("Where time and memory go", style="bold"),
            Tree(page.time, _DEPTH, _SMALLEST),
            Tree(page.memory, _DEPTH, _SMALLEST),
        )
        if page.batches:
            yield BatchTable(page.batches)
        if len(page.candidates) > 1:
            yield CandidateTable(page.candidates)
        yield from self._what_would_change(changes)
        yield Group(Text("Launch", style="bold"), *(Text(f"  {line}") for line in page.launch))

    def _what_would_change(self, changes: tuple[str, ...]) -> Iterator[RenderableType]:
        if changes:
            title = Text("What would change the choice", style="bold")
            yield Group(title, *(Text(f"- {line}") for line in changes))
        strongest = dict(list(self.advice.sensitivity().items())[:_STRONGEST])
        if strongest:
            words = {self.advice.symbol_in_words(name): value for name, value in strongest.items()}
            yield Group(SensitivityTable(words), *_legend(self.advice, strongest))


def _pairs(asked: tuple[tuple[str, str], ...]) -> Table:
    """A table of the request, with one line per constraint."""
    table = Table.grid(padding=(0, 2))
    for what, value in asked:
        table.add_row(Text(what, style="dim"), Text(value))
    return table


def _legend(advice: Explanation, shown: Mapping[str, float]) -> Iterator[Text]:
    """Lines with the meanings of the symbols shown."""
    for name in shown:
        if name in advice.legend and name not in ("batch", "seq"):
            yield Text(f"{name} = {advice.legend[name]}", style="dim")


@dataclass(frozen=True)
class FitSheet:
    """The report of `autopar fit`: whether a model fits, the parts of its memory, and the changes that help."""

    target: str
    fit: Fit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        advice, fit = self.fit.advice, self.fit
        verdict = "fits" if fit.fits else "DOES NOT FIT"
        where = " without storage on the host" if fit.fits_on_host else ""
        over = "free" if fit.fits else "too much"
        yield Text(
            f"{self.target} {verdict} on {advice.cluster}{where}: {format_bytes(advice.memory_bytes)} of "
            f"{format_bytes(advice.bound_bytes)}, {format_bytes(abs(fit.margin_bytes))} {over}",
            style="bold green" if fit.fits else "bold red",
        )
        yield _pairs(asked(advice, self.target))
        price = "" if fit.money is None else f", {fit.money:.4g} of money a step"
        tiles = "" if advice.plan.loss_tile_bytes is None else ", the loss in tiles"
        yield Text(f"as {fit.asked.setting.name}{tiles}, {format_seconds(advice.step_seconds)} a step{price}\n")
        yield memory_bar(advice.memory, advice.bound_bytes)
        yield Text()
        yield Tree(advice.memory, _DEPTH, _SMALLEST)
        yield Text()
        if not fit.remedies:
            yield Text(_no_remedy(fit))
            return
        yield _remedy_table(fit)
        yield Text()
        yield Text(
            "`autopar explain` with the options of this question and those under a change shows such a plan whole; a "
            f"name there takes the place of {self.target}. Where they leave something open, its search may find a "
            "faster plan.",
            style="dim",
        )


def _remedy_table(fit: Fit) -> Table:
    """A table of the changes, each with memory, step time, and the change of time and money for the same tokens."""
    title = "What else would fit" if fit.fits else "What would make it fit"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    names = ["change", "then", "memory", "step", "same tokens", *(["money"] if fit.prices else [])]
    for name in names:
        right = name not in ("change", "then")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for each in fit.remedies:
        cells = [
            format_bytes(each.memory_bytes),
            format_seconds(each.step_seconds),
            f"{100 * each.slower:+.1f} % time",
            "no price" if each.money is None else f"{each.money:.4g}",
        ]
        change = Text.assemble(each.what, "\n", (each.options, "dim"))
        table.add_row(change, Text(each.setting), *cells[: len(names) - 2])
    return table


def _no_remedy(fit: Fit) -> str:
    if fit.fits and fit.is_largest and fit.advice.cluster.hardware.kinds:
        return "A micro-batch has all sequences of a rank; fewer nodes of several kinds of machines are not tried."
    if fit.fits and fit.is_largest:
        return "A micro-batch has all sequences of a rank, and there is one node: nothing larger can be asked for."
    if fit.fits:
        return "No larger micro-batch fits, and no fewer nodes would do."
    return "No change of recipe, states, tokens, ranks or device of the catalogue makes it fit; take a smaller batch."
