"""The table of random plans with stages is made from the rows of that without."""

from __future__ import annotations

import itertools

from benchmarks.parity.parity import COLUMNS
from benchmarks.parity.pipeline_parity import MESHES, measure


def test_plans_with_stages_make_a_row() -> None:
    row, schedules = measure("convnext", 1, itertools.count())
    assert len(row.cells) == len(COLUMNS) and len(schedules) == len(MESHES)
    assert row.cells[2:4] == ("5 of 5", "0")
