"""Guards: the Python values that a captured program was made from, and whether they still are the same.

A capture runs the Python of a model once. Whatever it reads there that is not a parameter, buffer or input
(`model.beta`, a list that the loss reads, `drop.p`) is built into the program; `Guards.broken` says before
a step which of them is another value by now. Values in dicts, such as the attributes of modules, are looked at only
where their dict was written (`autopar.capture.guards.dict_versions`). The other checks are compiled into one function
of the form

    x is v0 and y is v1 and ...

so that a value that did not change costs some nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CellType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.capture.guards.closures import content_of
from autopar.capture.guards.dict_versions import Unwritten
from autopar.capture.guards.values import (
    MISSING,
    MUTABLE,
    SeenContainer,
    SeenTensor,
    in_words,
    is_number_like,
    is_same,
    seen,
)

_CHECKS_PER_PART = 500
CALL = "()"  # the key of what a function returns


@dataclass(frozen=True, eq=False)
class Place:
    """Where a Python value stands.

    Attributes:
        holder: a dict, the cell of a closure, an object of which it is an attribute, or a function that returns it.
        key: its key in the dict or its name as an attribute; None for a cell, CALL for what a function returns.
        words: its name for people.
        line: the line that read it, `file:line`.
    """

    holder: Any
    key: Any
    words: str
    line: str

    @property
    def identity(self) -> tuple[int, Any]:
        """A key that no other place has while the holder lives."""
        return id(self.holder), self.key

    def get(self) -> Any:
        """The value at this place now; MISSING if there is none."""
        if isinstance(self.holder, CellType):
            return content_of(self.holder)
        if self.key is CALL:
            return self.holder()
        if isinstance(self.holder, (dict, MappingProxyType)):
            return self.holder.get(self.key, MISSING)
        return getattr(self.holder, self.key, MISSING)

    @property
    def can_be_set(self) -> bool:
        """Whether `put` can replace the value here and later restore it.

        It cannot where an object reads an attribute of its class: setting it would create a second attribute, in the
        object, which hides the class's.
        """
        if isinstance(self.holder, (dict, CellType)):
            return True
        return (
            self.key is not CALL
            and self.key in getattr(self.holder, "__dict__", ())
            and not isinstance(self.holder, type)
        )

    def put(self, value: Any) -> None:
        """Sets the value at this place; MISSING removes it. The result of a function cannot be set and stays."""
        if self.key is CALL:
            return
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict) and value is MISSING:
            self.holder.pop(self.key, None)
        elif isinstance(self.holder, dict):
            self.holder[self.key] = value
        elif not isinstance(self.holder, MappingProxyType):
            setattr(self.holder, self.key, value)


@dataclass(frozen=True)
class ChangedValue:
    """A value that is another than a capture has read, in words.

    Attributes:
        words: its name.
        line: the line that read it.
        before: the value that was read.
        now: the value that stands there now.
    """

    words: str
    line: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.words} was {self.before} and is {self.now} (read in {self.line})"


@dataclass(frozen=True, eq=False)
class Guard:
    """A value that a capture has read.

    Attributes:
        place: where it stands.
        before: the value as `autopar.capture.guards.values.seen` notes it, MISSING for none.
    """

    place: Place
    before: Any

    def holds(self) -> bool:
        return is_same(self.place.get(), self.before)

    @property
    def is_in_dict(self) -> bool:
        """Whether the value stays the same for as long as nothing is written into a dict.

        A subclass of dict may have a `get` of its own, which returns what the dict does not hold.
        """
        changes_inside = (SeenContainer, SeenTensor, np.ndarray, *MUTABLE)
        return type(self.place.holder) is dict and not isinstance(self.before, changes_inside)

    def difference(self) -> ChangedValue:
        """The change of the value, in words."""
        before, now = in_words(self.before), in_words(self.place.get())
        return ChangedValue(self.place.words, self.place.line, before, now)

    def source(self, number: int) -> str:
        """The check as an expression of the names `h` and `v` with this number."""
        key = repr(self.place.key)
        if self.place.key is CALL:
            return f"is_same(h{number}(), v{number})"
        is_plain = type(self.place.holder) in (dict, MappingProxyType)
        if is_plain and self.before is MISSING:
            return f"{key} not in h{number}"
        if is_plain:
            value = f"h{number}[{key}]"
        elif isinstance(self.place.holder, dict):
            value = f"h{number}.get({key}, MISSING)"
        elif isinstance(self.place.holder, CellType):
            value = f"h{number}.cell_contents"
        else:
            value = f"getattr(h{number}, {key}, MISSING)"
        if isinstance(self.before, (SeenContainer, *MUTABLE)):
            return f"is_same({value}, v{number})"
        if isinstance(self.before, SeenTensor):
            return f"({value} is v{number}.tensor and is_same({value}, v{number}))"
        return f"({value} is v{number} or is_same({value}, v{number}))"


@dataclass(eq=False)
class NumberInput:
    """A number that a program reads before every run: a float, an int, or a tensor without dims.

    Attributes:
        place: where the number stands.
        tensor: the constant of the program that takes its value, of shape `()`: in float64 for a number of Python, else
            in the tensor's own dtype.
        taken: the number whose value it has, as `autopar.capture.guards.values.seen` notes it.
    """

    place: Place
    tensor: Tensor
    taken: Any

    def holds(self) -> bool:
        """Whether a number of this kind still stands there."""
        return is_number_like(self.place.get(), self.taken)

    def gone(self) -> ChangedValue:
        """The change from a number to a value of another kind, in words."""
        before, now = str(self.tensor.item()), in_words(self.place.get())
        return ChangedValue(self.place.words, self.place.line, before, now)

    def has_changed(self) -> bool:
        """Whether the number is another one than the program's, or a tensor that was written since."""
        return not is_same(self.place.get(), self.taken)

    def take(self) -> None:
        """Gives the program the number's value."""
        value = self.place.get()
        with torch.no_grad():
            self.tensor.copy_(value) if isinstance(value, Tensor) else self.tensor.fill_(value)
        self.taken = seen(value)


