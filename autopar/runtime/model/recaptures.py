"""Captures that a changed Python value has caused: their warnings, and the numbers that become inputs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from autopar.capture.guards.guards import ChangedValue, Guards, NumberInput, Place
from autopar.errors import StepError
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.comparison import Comparison

log = logging.getLogger("autopar")

_OFTEN = 3  # captures for one value: it changes as training goes on


class Recaptures:
    """Counts captures by the value that caused them, and warns once of one that changes again and again.

    Args:
        comparison: gathers the numbers of all ranks.

    Attributes:
        numbers: places of numbers that have changed, and may become inputs of the next capture.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.numbers: list[Place] = []
        self._built_in: list[Place] = []  # numbers that a tensor cannot replace

    def learn(self, guards: Guards) -> None:
        """Notes the numbers that have changed since a capture."""
        known = {place.identity for place in (*self.numbers, *self._built_in)}
        self.numbers += [p for p in guards.changed_numbers() if p.identity not in known]

    def settle(self, guards: Guards) -> None:
        """After a capture: notes the numbers that it has built in, which are not tried again."""
        self._built_in += [place for place in self.numbers if place in guards]
        self.numbers = [place for place in self.numbers if place not in guards]

    def take(self, inputs: Sequence[NumberInput], *, is_step: bool) -> None:
        """Gives a program the numbers that Python has changed.

        Raises StepError if the ranks of a step have different ones. A single rank may run a forward by itself.
        """
        changed = [number for number in inputs if number.has_changed()]
        if changed and is_step:
            self.compare([number.place for number in changed], "Numbers of Python have changed.")
        for number in changed:
            number.take()

    def compare(self, places: Sequence[Place], why: str) -> None:
        """Compares numbers with the other ranks. Raises StepError if they have others at the same places."""
        own = ", ".join(dict.fromkeys(f"{place.words} = {_value(place)!r}" for place in places))
        remedy = "Set the same Python values on every rank, before the same step."
        found = self._comparison.gather(own, f"{why} {own}".strip(), remedy, "numbers")
        if len(set(found)) > 1:
            raise StepError(
                f"Python values of the model differ between ranks: {'; '.join(dict.fromkeys(found))}. Set the same "
                "values on every rank."
            )

    def count(self, difference: ChangedValue, seconds: float) -> None:
        """Notes one more capture and its duration; warns if captures for this value are many."""
        taken = self._seconds[difference.words]
        taken.append(seconds)
        log.info("Captured again in %.1f s, as %s.", seconds, difference)
        if len(taken) == _OFTEN:
            warn_together(
                f"{difference.words}, read in {difference.line}, has changed {len(taken)} times, and for each value "
                f"the model was captured again ({sum(taken):.1f} s so far). One program serves all values "
                "of a number, or tensor without dims, on which only arithmetic depends, of a buffer (register_buffer, "
                "and fill_ between steps) and of an input.",
                stacklevel=6,
            )


def _value(place: Place) -> object:
    """The number at a place as Python has it."""
    value = place.get()
    return value.item() if isinstance(value, Tensor) else value
