"""Watches the user's Python while a model is captured: which values it reads, and what it writes.

A capture runs the forward of a model once, on fake tensors. `Watch` notes every value that the code reads
there and that is no parameter, buffer or input:

- attributes of modules, where `nn.Module.__getattribute__` is asked for them;
- globals and closures of every function of the user's that runs, by the names in its code;
- what those hold: elements of containers, attributes of plain objects.

Of objects other than modules every attribute is noted and those are guarded whose names occur in the code that
ran. Torch, numpy and the standard library are nobody's to change: their code is not looked at.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture import refusals
from autopar.capture.guards import CALL, Guard, Guards, Place
from autopar.capture.profiling import profiled_by
from autopar.capture.user_code import (
    GENERATORS,
    OTHERS,
    calling,
    draws,
    globals_of,
    is_count,
    is_installed,
    is_state_of_numpy,
    is_users,
    is_users_type,
    line_naming_numpy,
    line_of,
    place_of,
    reads_clock,
    stored_by,
)
from autopar.capture.values import (
    MISSING,
    MUTABLE,
    copied,
    elements,
    is_copy,
    is_plain,
    refill,
    seen,
    slots,
)

_TABLES = frozenset([*vars(nn.Module()), *vars(nn.Module)]) - {"training"}
_MOST_OBJECTS = 10_000
# What is asked of the process: guarded where the user's code has the name.
_ASKED: dict[str, Callable[[], Any]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "environ": os.environ.copy,
    "getenv": os.environ.copy,
    "argv": lambda: tuple(sys.argv),
}


@dataclass(frozen=True)
class Write:
    """What a forward does to an attribute of a module.

    Attributes:
        attributes: `__dict__` of the module.
        name: name of the attribute.
        value: its value after the forward, or what the forward adds to it.
        adds: whether it is added.
    """

    attributes: dict[str, Any]
    name: str
    value: Any
    adds: bool

    def repeat(self) -> None:
        """Does it once more."""
        self.attributes[self.name] = (
            self.attributes[self.name] + self.value if self.adds else self.value
        )


class _Unwatched(TorchFunctionMode):
    """Ops run without the profile function: no code of the user is in them, and all the time is."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **(kwargs or {}))
        with profiled_by(None):
            return function(*args, **(kwargs or {}))


