"""The state of Python as lines of text: values that are the same everywhere, and numbers of the objects met."""

from __future__ import annotations

import enum
import types
from collections import deque
from typing import Any

from autopar.capture.guards.user_code import is_users_type
from autopar.capture.guards.values import MISSING, is_plain
from autopar.capture.stored.state_text import plain_text


class StateLines:
    """Lines of text, and the objects that are still to be described.

    Attributes:
        obstacle: why the state has no text; "" where it has one.
    """

    def __init__(self) -> None:
        self.obstacle = ""
        self._lines: list[str] = []
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # id of an object -> its place in `_objects`
        self._spaces: dict[int, int] = {}  # id of the dict of an object -> the object's number
        self._entries: set[tuple[int, Any]] = set()  # number of a holder, and a key of it
        self._unknown: set[int] = set()  # ids
        self._codes: dict[types.CodeType, str] = {}  # of functions that were met -> a hash
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._queue: deque[tuple[Any, bool]] = deque()
        self._bytes = 0

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _put(self, label: str, value: Any, *, hidden: bool = False) -> None:
        """Adds a line for a value, and the object itself to those that are to be described.

        Args:
            label: the line's beginning.
            value: the value.
            hidden: whether the value is read by code of torch or of the standard library, of which no guard tells.
        """
        if is_plain(value) or value is MISSING:
            self._lines.append(f"{label} {plain_text(value)}")
            self._kinds(value)
            return
        number = self._numbers.get(id(value))
        if number is None:
            number = self._register(value)
            self._queue.append((value, hidden))
        elif hidden and id(value) in self._unknown:
            self._refuse(f"a {type(value).__name__} is read by code that is not watched")
        self._lines.append(f"{label} #{number}")

    def _kinds(self, value: Any) -> None:
        """Adds the user's classes of a plain value and of its elements, and the attributes that such values have.

        Such a value is no object with a number, so that what is read of its own attributes has no address.
        """
        if isinstance(value, (tuple, frozenset)):
            for x in sorted(value, key=plain_text) if isinstance(value, frozenset) else value:
                self._kinds(x)
        if value is MISSING or not is_users_type(type(value)):
            return
        self._put("of", type(value))
        if not isinstance(value, enum.Enum):
            for name, x in getattr(value, "__dict__", {}).items():
                self._put(name, x, hidden=True)

    def _register(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self._objects)
        self._objects.append(value)
        return number

    def _entry(self, holder: Any, key: Any, value: Any, *, hidden: bool = False) -> None:
        """Adds a value that stands in an object, in its `__dict__`, or in a dict."""
        self._entries.add((self._numbers[id(holder)], key))
        self._put(str(key), value, hidden=hidden)
