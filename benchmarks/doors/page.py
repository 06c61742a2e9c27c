"""Writes the list of all options into docs/api.md: `python -m benchmarks.doors.page`."""

from __future__ import annotations

from pathlib import Path

from autopar.options import table
from autopar.runtime.execute.settings import RunOptions
from autopar.search.request.options import PlanOptions
from benchmarks.tables import between_marks

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- options: written by python -m benchmarks.doors.page -->", "<!-- end of options -->"


def page() -> str:
    """The page as its text in Markdown."""
    lines = ["### Of a plan", "", table(PlanOptions), "", "### Of a run", "", table(RunOptions)]
    return between_marks(PAGE.read_text(), BEGIN, END, lines)


if __name__ == "__main__":
    PAGE.write_text(page())
