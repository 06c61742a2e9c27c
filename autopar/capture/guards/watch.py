"""Watches the user's Python while a model is captured: which values it reads, and what it writes.

A capture runs the forward of a model once, on fake tensors. `Watch` notes every value that the code reads
there and that is not a parameter, buffer or input (`autopar.capture.guards.reads`):

- attributes of modules, where `nn.Module.__getattribute__` is asked for them;
- globals and closures of every function of the user's that runs, by the names in its code;
- what those hold: elements of containers, attributes of plain objects.

What it writes is put back, and repeated after every step (`autopar.capture.guards.writes`).
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._torch import replaced
from autopar.capture.guards import refusals
from autopar.capture.guards.caches import forget_traced, refuse_stale
from autopar.capture.guards.guards import Guards, Place
from autopar.capture.guards.profiling import profiled_by
from autopar.capture.guards.reads import Reads
from autopar.capture.guards.user_code import (
    calling,
    draws,
    draws_from_own,
    is_installed,
    is_state_of_numpy,
    is_users,
    line_of,
    place_of,
    reads_clock,
)
from autopar.capture.guards.writes import Write, Writes, of_users

_TABLES = frozenset([*vars(nn.Module()), *vars(nn.Module)]) - {"training"}


class _Unwatched(TorchFunctionMode):
    """Runs ops without the profile function: they take most of the time, and contain no code of the user."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **(kwargs or {}))
        with profiled_by(None):
            return function(*args, **(kwargs or {}))


class Watch:
    """Notes the values that a model's Python code reads and writes, in every run of its forward.

    Every run begins with the values that the first one found.

    Args:
        model: the model that is captured.
        loss_fn: its loss function, if there is one.

    Attributes:
        writes: the changes to attributes of modules, and notes in dicts, that every step repeats.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._paths = {id(m): f"model.{path}".rstrip(".") for path, m in model.named_modules()}
        self._modules = list(model.modules())
        self._roots = [(loss_fn, "loss_fn")] if loss_fn is not None else []
        if isinstance(loss_fn, nn.Module):
            self._modules += loss_fn.modules()
            self._paths |= {id(m): f"loss_fn.{path}".rstrip(".") for path, m in loss_fn.named_modules()}
        self._reads, self._writes = Reads(self._paths), Writes(self._paths, self._modules)
        # Lines, and whether the generator is a `random.Random` of the user's own.
        self._drawn: list[tuple[str, bool]] = []
        self._timed: list[str] = []
        self._noting = False
        self.writes: tuple[Write, ...] = ()

    @property
    def guards(self) -> Guards:
        """Guards of all that was read. Raises CaptureError for an iterator, which nobody can look at."""
        return self._reads.guards(self._writes.kept)

    @property
    def ran(self) -> tuple[tuple[types.CodeType, Mapping[str, Any]], ...]:
        """The code of the user's and of installed libraries that ran, each with its globals."""
        return self._reads.ran()

    @property
    def sets_up(self) -> bool:
        """Whether a library has set values that stay."""
        return bool(self._writes.kept)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Context in which export may replace attributes of modules by copies, as it does with containers.

        Functions may cache what they compute in it, which has no values.
        """
        before = self._writes.attributes()
        try:
            yield
        finally:
            traced = forget_traced(self._reads.cached())
            for module, name, old, _ in list(self._writes.written(before)):
                if (id(module), name) not in self._writes.kept:
                    Place(vars(module), name, "", "").put(old)
        refuse_stale(traced)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Watches one run of the forward; afterwards all values of Python are restored."""
        before = self._writes.attributes()
        for value, words in self._roots:
            self._reads.hold(value, Place({}, None, words, line_of(value)))
        drawn = np.random.get_state(legacy=False)
        try:
            with self._asked(), _Unwatched(), profiled_by(self._profile):
                yield
        finally:
            written, others, noted = self._put_back(before)
        if not is_state_of_numpy(np.random.get_state(legacy=False), drawn):
            np.random.set_state(drawn)
            self._drawn.append((self._reads.numpy_line(), False))
        self._refuse(of_users(others))
        effects = [w for w in written if not self._writes.is_internal(*w[:2])]
        repeated = tuple(filter(None, (self._effect(*write) for write in effects)))
        self.writes = repeated + tuple(Write(*entry, adds=False) for entry in noted)

    def _asked(self) -> contextlib.AbstractContextManager[None]:
        """Context in which modules note who reads, sets and deletes their attributes."""
        get, put = nn.Module.__getattribute__, nn.Module.__setattr__
        remove = nn.Module.__delattr__

        def read(module: nn.Module, name: str) -> Any:
            is_state = name not in _TABLES and not name.startswith("__")
            if is_state and not self._noting and self._is_from_before(module, name):
                self._noting = True  # which reads attributes itself
                try:
                    self._reads.attribute(module, name, sys._getframe(1))
                finally:
                    self._noting = False
            return get(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            self._writes.sets(module, name, sys._getframe(1))
            put(module, name, value)

        def delete(module: nn.Module, name: str) -> None:
            self._writes.deletes(module, name, sys._getframe(1))
            remove(module, name)

        return replaced(nn.Module, __delattr__=delete, __getattribute__=read, __setattr__=write)

    def _is_from_before(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute's value was there before the forward: what it has set before it reads it is its own."""
        if id(module) not in self._paths:
            return False
        return self._reads.has_read(module, name) or not self._writes.has_set(module, name)

    def _put_back(
        self, before: list[dict[str, Any]]
    ) -> tuple[list[tuple[nn.Module, str, Any, Any]], list[Place], list[tuple[dict[Any, Any], Any, Any]]]:
        """Restores the Python values from before a run.

        Returns the attributes that were put back, see `Writes.written`, all other places that were, and entries of
        dicts that hold no data, see `Reads.refilled`.
        """
        self._reads.find_imports()
        written = [w for w in self._writes.written(before) if not self._writes.keeps(w[0], w[1], w[3])]
        for module, name, old, _ in written:
            Place(vars(module), name, "", "").put(old)
        attributes = {id(holder) for m in self._modules for holder in (m, vars(m))}
        changed = [each for each in self._reads.changed(attributes) if not self._writes.stays(each[0])]
        for place, value in changed:
            place.put(value)
        refilled, noted = self._reads.refilled()
        return written, [place for place, _ in changed] + refilled, noted

    def _effect(self, module: nn.Module, name: str, old: Any, new: Any) -> Write | None:
        is_counter = self._reads.is_counter(vars(module), name)
        return self._writes.effect(module, name, old, new, is_counter=is_counter)

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._reads.function(frame)
        elif event == "c_call" and (draws(function) or reads_clock(function)):
            caller = calling(frame)
            if caller is not None and is_users(caller.f_code.co_filename):
                self._called(function, caller)

    def _called(self, function: Any, caller: types.FrameType) -> None:
        """Notes a random draw or a reading of the clock; libraries may read the clock."""
        if draws(function):
            self._drawn.append((place_of(caller), draws_from_own(function)))
        elif not is_installed(caller.f_code.co_filename):
            self._timed.append(place_of(caller))

    def _refuse(self, changed: list[Place]) -> None:
        if self._timed:
            raise refusals.reads_clock(self._timed[0])
        if self._drawn:
            line, is_own = self._drawn[0]
            raise refusals.draws_in_python(line, is_own=is_own)
        if changed:
            raise refusals.changes(changed[0])
