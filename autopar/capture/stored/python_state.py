"""All that the Python of a model could read while it is captured, as text that is the same in every process.

A capture may be used at a later start of a script if nothing that it was made from is different there. `PythonState`
goes through everything in reach of the model, its loss and its arguments: attributes, containers, closures, the code of
functions and classes, the globals that the code names. Equal digests mean equal code and values. As objects are
numbered in the order in which they are met, the number of an object in one process is its number in any other one.

Not everything has a text: a lock, a logger or a compiled function has none. Such an object is *unknown*. That does no
harm as long as nothing reads it, which the guards of a capture show afterwards (`address`). Where they could not show
it, `obstacle` says that the state as a whole is not known.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import has_storage, storage_key
from autopar.capture.guards.guards import Place
from autopar.capture.guards.values import MISSING, MUTABLE, elements
from autopar.capture.stored.state_objects import StateOfObjects
from autopar.capture.stored.state_text import belongs_to_torch, is_others

_MOST_OBJECTS = 200_000
_BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)


class NoText(Exception):
    """Something of a capture cannot be written as text; says what."""


class PythonState(StateOfObjects):
    """What the Python of a model could read now.

    Args:
        roots: a name for each object from which all others are reached.

    Attributes:
        obstacle: why the state has no text; "" where it has one.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        super().__init__()
        for space in (torch, nn.functional, Tensor):
            self._names(space)
        for name, value in roots.items():
            # autopar calls them: no code that is watched has read them
            self._put(name, value, hidden=True)
        while self._queue and not self.obstacle:
            self._describe(*self._queue.popleft())
            if len(self._objects) > _MOST_OBJECTS:
                self._refuse(f"there are more than {_MOST_OBJECTS:,} objects in the model's reach")

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the state."""
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def address(self, place: Place) -> tuple[int, bool]:
        """The place's holder as a number, and whether it is the `__dict__` of the object that has the number.

        Raises NoText where the value at this place is no part of the state.
        """
        inner = id(gc.get_referents(place.holder)[0]) if isinstance(place.holder, types.MappingProxyType) else 0
        is_space = id(place.holder) in self._spaces or inner in self._spaces
        number = self._spaces.get(inner or id(place.holder))
        number = self._numbers.get(id(place.holder)) if number is None else number
        if number is None or not self._is_known(number, place, is_space):
            raise NoText(f"{place.words} ({place.line}) can be another one at every start")
        return number, is_space

    def holder(self, number: int, is_space: bool) -> Any:
        """The holder of a place with this address. Raises IndexError for a number that no object has."""
        found = self._objects[number]
        return vars(found) if is_space else found

    def number(self, value: object) -> int | None:
        """The number of an object; None for one that is not in reach."""
        return self._numbers.get(id(value))

    def object(self, number: int) -> Any:
        """The object with a number. Raises IndexError."""
        return self._objects[number]

    def shares_memory(self, x: Tensor) -> bool:
        """Whether a tensor in reach has the memory of `x`, and would change where `x` is written."""
        own = storage_key(x)
        held = (t for t in self._objects if isinstance(t, Tensor) and has_storage(t))
        return any(storage_key(t) == own for t in held)

    def has_code(self, code: types.CodeType) -> bool:
        """Whether the code of a function, or of one that it makes, is a part of the state."""
        return code in self._codes

    def has_unknown_default(self, code: types.CodeType) -> bool:
        """Whether a function with this code has a default that is no part of the state."""
        found = [f for f in self._functions.get(code, ()) if f.__defaults__ or f.__kwdefaults__]
        return any(map(self._has_unknown, (x for f in found for x in (f.__defaults__, f.__kwdefaults__))))

    def _is_known(self, number: int, place: Place, is_space: bool) -> bool:
        """Whether the value at a place, or that there is none, is said by the text."""
        value, holder = place.get(), self._objects[number]
        if self._has_unknown(value):
            return False
        if (number, place.key) in self._entries or belongs_to_torch(value):
            return True
        if is_space or isinstance(holder, dict):
            # Of globals and classes, not every key that is there is a part of the state.
            return value is MISSING and not isinstance(holder, (type, dict))
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        kind = next((k for k in kinds if place.key in vars(k)), None)
        if kind is None:
            return value is MISSING
        return (self._numbers.get(id(kind), -1), place.key) in self._entries or is_others(kind)

    def _has_unknown(self, value: Any) -> bool:
        """Whether a value, or an element of a container, is unknown."""
        if id(value) in self._unknown:
            return True
        inner = elements(value) if isinstance(value, (*MUTABLE, tuple)) else []
        inner += [value.__self__] if isinstance(value, _BOUND) else []
        return any(map(self._has_unknown, inner))
