"""Bars as text in, text out, without colour."""

import sympy

from autopar.cost_model.breakdown import Breakdown
from autopar.explanation.report import as_text
from autopar.views import memory_bar, time_bar
from autopar.views.bars import StackedBar
from autopar.views.palette import PALETTE
from tests.views import sample


def cost(unit: str, **parts: float) -> Breakdown:
    zero = sympy.Integer(0)
    found = tuple(Breakdown(name.replace("_", " "), unit, zero, v) for name, v in parts.items())
    return Breakdown("all", unit, zero, sum(parts.values()), found)


def lines(renderable, width: int = 40) -> list[str]:
    return [line.rstrip() for line in as_text(renderable, width=width).splitlines()]


def test_memory_under_its_bound():
    memory = cost("bytes", parameters=20e9, gradients=10e9, saved=30e9)
    assert lines(memory_bar(memory, 80e9)) == [
        "Memory of a rank  60.0 GB of 80.0 GB,",
        "20.0 GB free",
        "██████████▒▒▒▒▒▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓·········┃",
        "██  parameters  20.0 GB  33.3 %",
        "▒▒  gradients   10.0 GB  16.7 %",
        "▓▓  saved       30.0 GB  50.0 %",
    ]


def test_memory_over_its_bound():
    memory = cost("bytes", parameters=60e9, saved=40e9)
    found = lines(memory_bar(memory, 80e9), 60)
    assert found[0] == "Memory of a rank  100 GB of 80.0 GB, 20.0 GB TOO MUCH"
    assert found[1] == "█" * 36 + "▒" * 12 + "┃" + "▒" * 11  # the bound is 4/5 of the way


def test_time_of_which_something_is_hidden():
    time = cost("seconds", compute=3.0, along_dp=2.0, hidden_behind_compute=-1.0)
    assert lines(time_bar(time, ["dp"]), 80) == [
        "Time of a step  4.00 s, up to the line; the 1.00 s beyond it are hidden",
        "█" * 48 + "▒" * 16 + "┃" + "▒" * 15,
        "██  compute                 3.00 s   75.0 %",
        "▒▒  along dp                2.00 s   50.0 %",
        "    hidden behind compute  -1.00 s  -25.0 %",
    ]


def test_nothing_at_all():
    assert lines(memory_bar(cost("bytes"), 80e9))[-1].split() == ["██", "all", "0", "bytes", "0.0", "%"]


def test_cells_add_up_at_every_width():
    parts = tuple((value, colour) for value, colour in zip((1, 1, 1, 0.01, 7), PALETTE, strict=False))
    for width in range(1, 200):
        assert len(lines(StackedBar(parts), width)[0]) == width


def test_ascii_only():
    bar = StackedBar(((1.0, PALETTE[0]), (1.0, PALETTE[1])), 4.0)
    cells = "".join(glyph for glyph, _ in bar._cells(20, True))
    assert cells == "#####=====.........|"


def test_every_kind_and_every_line_fits():
    for width in (80, 120, 140):
        text = as_text(memory_bar(sample.memory(), 80e9), width=width)
        assert all(len(line) <= width for line in text.splitlines())
        assert all(part.name in text for part in sample.memory().parts)
