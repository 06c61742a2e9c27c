import pytest
import sympy
from rich.console import Group
from rich.text import Text

from autopar.cost_model.breakdown import Breakdown, Candidate
from autopar.explanation.report import as_text
from autopar.views import CandidateTable, SensitivityTable, Tree, memory_bar, time_bar
from autopar.views.bars import headline
from tests.views import sample

ZERO = sympy.Integer(0)


def leaf(name: str, value: float, *parts: Breakdown, note: str = "") -> Breakdown:
    return Breakdown(name, "seconds", ZERO, value, parts, note)


def lines(renderable, width: int = 80) -> list[str]:
    return [line.rstrip() for line in as_text(renderable, width=width).splitlines()]


def test_a_tree_sums_up_what_is_small():
    small = [leaf(f"op {i}", 0.001) for i in range(3)]
    tree = leaf("time", 1.003, leaf("compute", 0.9), leaf("along tp", 0.1, note="exposed"), *small)
    assert lines(Tree(tree)) == [
        "time               1.00 s  100.0 %",
        "  compute          900 ms   89.7 %",
        "  along tp         100 ms   10.0 %  exposed",
        "  3 smaller ones  3.00 ms    0.3 %",
    ]


def test_a_tree_keeps_a_single_small_part_and_what_is_negative():
    tree = leaf("time", 1.0, leaf("compute", 1.4), leaf("fixed", 0.001), leaf("hidden", -0.401))
    names = [line.split("  ")[1] for line in lines(Tree(tree))[1:]]
    assert names == ["compute", "fixed", "hidden"]


def test_a_tree_stops_at_its_depth():
    deep = leaf("a", 1.0, leaf("b", 1.0, leaf("c", 1.0)))
    assert [line.split()[0] for line in lines(Tree(deep, depth=1))] == ["a", "b"]


def test_long_names_wrap_under_themselves():
    tree = leaf("time", 1.0, leaf("aten." + "very_" * 12 + "long", 1.0))
    wrapped = [line for line in lines(Tree(tree), 60) if "very" in line]
    assert len(wrapped) > 1 and all(line.startswith("  ") for line in wrapped)


CANDIDATES = (
    Candidate("slow", 3.0, 20e9, 1e9, "tp", True, why_not="twice as slow"),
    Candidate("large", 1.0, 90e9, 1e9, "compute", False),
    Candidate("good", 1.5, 40e9, 1e9, "compute", True, chosen=True),
    Candidate("worse", 2.0, 50e9, 1e9, "compute", True, why_not="larger and slower"),
)


def test_candidates_are_ranked_and_marked():
    found = [line.split("│") for line in lines(CandidateTable(CANDIDATES), 120)[3:]]
    assert [[row[0].strip(), row[1].strip(), row[-1].strip()] for row in found] == [
        ["*+", "good", "chosen"],
        ["", "worse", "larger and slower"],
        ["+", "slow", "twice as slow"],
        ["", "large", "does not fit"],
    ]


def test_where_nothing_was_chosen_the_first_is_the_fastest():
    found = lines(CandidateTable(CANDIDATES, "fastest"), 120)
    assert found[0].startswith("Candidates  (* fastest, ") and found[3].split()[-1] == "fastest"


def test_reasons_stand_below_where_columns_are_few():
    text = as_text(CandidateTable(CANDIDATES), width=80)
    assert "why not" not in text and "twice as slow" in text and "90.0 GB !" in text


def test_sensitivity_points_left_and_right():
    found = lines(SensitivityTable({"small": 1e-7, "peak_flops": -0.008, "batch": 0.016}))[1:]
    assert found == [
        "batch       +1.600 %                      │" + "━" * 20,
        "peak_flops  -0.800 %            " + "━" * 10 + "│",
    ]


def report(page):
    return Group(
        headline(page),
        memory_bar(page.memory, page.memory_bound_bytes),
        time_bar(page.time, page.axes),
        *(Tree(breakdown) for breakdown in (page.time, page.memory, page.traffic)),
        CandidateTable(page.candidates),
        SensitivityTable(page.sensitivity),
        *(Text(f"- {note}") for note in page.notes),
    )


@pytest.mark.parametrize("width", [80, 120, 140])
def test_a_whole_page(width):
    page = sample.page()
    text = as_text(report(page), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for words in (page.title, "42.6 GB free", "saved activations", "1.34 GB", "2.69 s", "+0.940 %"):
        assert words in text
    assert all(note.split(";")[0] in text for note in page.notes)


def test_names_are_not_markup():
    page = sample.page(title="[bold]x[/bold]", notes=("[red]careful[/red]",))
    text = as_text(report(page))
    assert "[bold]x[/bold]" in text and "[red]careful[/red]" in text
