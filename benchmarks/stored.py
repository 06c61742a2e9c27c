"""Results of a long benchmark in a file that it adds to as they come, so that it can go on where it was ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """A dataclass of plain values with a name that tells it from the others."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def stored(results: Path, kind: type[T]) -> dict[str, T]:
    """The results of a file by their names; none where there is no file."""
    if not results.exists():
        return {}
    values: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    return {value["name"]: kind(**value) for value in values}


def store(results: Path, value: Any) -> None:
    """Adds a result to the file, which is made where there is none."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(asdict(value)) + "\n")


def write_whole(value: Any, path: Path) -> None:
    """Writes a value as JSON in one move, so that a process ended while it writes leaves what stood there before."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.replace(path)


def code_version(*folders: str, but: Callable[[Path], bool] = lambda path: False, also: str = "") -> str:
    """A hash of Python code, so that results of other code are told apart.

    Args:
        folders: folders of the repository whose modules count.
        but: whether a module does not count.
        also: text that counts too, such as the versions of packages.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(p for name in folders for p in (root / name).rglob("*.py")):
        if not but(path):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    digest.update(also.encode())
    return digest.hexdigest()[:12]
