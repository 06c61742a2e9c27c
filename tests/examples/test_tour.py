"""The tour of docs/tour.py runs, and shows what its reader can work out by hand."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.py"


@pytest.fixture(scope="module")
def printed() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(TOUR), run_name="__main__")
    return text.getvalue()


def test_it_fits_on_three_screens() -> None:
    assert len(TOUR.read_text().splitlines()) <= 150


def test_the_first_layer_is_split_by_columns_and_the_second_by_rows(printed: str) -> None:
    lines = [line.split() for line in printed.splitlines()]
    assert ["parameter", "up.weight", "at", "rest", "S(0)@tp", "in", "use", "V@dp", "S(0)@tp"] in lines
    assert ["parameter", "down.weight", "at", "rest", "S(1)@tp", "in", "use", "V@dp", "S(1)@tp"] in lines


def test_the_partial_sums_of_the_second_layer_are_added_up(printed: str) -> None:
    program = printed.partition("5. Program")[2].partition("6. Step")[0].split("\n")
    names = [line.split()[0] for line in program[1:] if line.strip()]
    assert names[names.index("linear_1") + 1] == "all_reduce"


def test_all_ranks_agree_with_one_device(printed: str) -> None:
    assert "PASSED: dp=2,tp=2" in printed.partition("6. Step")[2]


def test_the_terms_of_the_price_add_up(printed: str) -> None:
    price = printed.partition("4. Price")[2].partition("5. Program")[0].splitlines()
    whole = float(next(line for line in price if "a step takes" in line).split()[3])
    parts = [float(line.split()[0]) for line in price if " µs  " in line]
    assert len(parts) >= 3 and abs(sum(parts) - whole) <= 0.05 * (len(parts) + 1)
