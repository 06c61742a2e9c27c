"""Checks of what dicts hold, repeated only where a dict was written.

The attributes of a module are a dict, and so are its tables of parameters and submodules. Few of them are written
between two steps, so that their versions (`autopar._torch.DictVersions`) are compared in place of what they hold. A
dict that was written since it was last found right is checked entry by entry. A dict that was written before each of
two checks in a row, say one with a counter, is checked every time from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from autopar import _torch


class Check(Protocol):
    """Something that can be asked whether it still is as it was."""

    def holds(self) -> bool: ...


C = TypeVar("C", bound=Check)


def each_holds(checks: Sequence[Check]) -> Callable[[], bool]:
    """One function that makes all checks."""
    return lambda: all(check.holds() for check in checks)


class Unwritten(Generic[C]):
    """Checks of dicts.

    Args:
        checks: pairs of a dict and a check whose outcome depends on the objects in the dict alone, not on what changes
            inside them.
        together: makes one function of many checks, for those that are made every time.
    """

    def __init__(
        self,
        checks: Iterable[tuple[dict[Any, Any], C]],
        together: Callable[[Sequence[C]], Callable[[], bool]] = each_holds,
    ) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._checks: dict[int, list[C]] = {}
        for holder, check in checks:
            self._dicts[id(holder)] = holder
            self._checks.setdefault(id(holder), []).append(check)
        self._together = together
        self._often: list[C] = []  # checks of dicts that are written all the time
        self._often_hold = together(self._often)
        self._ids = list(self._dicts)
        self._versions: _torch.DictVersions | None = None  # none before the first check
        self._written: set[int] = set()  # before the last check
        self._failed: C | None = None

    def hold(self) -> bool:
        """Whether every check holds. What a check raises goes through."""
        if self._versions is not None and self._versions.hold():
            self._written = set()
        elif not self._look():
            return False
        return self._often_hold()

    def _look(self) -> bool:
        """Makes the checks of the dicts that were written; if they hold, takes the new versions."""
        if self._failed is not None and not self._failed.holds():
            return False
        # The versions are taken before the look, so that a write by another thread meanwhile is not missed.
        versions = _torch.DictVersions([self._dicts[each] for each in self._ids])
        found = self._ids
        if self._versions is not None:
            found = [self._ids[i] for i in versions.written(self._versions)]
        checks = (check for each in found for check in self._checks[each])
        self._failed = next((check for check in checks if not check.holds()), None)
        if self._failed is not None:
            return False
        again = self._written.intersection(found)
        self._written = set(found) if self._versions is not None else set()
        self._versions = versions
        if again:
            self._check_often(again)
        return True

    def _check_often(self, written: set[int]) -> None:
        """Has the checks of some dicts made every time; the others are looked at once more for new versions."""
        self._often += [check for each in self._ids if each in written for check in self._checks[each]]
        self._often_hold = self._together(self._often)
        self._ids = [each for each in self._ids if each not in written]
        self._versions = None
