"""Tables of results as markdown, and the words that they have for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.explanation.explanation import Explanation


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int | None = None
) -> list[str]:
    """The lines of a markdown table.

    Args:
        heads: the title of every column.
        rows: the cells of every row.
        text_columns: number of first columns that are aligned left; the others are aligned right. None aligns
            no column.

    >>> markdown_table(("name", "s"), [("a", "1.5")], text_columns=1)
    ['| name | s |', '|---|---:|', '| a | 1.5 |']
    """
    left = len(heads) if text_columns is None else text_columns
    rule = "|" + "---|" * left + "---:|" * (len(heads) - left)
    return [_line(heads), rule, *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def between_marks(text: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The text of a page with these lines in place of what stands between two marks.

    >>> between_marks("a [ old ] b", "[", "]", ["new"])
    'a [\\n\\nnew\\n\\n] b'
    """
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + "\n".join([begin, "", *lines, "", end]) + after


def plan_words(found: Explanation) -> str:
    """A plan in a line: mesh, recipe, schedule, micro-batches and recomputation."""
    plan, pipeline = found.plan, found.plan.pipeline
    stages = f"{pipeline.schedule} x {pipeline.chunks}" if pipeline else "no stages"
    again = plan.recompute if isinstance(plan.recompute, (str, int)) else "by op"
    return f"{plan.mesh} {plan.recipe}, {stages}, {plan.micro_batches} micro-batches, recompute {again}"
