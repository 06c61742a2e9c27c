"""The values of the user's Python that a capture has read, each with the place where it stands.

Of objects other than modules every attribute is noted, and those are guarded whose names occur in the code that
ran. Torch, numpy and the standard library are nobody's to change: their code is not looked at.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import os
import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.capture.guards import refusals
from autopar.capture.guards.caches import Cache, cache_of
from autopar.capture.guards.closures import Closures, cells_of
from autopar.capture.guards.guards import CALL, Guard, Guards, Place
from autopar.capture.guards.stdlib_views import Cached, cached_by, contents_of, is_weak, times_computed, was_emptied
from autopar.capture.guards.user_code import (
    GENERATORS,
    OTHERS,
    file_of,
    globals_of,
    imports_of,
    is_count,
    is_installed,
    is_users,
    is_users_type,
    line_naming_numpy,
    place_of,
)
from autopar.capture.guards.values import (
    CONTAINERS,
    MISSING,
    MUTABLE,
    copied,
    elements,
    has_own,
    is_copy,
    is_plain,
    is_same,
    noted_in,
    refill,
    seen,
    slots,
)

_MOST_OBJECTS = 10_000
_NAMELESS = (Tensor, np.ndarray, nn.Module)  # code that reads their attributes is seen in another way, or not at all
_METHODS = (types.FunctionType, classmethod, staticmethod)
# What is asked of the process: guarded where the user's code has the name.
_ASKED: dict[str, Callable[[], Any]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "environ": os.environ.copy,
    "getenv": os.environ.copy,
    "argv": lambda: tuple(sys.argv),
}


class Reads:
    """Notes the values that code reads, in every run of a forward, and the contents of these values.

    Args:
        paths: id of a module -> its path, such as `model.layers.0`.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._paths = paths
        self._read: dict[tuple[int, Any], tuple[Place, Any, Any]] = {}  # place, seen, value
        self._containers: dict[int, tuple[Any, Any, Place]] = {}  # container, copy, its place
        self._objects: dict[int, Any] = {}  # kept, so that no other has their id
        # Objects of the user's, each with the names of its first attributes and its place.
        self._owners: list[tuple[Any, frozenset[str], Place]] = []
        # Of classes `vars` makes a new view each time.
        self._spaces: dict[types.ModuleType | type, Any] = {}
        # What a code has named entries of, with the code; kept, so that no others have their ids.
        self._named: dict[tuple[int, int], tuple[Any, types.CodeType]] = {}
        self._optional: set[tuple[int, Any]] = set()  # places guarded if their name is in the code
        self._closures = Closures()
        # Code and globals that were met, and whether the code is the user's own; kept likewise.
        self._met: dict[tuple[int, int], tuple[types.CodeType, Any, bool]] = {}
        # What began to run; equal functions of two files have equal code, and each its globals.
        self._begun: dict[tuple[types.CodeType, int], dict[str, Any]] = {}
        self._globals: list[tuple[types.CodeType, dict[str, Any]]] = []  # of code of the user's
        self._names: set[str] = set()
        self._counted: dict[tuple[int, str], set[bool]] = {}  # was each read only a count?
        # Code, position in it and name -> the code, kept, and whether it reads only to count.
        self._counts: dict[tuple[int, int, str], tuple[types.CodeType, bool]] = {}

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute was read."""
        return (id(vars(module)), name) in self._read

    def attribute(self, module: nn.Module, name: str, frame: types.FrameType) -> None:
        """Notes that code in a frame asks a module for an attribute."""
        attributes = vars(module)
        key = id(attributes), name
        if name in attributes:
            self._counted.setdefault(key, set()).add(self._is_count(frame, name))
        if key in self._read:
            self._name(self._read[key][2], self._read[key][0], frame.f_code)
            return
        place = Place(attributes, name, f"{self._paths[id(module)]}.{name}", place_of(frame))
        if name in attributes:
            self._note(place, frame.f_code)
            return
        if any(name in table for table in (module._parameters, module._buffers, module._modules)):
            return
        static = inspect.getattr_static(type(module), name, MISSING)
        is_data = not hasattr(type(static), "__get__") and static is not MISSING
        if is_data or static is MISSING:
            self._note(Place(module, name, place.words, place.line), frame.f_code)
        else:
            self._method(module, name, place.line, frame.f_code)

    def _is_count(self, frame: types.FrameType, name: str) -> bool:
        """The answer of `is_count`, cached for all layers that run the same code."""
        key = id(frame.f_code), frame.f_lasti, name  # hashing a code takes longer
        if key not in self._counts:
            self._counts[key] = frame.f_code, is_count(frame, name)
        return self._counts[key][1]

    def _method(self, module: nn.Module, name: str, line: str, code: types.CodeType) -> None:
        """Notes a method or property that a module has of its class, and that nothing hides it: it may be patched."""
        nearer = [Place(vars(module), "", self._paths[id(module)], line)]
        for space in type(module).__mro__:
            entries = self._spaces.setdefault(space, vars(space))
            if name not in entries:
                nearer.append(Place(entries, "", space.__qualname__, line))
                continue
            if is_users_type(space):
                self._note(Place(entries, name, f"{space.__qualname__}.{name}", line), code)
                wins = isinstance(entries[name], property)  # over what the module has itself
                self._note_hidden_by_none(name, nearer[1:] if wins else nearer)
            return

    def function(self, frame: types.FrameType) -> None:
        """Notes the globals and the closure that a user's function reads, when it begins to run."""
        code, space = frame.f_code, frame.f_globals
        key = id(code), id(space)  # hashing a code takes longer
        if key not in self._met:
            self._closures.look(code)
            self._code(code, space)
            is_own = is_users(code.co_filename) and not is_installed(code.co_filename)
            self._met[key] = code, space, is_own
        if self._met[key][2]:
            self._variables(code, frame.f_locals)

    def _code(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """Notes what code names of its globals, at its first run."""
        if (code, id(space)) in self._begun:
            return
        self._begun[code, id(space)] = space
        if not is_users(code.co_filename):
            return
        self._names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
        if is_installed(code.co_filename):
            return  # what a library keeps in globals are its own caches
        self._globals.append((code, space))
        for name, line in globals_of(code):
            if name in space:
                place = Place(space, name, f"the global {name}", f"{code.co_filename}:{line}")
                self._note(place, code)

    def _variables(self, code: types.CodeType, variables: Mapping[str, Any]) -> None:
        """Notes the closure of a function that begins to run, and what its code names of its arguments."""
        running = self._closures.running(code, variables) if code.co_freevars else ()
        for function in running:  # of which some may only look the same
            self._cells(function)
        if code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or class
            for name, value in list(variables.items()):
                if isinstance(value, _NAMELESS) or (id(value), id(code)) in self._named:
                    continue
                place = Place({}, name, f"{name} of {code.co_qualname}", _begin_of(code))
                self._name(value, place, code)

    def _cells(self, function: types.FunctionType) -> None:
        """Notes what the cells of a function's closure hold."""
        code = function.__code__
        for name, cell in cells_of(function):
            if name != "__class__":
                place = Place(cell, None, f"{name} of {code.co_qualname}", _begin_of(code))
                self._note(place, code)

    def _note(self, place: Place, code: types.CodeType | None, *, optional: bool = False) -> None:
        key, value = (id(place.holder), place.key), place.get()
        if key in self._read:
            self._name(value, place, code)
            return
        self._objects[id(place.holder)] = place.holder
        self._read[key] = place, seen(value), value
        if optional:
            self._optional.add(key)
        self.hold(value, place, code)

    def hold(self, value: Any, place: Place, code: types.CodeType | None = None) -> None:
        """Notes the contents of a value."""
        self._name(value, place, code)
        if isinstance(value, (types.ModuleType, type)) and code is not None:
            return
        if is_plain(value):
            self._hold_plain(value, place, code)
            return
        if id(value) in self._objects or len(self._objects) > _MOST_OBJECTS:
            return
        if isinstance(value, (Tensor, np.ndarray, nn.Module)):
            return
        self._objects[id(value)] = value
        if isinstance(value, MUTABLE):
            self._containers[id(value)] = value, copied(value), place
        if isinstance(value, (*MUTABLE, tuple)):
            for element in elements(value):
                self.hold(element, place, code)
        elif (contents := contents_of(value)) is not None:
            self._note(Place(contents, CALL, place.words, place.line), code)
        elif (function := cached_by(value)) is not None:  # which may not run at all
            self._code(function.__code__, function.__globals__)
            self._cells(function)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._note(Place(value, name, f"{name} of {place.words}", place.line), code)
        elif isinstance(value, types.MethodType):
            self.hold(value.__self__, place, code)
        elif isinstance(value, types.FunctionType):
            for name in ("__defaults__", "__kwdefaults__"):
                if getattr(value, name):
                    words = f"the defaults of {place.words}"
                    self._note(Place(value, name, words, place.line), code)
            if is_users(value.__code__.co_filename):
                self._attributes(value, place, code)
        if is_users_type(type(value)):
            self._attributes(value, place, code)

    def _hold_plain(self, value: Any, place: Place, code: types.CodeType | None) -> None:
        """Notes the attributes of a plain value of the user's, such as a member of an enum, and of such elements."""
        if isinstance(value, (tuple, frozenset)):
            for element in value:
                self._hold_plain(element, place, code)
        has_attributes = is_users_type(type(value)) and has_own(value)
        if has_attributes and id(value) not in self._objects:
            self._objects[id(value)] = value
            self._attributes(value, place, code)

    def _attributes(self, value: Any, place: Place, code: types.CodeType | None) -> None:
        if hasattr(value, "__dict__") and not is_installed(file_of(type(value))):
            self._owners.append((value, frozenset(vars(value)), place))
        for name in getattr(value, "__dict__", ()):
            words = f"{place.words}.{name}"
            self._note(Place(vars(value), name, words, place.line), code, optional=True)
        for name in slots(type(value)):
            words = f"{place.words}.{name}"
            self._note(Place(value, name, words, place.line), code, optional=True)

    def _name(self, value: Any, place: Place, code: types.CodeType | None) -> None:
        """Notes what a code names of a module or class; of an object, of its class and of the objects it holds.

        Each code names entries of its own, also where another code has read the value before.
        """
        if code is None or (id(value), id(code)) in self._named:
            return
        if isinstance(value, (types.ModuleType, type)):
            self._named[id(value), id(code)] = value, code
            self._namespace(value, place, code)
            return
        is_owned, is_container = is_users_type(type(value)), isinstance(value, CONTAINERS)
        if isinstance(value, _NAMELESS) or not (is_owned or is_container):
            return
        self._named[id(value), id(code)] = value, code
        if is_owned:
            self._namespace(type(value), place, code, getattr(value, "__dict__", None))
        inside = list(getattr(value, "__dict__", {}).values()) if is_owned else []
        for held in [*inside, *(elements(value) if is_container else ())]:
            self._name(held, place, code)

    def _namespace(
        self, value: types.ModuleType | type, place: Place, code: types.CodeType, own: dict[str, Any] | None = None
    ) -> None:
        """Notes the entries of a module or class of the user's that a code names, and that nothing hides them.

        Args:
            value: the module or class.
            place: its place, or that of an object of the class.
            code: the code.
            own: attributes of the object.
        """
        nearer = [] if own is None else [Place(own, "", place.words, place.line)]
        spaces = [value] if isinstance(value, types.ModuleType) else value.__mro__
        for space in spaces:
            top = getattr(space, "__module__", space.__name__).partition(".")[0]
            if top in sys.stdlib_module_names or top in OTHERS:
                continue
            is_new = space not in self._spaces
            entries = self._spaces.setdefault(space, vars(space))
            words = getattr(space, "__qualname__", space.__name__)
            for name in sorted(set(code.co_names) & set(entries)):
                self._note(Place(entries, name, f"{words}.{name}", place.line), code)
                if not hasattr(type(entries[name]), "__get__") or isinstance(entries[name], _METHODS):
                    self._note_hidden_by_none(name, nearer)
            nearer.append(Place(entries, "", words, place.line))
            if is_new and isinstance(space, type) and _is_watched(space):
                # Code may get an object of the class from anywhere, and a metaclass may read all.
                for name in sorted(entries.keys() - _filled_in(space)):
                    each = Place(entries, name, f"{words}.{name}", place.line)
                    self._note(each, None, optional=True)

    def _note_hidden_by_none(self, name: str, nearer: Sequence[Place]) -> None:
        """Notes that no nearer class, nor the object itself, has an entry of this name; nothing if one has."""
        if any(name in space.holder for space in nearer):
            return
        for space in nearer:
            self._note(Place(space.holder, name, f"{space.words}.{name}", space.line), None)

    def find_imports(self) -> None:
        """Notes the names that code uses from modules that it imported while it ran."""
        for code, space in list(self._globals):
            for name, line in imports_of(code, space.get("__package__") or ""):
                if (module := sys.modules.get(name)) is not None:
                    self._name(module, Place({}, name, name, f"{code.co_filename}:{line}"), code)

    def changed(self, attributes: Container[int]) -> Iterator[tuple[Place, Any]]:
        """The places of values that a run replaced, each with the old value.

        Args:
            attributes: ids of modules and of their `__dict__`, whose attributes are left out.
        """
        for place, before, value in self._read.values():
            if place.key is CALL:
                if not is_same(place.get(), before):
                    yield place, value
            elif id(place.holder) not in attributes and place.get() is not value:
                yield place, value
        for owner, known, place in self._owners:
            for name in [n for n in vars(owner) if n not in known]:
                if isinstance(inspect.getattr_static(type(owner), name, None), cached_property):
                    del vars(owner)[name]  # computed anew when it is asked for
                else:
                    yield Place(vars(owner), name, f"{place.words}.{name}", place.line), MISSING

    def refilled(self) -> tuple[list[Place], list[tuple[dict[Any, Any], Any, Any]]]:
        """Restores the contents of containers.

        Returns the places of those that had changed, but for dicts that only gained entries without data
        (`noted_in`): of these the dict, key and value of every entry.
        """
        changed = [each for each in self._containers.values() if not is_copy(*each[:2])]
        gained = [(container, noted_in(container, copy)) for container, copy, _ in changed]
        for container, copy, _ in changed:
            refill(container, copy)
        places = [place for (_, _, place), (_, noted) in zip(changed, gained, strict=True) if noted is None]
        return places, [(container, k, v) for container, noted in gained for k, v in (noted or {}).items()]

    def is_counter(self, attributes: dict[str, Any], name: str) -> bool:
        """Whether every read of an attribute only counted it up or down."""
        return self._counted.get((id(attributes), name)) == {True}

    def numpy_line(self) -> str:
        """The line that draws from numpy's own generator, whose functions no profile shows."""
        for code, values in self._globals:
            line = line_naming_numpy(code, values)
            if line is not None:
                return f"{code.co_filename}:{line}"
        return "a line of the forward"

    def cached(self) -> list[Any]:
        """The functions with a cache that were read."""
        return [x for x in self._objects.values() if isinstance(x, Cached)]

    def ran(self) -> tuple[tuple[types.CodeType, Mapping[str, Any]], ...]:
        """The code of the user's and of installed libraries that ran, each with its globals."""
        codes = dict.fromkeys(code for code, _ in self._begun)
        libraries = (c for c in codes if is_installed(c.co_filename) and is_users(c.co_filename))
        return (*self._globals, *((c, {}) for c in libraries))

    def guards(self, kept: Container[tuple[int, Any]]) -> Guards:
        """Guards of all values that were read.

        Args:
            kept: the places (id of the holder, key) of values that stay as the forward has set them.

        Raises CaptureError for an iterator, whose next value nobody can look at.
        """
        return Guards(self._guards(kept))

    def _guards(self, kept: Container[tuple[int, Any]]) -> Iterator[Guard]:
        for key, (place, before, value) in self._read.items():
            is_named = key not in self._optional or place.key in self._names
            is_counter = self._counted.get(key) == {True}
            if not is_named or _is_form(value) or key in kept or is_counter:
                continue
            if isinstance(value, (Iterator, *GENERATORS)):
                raise refusals.reads_iterator(value, place)
            if is_weak(value):
                raise refusals.reads_weakly(place)
            yield Guard(place, _as_it_stays(place, before))
            if cached_by(value) is not None:
                was = partial(_was_emptied, value, times_computed(value), cache_of(value))
                yield Guard(Place(was, CALL, f"whether {place.words} was emptied", place.line), False)
        for name, function in _ASKED.items():
            if name in self._names:
                place = Place(function, CALL, f"what {name} says", "a line of the forward")
                yield Guard(place, seen(function()))


def _as_it_stays(place: Place, before: Any) -> Any:
    """What was read; where a tracer had wrapped a function for the time of the trace, what stands there after it.

    torch.fx so wraps, in every trace, the globals that `torch.fx.wrap` names, such as timm's.
    """
    if not isinstance(before, types.FunctionType) or not hasattr(before, "__wrapped__"):
        return before
    now = place.get()
    stays = getattr(builtins, str(place.key), MISSING) if now is MISSING else now
    return now if before.__wrapped__ is stays else before


def _was_emptied(cached: Any, times: int, cache: Cache) -> bool:
    """Whether a cache was emptied, even if it was filled again, since the function had run this many times."""
    return was_emptied(cached, times) or cache_of(cached) is not cache


def _is_watched(kind: type) -> bool:
    """Whether all entries of a class are looked at: of the user's classes, and of those of another metaclass."""
    return not is_installed(file_of(kind)) or is_users_type(type(kind))


def _filled_in(kind: type) -> set[str]:
    """Entries of a class that Python itself fills: an enum keeps values such as `Flag.A | Flag.B` when they are met."""
    is_enum = issubclass(kind, enum.Enum)
    return {n for n in vars(kind) if is_enum and n.startswith("_") and n.endswith("_")}


def _begin_of(code: types.CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def _is_form(value: Any) -> bool:
    """Whether a value is autopar's own: the form that a module is captured in."""
    return isinstance(value, types.FunctionType) and (value.__module__ or "").startswith("autopar.")
