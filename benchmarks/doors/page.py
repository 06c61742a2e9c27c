"""Writes docs/options.md, the list of all options: `python -m benchmarks.doors.page`."""

from __future__ import annotations

from pathlib import Path

from autopar.options import table
from autopar.runtime.execute.settings import RunOptions
from autopar.search.request.options import PlanOptions

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def page() -> str:
    """The page as its text in Markdown."""
    return f"""# Options

`autopar.compile(model, **options)` takes all of them by name, `autopar.explain` those of a plan, and the commands
`explain`, `fit` and `compare` their flags. `help(autopar.compile)` prints the same list.

## Of a plan

{table(PlanOptions)}

## Of a run

{table(RunOptions)}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
