"""Chromium or Chrome for tests that look at pages as a reader sees them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
REASON = f"no browser: none of {', '.join(NAMES)}"


def dumping(profile: Path, address: str, *options: str) -> list[str]:
    """The command that prints the document of a page after its scripts have run.

    Args:
        profile: a folder for the browser's own files.
        address: the page.
        options: further options of the browser.
    """
    assert BROWSER is not None, REASON
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return [
        BROWSER,
        "--headless",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={profile}",
        *root,
        *options,
        "--dump-dom",
        address,
    ]
