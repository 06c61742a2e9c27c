"""Tables for a terminal: a cost as a tree, ways to run the model, what the step time hangs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar import units
from autopar.cost_model.breakdown import Breakdown, Candidate, pareto
from autopar.views.page import BatchRow

ROOMY = 110  # columns from which a table has a place for everything
CHOSEN, FRONT = "*", "+"


@dataclass(frozen=True)
class Tree:
    """A breakdown with its parts indented under it.

    Attributes:
        breakdown: to print.
        depth: levels below the whole.
        smallest: parts under this share of the whole are summed up in one line.
    """

    breakdown: Breakdown
    depth: int = 3
    smallest: float = 0.005

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        roomy = options.max_width >= ROOMY
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        rows = tuple(branches(self.breakdown, self.depth, self.smallest))
        longest = max(len(row.name) + 2 * row.depth for row in rows)
        table.add_column(min_width=min(longest, options.max_width // 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for row in rows:
            words = Text(row.name, style="bold" if row.depth == 0 else "", overflow="fold")
            name = Padding(words, (0, 0, 0, 2 * row.depth))
            bar = Text(("-" if options.ascii_only else "─") * round(24 * row.share), style="dim")
            note = Text(row.note, style="dim")
            values = (row.value, units.format_share(row.share, 1.0))
            table.add_row(name, *values, *((bar, note) if roomy else (note,)))
        yield table


@dataclass(frozen=True)
class Branch:
    """A line of a tree: `share` is of the whole, between 0 and 1."""

    depth: int
    name: str
    value: str
    share: float
    note: str


def branches(breakdown: Breakdown, depth: int, smallest: float) -> Iterator[Branch]:
    """The lines of a tree in reading order. Small parts are summed; if all are small, the line above is it."""
    yield from _branches(breakdown, breakdown.value, 0, depth, smallest)


def _branches(node: Breakdown, whole: float, depth: int, deepest: int, smallest: float) -> Iterator[Branch]:
    share = node.value / whole if whole else 0.0
    yield Branch(depth, node.name, units.format_as(node.unit, node.value), share, node.note)
    if depth == deepest:
        return
    small = tuple(part for part in node.parts if abs(part.value) < smallest * whole)
    large = tuple(part for part in node.parts if abs(part.value) >= smallest * whole)
    if len(small) == 1:
        large, small = node.parts, ()
    for part in large:
        yield from _branches(part, whole, depth + 1, deepest, smallest)
    if small and large:
        value = sum(part.value for part in small)
        text = units.format_as(node.unit, value)
        yield Branch(depth + 1, f"{len(small)} smaller ones", text, value / (whole or 1.0), "")


@dataclass(frozen=True)
class CandidateTable:
    """Ways to run the model, fastest first; where columns are few, the reasons stand under the names.

    Attributes:
        candidates: the ways.
        first: what the marked one is: "chosen", or "fastest" where nothing was chosen.
    """

    candidates: tuple[Candidate, ...]
    first: str = "chosen"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        roomy = options.max_width >= ROOMY
        title = f"Candidates  (* {self.first}, + no other is better in both time and memory)"
        table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("plan", overflow="fold")
        for name in ("time", "memory", "traffic"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("bound by", overflow="fold")
        if roomy:
            table.add_column("why not", overflow="fold")
        front = pareto(tuple(c for c in self.candidates if c.fits))
        for each in ranked(self.candidates):
            table.add_row(*_cells(each, each in front, roomy, self.first), style="bold" if each.chosen else "")
        yield table


def ranked(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates that fit before the others, each fastest first."""
    return tuple(sorted(candidates, key=lambda c: (not c.fits, c.step_seconds, c.memory_bytes)))


def marks(candidate: Candidate, on_front: bool) -> str:
    """`*` for the chosen one, `+` for one on the Pareto front."""
    return f"{CHOSEN if candidate.chosen else ''}{FRONT if on_front else ''}"


def verdict(candidate: Candidate, first: str = "chosen") -> str:
    """The reason why it is not the first one, in words; for the first one, what distinguishes it."""
    if candidate.chosen:
        return candidate.why_not or first
    return candidate.why_not or ("" if candidate.fits else "does not fit")


def _cells(candidate: Candidate, on_front: bool, roomy: bool, first: str) -> tuple[Text | str, ...]:
    name = Text(candidate.name)
    why = verdict(candidate, first)
    if not roomy and why:
        name.append(f"\n{why}", style="not bold dim")
    memory = units.format_bytes(candidate.memory_bytes) + ("" if candidate.fits else " !")
    cells = (
        marks(candidate, on_front),
        name,
        units.format_seconds(candidate.step_seconds),
        memory,
        units.format_bytes(candidate.traffic_bytes),
        Text(candidate.binds),
    )
    return (*cells, Text(why, style="not bold")) if roomy else cells


@dataclass(frozen=True)
class BatchTable:
    """Batches that were tried for a step, smallest first."""

    batches: tuple[BatchRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = "Batches  (* chosen, + fastest per sample, ^ largest in fewest micro-batches, ~ not searched)"
        table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in ("batch", "step", f"{throughput_of(self.batches[0])[0]} per second", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("plan", overflow="fold")
        for each in self.batches:
            cells = map(Text, batch_cells(each))
            table.add_row(*cells, style="bold" if each.is_chosen else "")
        yield table


def batch_cells(each: BatchRow) -> tuple[str, ...]:
    """The cells of a row: marks, batch, seconds, throughput, memory, plan."""
    held = {"*": each.is_chosen, "+": each.is_fastest, "^": each.is_largest, "~": not each.is_searched}
    marks = "".join(mark for mark, holds in held.items() if holds)
    return (
        marks,
        f"{each.batch:,}",
        units.format_seconds(each.step_seconds),
        f"{throughput_of(each)[1]:,.0f}",
        units.format_bytes(each.memory_bytes),
        each.plan,
    )


def throughput_of(each: BatchRow) -> tuple[str, float]:
    """The unit of the throughput, tokens or samples, and the number of them per second."""
    if each.tokens_per_second is None:
        return "samples", each.samples_per_second
    return "tokens", each.tokens_per_second


@dataclass(frozen=True)
class SensitivityTable:
    """The figures that the step time depends on, largest first: bars to the left are faster, to the right slower."""

    sensitivity: Mapping[str, float]
    smallest: float = 1e-5

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = "Step time when this grows by 1 %"
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        found = strongest(self.sensitivity, self.smallest)
        half = max(4, min(20, (options.max_width - 40) // 2))
        longest = max((abs(value) for _, value in found), default=1.0)
        for name, value in found:
            bar = _diverging(value / longest, half, ("-", "|") if options.ascii_only else ("━", "│"))
            table.add_row(Text(name), units.format_change(value), bar)
        yield table


def strongest(sensitivity: Mapping[str, float], smallest: float) -> tuple[tuple[str, float], ...]:
    """The names whose effect is at least `smallest`, largest effect first."""
    found = ((name, value) for name, value in sensitivity.items() if abs(value) >= smallest)
    return tuple(sorted(found, key=lambda pair: (-abs(pair[1]), pair[0])))


def _diverging(share: float, half: int, glyphs: tuple[str, str]) -> Text:
    """A bar from the middle of `2 * half` cells: to the left where `share` is negative."""
    stroke, middle = glyphs
    bar = stroke * round(abs(share) * half)
    if share < 0:
        return Text(bar.rjust(half) + middle, style="green")
    return Text(" " * half + middle + bar, style="red")
