"""Results of a long benchmark in a file that it adds to as they come, so that it can go on where it was ended."""

from __future__ import annotations

import json
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