class Watch:
    """Notes what the Python of a model reads and writes, in every run of its forward.

    Every run begins with the values that the first one found.

    Args:
        model: the model that is captured.
        loss_fn: its loss function, if there is one.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._paths = {id(m): f"model.{path}".rstrip(".") for path, m in model.named_modules()}
        self._modules = list(model.modules())
        self._roots = [(loss_fn, "loss_fn")] if loss_fn is not None else []
        if isinstance(loss_fn, nn.Module):
            self._modules += loss_fn.modules()
            self._paths |= {
                id(m): f"loss_fn.{path}".rstrip(".") for path, m in loss_fn.named_modules()
            }
        self._read: dict[tuple[int, Any], tuple[Place, Any, Any]] = {}  # place, seen, value
        self._containers: dict[int, tuple[Any, Any, Place]] = {}  # container, copy, its place
        self._objects: dict[int, Any] = {}  # kept, so that no other has their id
        # Of classes `vars` makes a new view each time.
        self._spaces: dict[types.ModuleType | type, Any] = {}
        self._optional: set[tuple[int, Any]] = set()  # places guarded if their name is in the code
        self._codes: dict[types.CodeType, dict[str, Any]] = {}  # with the values of free variables
        self._globals: dict[types.CodeType, dict[str, Any]] = {}  # of code of the user's
        self._names: set[str] = set()
        self._counted: dict[tuple[int, str], set[bool]] = {}  # was each read only a count?
        self._lines: dict[tuple[int, str], str] = {}  # of writes by the user's code
        self._internal: set[tuple[int, str]] = set()  # attributes that torch's code sets
        self._kept: set[tuple[int, str]] = set()  # attributes that stay as they were set
        self._drawn: list[str] = []
        self._timed: list[str] = []
        self._noting = False
        self.writes: tuple[Write, ...] = ()

    # --- running

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, export may replace attributes of modules by copies, as it does with containers."""
        before = [dict(vars(m)) for m in self._modules]
        try:
            yield
        finally:
            for module, name, old, _ in list(self._written(before)):
                if (id(module), name) not in self._kept:
                    Place(vars(module), name, "", "").put(old)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Watches one run of the forward; afterwards Python's values are what they were."""
        before = [dict(vars(m)) for m in self._modules]
        for value, words in self._roots:
            self._hold(value, Place({}, None, words, line_of(value)))
        drawn = np.random.get_state(legacy=False)
        get, put = nn.Module.__getattribute__, nn.Module.__setattr__
        remove = nn.Module.__delattr__

        def read(module: nn.Module, name: str) -> Any:
            is_state = name not in _TABLES and not name.startswith("__")
            if is_state and not self._noting and id(module) in self._paths:
                self._noting = True  # which reads attributes itself
                try:
                    self._attribute(module, name, sys._getframe(1))
                finally:
                    self._noting = False
            return get(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            frame = sys._getframe(1)
            if is_users(frame.f_code.co_filename) or (id(module), name) in self._lines:
                self._lines[id(module), name] = place_of(frame)
            else:
                self._internal.add((id(module), name))
            put(module, name, value)

        def delete(module: nn.Module, name: str) -> None:
            self._lines[id(module), name] = place_of(sys._getframe(1))
            remove(module, name)

        nn.Module.__delattr__ = delete  # type: ignore[method-assign]
        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
        try:
            with _Unwatched(), profiled_by(self._profile):
                yield
        finally:
            nn.Module.__setattr__ = put  # type: ignore[method-assign]
            nn.Module.__delattr__ = remove  # type: ignore[method-assign]
            del nn.Module.__getattribute__
            self._find_cells()
            written = [w for w in self._written(before) if not self._keeps(w[0], w[1], w[3])]
            for module, name, old, _ in written:
                Place(vars(module), name, "", "").put(old)
            changed = [each for each in self._changed() if not self._stays(each[0])]
            for place, value in changed:
                place.put(value)
            others = [place for place, _ in changed] + self._refilled()
        if not is_state_of_numpy(np.random.get_state(legacy=False), drawn):
            np.random.set_state(drawn)
            self._drawn.append(self._numpy_line())
        self._refuse(self._of_users(others))
        effects = [w for w in written if not self._is_internal(*w[:2])]
        self.writes = tuple(filter(None, (self._effect(*write) for write in effects)))

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_code not in self._codes:
            self._function(frame)
        elif event == "c_call" and (draws(function) or reads_clock(function)):
            caller = calling(frame)
            if caller is not None and is_users(caller.f_code.co_filename):
                self._called(function, caller)

    def _called(self, function: Any, caller: types.FrameType) -> None:
        """Notes a draw or a reading of the clock; libraries may time themselves."""
        if draws(function):
            self._drawn.append(place_of(caller))
        elif not is_installed(caller.f_code.co_filename):
            self._timed.append(place_of(caller))

    def _numpy_line(self) -> str:
        """The line that draws from numpy's own generator, whose functions no profile shows."""
        for code, values in self._globals.items():
            line = line_naming_numpy(code, values)
            if line is not None:
                return f"{code.co_filename}:{line}"
        return "a line of the forward"

    # --- reading

    def _attribute(self, module: nn.Module, name: str, frame: types.FrameType) -> None:
        attributes = vars(module)
        key = id(attributes), name
        if name in attributes:
            self._counted.setdefault(key, set()).add(is_count(frame, name))
        if key in self._read:
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
            place = Place(module, name, place.words, place.line)
            self._note(place, frame.f_code)

    def _function(self, frame: types.FrameType) -> None:
        """Notes globals and closures of a function of the user's that begins to run."""
        code = frame.f_code
        self._codes[code] = {}
        if not is_users(code.co_filename):
            return
        self._names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
        if is_installed(code.co_filename):
            return  # what a library keeps in globals are its own caches
        self._globals[code] = frame.f_globals
        where = f"{code.co_filename}:{code.co_firstlineno}"
        for name, line in globals_of(code):
            if name in frame.f_globals:
                place = Place(
                    frame.f_globals, name, f"the global {name}", f"{code.co_filename}:{line}"
                )
                self._note(place, code)
        free = {n: frame.f_locals[n] for n in code.co_freevars if n in frame.f_locals}
        self._codes[code] = {n: (seen(v), v) for n, v in free.items()}
        for name, value in free.items():
            self._hold(value, Place({}, name, f"{name} of {code.co_qualname}", where), code)

    def _note(self, place: Place, code: types.CodeType | None, *, optional: bool = False) -> None:
        key = id(place.holder), place.key
        if key in self._read:
            return
        value = place.get()
        self._objects[id(place.holder)] = place.holder
        self._read[key] = place, seen(value), value
        if optional:
            self._optional.add(key)
        self._hold(value, place, code)

    def _hold(self, value: Any, place: Place, code: types.CodeType | None = None) -> None:
        """Notes what a value holds."""
        if isinstance(value, (types.ModuleType, type)) and code is not None:
            self._namespace(value, place, code)
            return
        if is_plain(value) or id(value) in self._objects or len(self._objects) > _MOST_OBJECTS:
            return
        if isinstance(value, (Tensor, np.ndarray, nn.Module)):
            return
        self._objects[id(value)] = value
        if isinstance(value, MUTABLE):
            self._containers[id(value)] = value, copied(value), place
        if isinstance(value, (*MUTABLE, tuple)):
            for element in elements(value):
                self._hold(element, place, code)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._note(Place(value, name, f"{name} of {place.words}", place.line), code)
        elif isinstance(value, types.MethodType):
            self._hold(value.__self__, place, code)
        elif isinstance(value, types.FunctionType):
            for name in ("__defaults__", "__kwdefaults__"):
                if getattr(value, name):
                    words = f"the defaults of {place.words}"
                    self._note(Place(value, name, words, place.line), code)
            if is_users(value.__code__.co_filename):
                self._attributes(value, place, code)
        elif is_users_type(type(value)):
            self._attributes(value, place, code)

    def _attributes(self, value: Any, place: Place, code: types.CodeType | None) -> None:
        for name in getattr(value, "__dict__", ()):
            words = f"{place.words}.{name}"
            self._note(Place(vars(value), name, words, place.line), code, optional=True)
        for name in slots(type(value)):
            words = f"{place.words}.{name}"
            self._note(Place(value, name, words, place.line), code, optional=True)
        if not isinstance(value, types.FunctionType) and code is not None:
            self._namespace(type(value), place, code)

    def _namespace(
        self, value: types.ModuleType | type, place: Place, code: types.CodeType
    ) -> None:
        """Notes the entries of a module or class of the user's that a code names."""
        spaces = [value] if isinstance(value, types.ModuleType) else value.__mro__
        for space in spaces:
            top = getattr(space, "__module__", space.__name__).partition(".")[0]
            if top in sys.stdlib_module_names or top in OTHERS:
                continue
            entries = self._spaces.setdefault(space, vars(space))
            for name in sorted(set(code.co_names) & set(entries)):
                words = f"{getattr(space, '__qualname__', space.__name__)}.{name}"
                self._note(Place(entries, name, words, place.line), code)

    def _find_cells(self) -> None:
        """Notes the cells of the closures that ran: those of functions that hold what the run has found."""
        found = {code: free for code, free in self._codes.items() if free}
        made_inside = {c for code in self._codes for c in code.co_consts if inspect.iscode(c)}
        functions = (
            [f for f in gc.get_referrers(*found) if isinstance(f, types.FunctionType)]
            if found
            else []
        )
        for function in functions:
            code = function.__code__
            if code not in found or code in made_inside:
                continue
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                key = id(cell), None
                if key in self._read or name not in found[code]:
                    continue
                before, value = found[code][name]
                where = f"{code.co_filename}:{code.co_firstlineno}"
                place = Place(cell, None, f"{name} of {code.co_qualname}", where)
                if place.get() is value or name in stored_by(code):
                    self._objects[id(cell)] = cell
                    self._read[key] = place, before, value

    # --- writing

    def _written(self, before: list[dict[str, Any]]) -> Iterator[tuple[nn.Module, str, Any, Any]]:
        """Attributes of modules that are others after a run: module, name, value before and after."""
        for module, old in zip(self._modules, before, strict=True):
            new = vars(module)
            for name in [*old, *(n for n in new if n not in old)]:
                if old.get(name, MISSING) is not new.get(name, MISSING):
                    yield module, name, old.get(name, MISSING), new.get(name, MISSING)

    def _changed(self) -> Iterator[tuple[Place, Any]]:
        """The places, other than attributes of modules, of values that a run replaced; with the old value."""
        attributes = {id(holder) for m in self._modules for holder in (m, vars(m))}
        for place, _, value in self._read.values():
            if id(place.holder) not in attributes and place.get() is not value:
                yield place, value

    def _refilled(self) -> list[Place]:
        """Brings containers back to what they held; returns the places of those that had changed."""
        changed = [each for each in self._containers.values() if not is_copy(*each[:2])]
        for container, copy, _ in changed:
            refill(container, copy)
        return [place for _, _, place in changed]

    def _keeps(self, module: nn.Module, name: str, new: Any) -> bool:
        """Whether an attribute stays as the forward has set it: what a library notes of what it has set up."""
        if is_plain(new) and is_installed(self._lines.get((id(module), name), "")):
            self._kept |= {(id(module), name), (id(vars(module)), name)}
        return (id(module), name) in self._kept

    def _stays(self, place: Place) -> bool:
        """The same for a value elsewhere that a library reads, such as an entry of its configuration."""
        key = id(place.holder), place.key
        if is_plain(place.get()) and is_installed(place.line):
            self._kept.add(key)
        return key in self._kept

    @staticmethod
    def _of_users(changed: list[Place]) -> list[Place]:
        """What the user's own code changes; of what libraries change, such as their caches, is warned."""
        for place in changed:
            if is_installed(place.line):
                refusals.warn_of_library(f"changes {place.words}", place.line)
        return [place for place in changed if not is_installed(place.line)]

    def _is_internal(self, module: nn.Module, name: str) -> bool:
        """Whether torch alone has set an attribute, as an LSTM does with its list of weights."""
        key = id(module), name
        return key in self._internal and key not in self._lines

    def _effect(self, module: nn.Module, name: str, old: Any, new: Any) -> Write | None:
        """What a forward did to an attribute, to be done after every step; CaptureError where it cannot be.

        None where an installed library did what cannot be repeated, of which is warned.
        """
        attributes, line = vars(module), self._lines.get((id(module), name), line_of(module))
        if self._is_counter(attributes, name) and type(old) is type(new) is int:
            return Write(attributes, name, new - old, adds=True)
        if new is MISSING or not all(map(is_plain, pytree.tree_leaves(new))):
            words = f"{self._paths[id(module)]}.{name}"
            if is_installed(line):
                refusals.warn_of_library(f"sets {words}", line)
                return None
            raise refusals.sets_attribute(words, name, line, deletes=new is MISSING)
        return Write(attributes, name, new, adds=False)

    def _is_counter(self, attributes: dict[str, Any], name: str) -> bool:
        return self._counted.get((id(attributes), name)) == {True}

    def _refuse(self, changed: list[Place]) -> None:
        if self._timed:
            raise refusals.reads_clock(self._timed[0])
        if self._drawn:
            raise refusals.draws_in_python(self._drawn[0])
        if changed:
            raise refusals.changes(changed[0])

    # --- result

    @property
    def guards(self) -> Guards:
        """Guards of all that was read. Raises CaptureError for an iterator, which nobody can look at."""
        return Guards(self._guards())

    def _guards(self) -> Iterator[Guard]:
        for key, (place, before, value) in self._read.items():
            is_named = key not in self._optional or place.key in self._names
            is_counter = self._counted.get(key) == {True}
            if not is_named or _is_form(value) or key in self._kept or is_counter:
                continue
            if isinstance(value, (Iterator, *GENERATORS)):
                raise refusals.reads_iterator(value, place)
            yield Guard(place, before)
        for name, function in _ASKED.items():
            if name in self._names:
                place = Place(function, CALL, f"what {name} says", "a line of the forward")
                yield Guard(place, seen(function()))


def _is_form(value: Any) -> bool:
    """Whether a value is autopar's own: the form that a module is captured in."""
    return isinstance(value, types.FunctionType) and value.__module__.startswith("autopar.")
