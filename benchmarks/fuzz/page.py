"""The page of results, of which each benchmark here writes its own part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def replace_part(page: Path, title: str, lines: Sequence[str], command: str) -> None:
    """Writes a part of the page, in place of the one with this title."""
    parts = page.read_text().split("\n## ") if page.exists() else ["# Bad inputs\n"]
    own = "\n".join([title, "", f"By `{command}`:", "", *lines, ""])
    kept = [part for part in parts if part.partition("\n")[0] != title]
    page.write_text("\n## ".join([*kept, own]))
