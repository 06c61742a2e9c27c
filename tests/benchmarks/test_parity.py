"""The table of random plans with stages is made from the rows of that without."""

from __future__ import annotations

import itertools

from autopar.ir import Mesh
from benchmarks.parity.parity import COLUMNS, markdown
from benchmarks.parity.parity import measure as measure_whole
from benchmarks.parity.pipeline_parity import MESHES, measure


def test_plans_with_stages_make_a_row() -> None:
    row, schedules = measure("convnext", 1, itertools.count())
    assert len(row.cells) == len(COLUMNS) and len(schedules) == len(MESHES)
    assert row.cells[2:4] == ("5 of 5", "0")


def test_plans_of_other_seeds_make_a_row_and_the_page_names_them() -> None:
    row = measure_whole("convnext", [Mesh.parse("a=2")], range(7, 9), None, 0.0)
    assert row.cells[2] == "2 of 2"
    assert "--seeds 2 --first 7 --meshes 'a=2'" in markdown([row], range(7, 9), "a=2", "", 0.0)
