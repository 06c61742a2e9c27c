"""All odd scripts by name, and their runs on ranks; benchmarks/parity/odd_scripts.py gives them to both doors."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tests.support.odd.odd_caches import CACHES
from tests.support.odd.odd_kinds import KINDS
from tests.support.odd.odd_objects import OBJECTS
from tests.support.odd.odd_reads import READS
from tests.support.odd.odd_writes import HOOKS, WRITES
from tests.support.scripts import DOORS, outcome

SCRIPTS = {**KINDS, **READS, **WRITES, **HOOKS, **OBJECTS, **CACHES}
_TOLERANCE = 1e-9  # relative, of float64 losses that two ranks add up in another order


@dataclass(frozen=True)
class Verdict:
    """The end of a script at a door, on one rank.

    Attributes:
        name: name of the script, and of the door.
        word: "equal", "refused" with a line of the user's, "refused without a line", or "differs".
        text: the error's message, or both outcomes where they differ.
    """

    name: str
    word: str
    text: str = ""


def verdict(name: str, door: str) -> Verdict:
    """Runs a script plainly and at a door, split over all ranks of the process group."""
    script, options = SCRIPTS[name], {"mesh": {"dp": dist.get_world_size()}, "recipe": "ddp"}
    label = f"{name}, {door}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(script)
        try:
            found = outcome(script, DOORS[door], options)
        except Exception as error:
            has_line = re.search(r'odd_\w+\.py(:|", line )\d+', str(error))
            word = "refused" if has_line else "refused without a line"
            return Verdict(label, word, f"{type(error).__name__}: {error}")
    if _is_close(found, expected):
        return Verdict(label, "equal")
    return Verdict(label, "differs", f"{found}, and plainly {expected}")


def _is_close(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_is_close, found, expected))
    if isinstance(expected, float):
        return abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected))
    return bool(found == expected)
