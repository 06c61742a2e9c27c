"""The examples of docs/training.md run, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_prints_what_it_says() -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("\n".join(blocks), {"__name__": "page"})
    shown = re.findall(r"^    (\d(?:\.\d+  | \d ).*)$", text, re.M)
    assert printed.getvalue().splitlines() == shown
    assert len(blocks) == 4
