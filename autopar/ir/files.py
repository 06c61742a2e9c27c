"""Text files that are written whole or not at all, whoever writes or reads them at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(text: str, path: Path) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one. Raises OSError."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.stem}-", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # that of temporary files is for their owner alone
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
