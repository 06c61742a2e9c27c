"""Copies of the repository, in which benchmarks of the suite change the product."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copied(folder: Path) -> Path:
    """Copies the repository to `folder`, without what was built or installed; returns the folder."""
    ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs", "build", ".mypy_cache")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    return folder
