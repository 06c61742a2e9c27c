"""Every autopar command that README.md and the pages show is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.models.adapted import SUFFIX
from autopar.models.presets import PRESETS

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(?: {4})?(?:\$ )?(autopar (?:explain|fit|compare|diff|verify|calibrate|run) [^\n|]*)$", re.M)


def _commands() -> list[tuple[str, str]]:
    """Pairs of a page and a command on it, without comments and redirections."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (page.name, re.split(r"\s+[>#]", line)[0])
        for page in pages
        for line in LINE.findall(page.read_text())
        if "..." not in line
    ]


@pytest.mark.parametrize(("page", "command"), _commands())
def test_a_command_of_a_page_is_understood(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    _, name, *arguments = shlex.split(command)
    found = main.commands[name]
    context = found.make_context(name, arguments)
    target = context.params.get("target")
    known = target is None or ":" in target or "config.json" in target or target.removesuffix(SUFFIX) in PRESETS
    assert known, f"{page}: {target} is not a preset"


def test_the_commands_of_the_readme_are_among_them() -> None:
    names = {command.split()[1] for page, command in _commands() if page == "README.md"}
    assert names == {"explain", "fit", "compare", "verify"}