class Guards:
    """The values that must not change for a captured program to compute what the user's Python would compute.

    Args:
        guards: one for every value that was read.
    """

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        self._guards = tuple(guards)

    def __len__(self) -> int:
        return len(self._guards)

    def __iter__(self) -> Iterator[Guard]:
        return iter(self._guards)

    @cached_property
    def _in_dicts(self) -> Unwritten[Guard]:
        checks = [(guard.place.holder, guard) for guard in self._guards if guard.is_in_dict]
        return Unwritten(checks, _compiled)

    @cached_property
    def _others(self) -> Callable[[], bool]:
        return _compiled([guard for guard in self._guards if not guard.is_in_dict])

    def __contains__(self, place: Place) -> bool:
        return place.identity in self._keys

    @cached_property
    def _keys(self) -> frozenset[tuple[int, Any]]:
        return frozenset(guard.place.identity for guard in self._guards)

    def without(self, places: Iterable[Place]) -> Guards:
        """The guards of all other places."""
        left = {place.identity for place in places}
        return Guards(g for g in self._guards if g.place.identity not in left)

    def changed_numbers(self) -> list[Place]:
        """Where a number stood, and another one of its kind stands now, that a tensor can take the place of."""
        settable = (g for g in self._guards if g.place.can_be_set)
        return [
            g.place for g in settable if is_number_like(now := g.place.get(), g.before) and not is_same(now, g.before)
        ]

    def hold(self) -> bool:
        """Whether every value is unchanged."""
        try:
            return self._in_dicts.hold() and self._others()
        except (KeyError, ValueError, RuntimeError):  # a value is missing by now
            return False

    def broken(self) -> ChangedValue | None:
        """The first difference, None where there is none."""
        if self.hold():
            return None
        return next((g.difference() for g in self._guards if not g.holds()), None)


def _compiled(guards: Sequence[Guard]) -> Callable[[], bool]:
    """One function of all checks; what it compares are the globals of its parts."""
    size = _CHECKS_PER_PART
    parts = [_part(guards[i : i + size]) for i in range(0, len(guards), size)]
    return lambda: all(part() for part in parts)


def _part(guards: Sequence[Guard]) -> Callable[[], bool]:
    names: dict[str, Any] = {"is_same": is_same, "MISSING": MISSING}
    for i, guard in enumerate(guards):
        names[f"h{i}"], names[f"v{i}"] = guard.place.holder, guard.before
    lines = [f"    if not {guard.source(i)}: return False\n" for i, guard in enumerate(guards)]
    exec("".join(["def check():\n", *lines, "    return True\n"]), names)
    found: Callable[[], bool] = names["check"]
    return found
