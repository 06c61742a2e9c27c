"""What is said of captures that a changed Python value has caused."""

from __future__ import annotations

import logging
from collections import defaultdict

from autopar.capture.guards import ChangedValue
from autopar.runtime.together import warn_together

log = logging.getLogger("autopar")

_OFTEN = 3  # captures for one value: it changes as training goes on


class Recaptures:
    """Counts captures by the value that caused them, and warns once of one that changes again and again."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def count(self, difference: ChangedValue, seconds: float) -> None:
        """Notes one more capture, which has taken so many seconds."""
        taken = self._seconds[difference.words]
        taken.append(seconds)
        log.info("Captured again in %.1f s, as %s.", seconds, difference)
        if len(taken) == _OFTEN:
            warn_together(
                f"{difference.words}, read in {difference.line}, has changed {len(taken)} times, and for each value "
                f"the model was captured again ({sum(taken):.1f} s so far). Keep a number that changes in a buffer "
                "(register_buffer, and fill_ between steps) or give it as an input: one program then serves all "
                "values.",
                stacklevel=6,
            )
