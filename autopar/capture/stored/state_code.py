"""The code in reach of a model as text: functions with what they hold, classes, and the names that code looks up."""

from __future__ import annotations

import gc
import types
from typing import Any

from torch import nn

from autopar.capture.guards.user_code import globals_of, is_installed, is_users
from autopar.capture.stored.state_lines import StateLines
from autopar.capture.stored.state_text import (
    UNREAD,
    file_of,
    hash_of_code,
    is_others,
    is_versioned,
    with_inner,
)


class StateOfCode(StateLines):
    """Describes functions and classes."""

    def _class(self, kind: type) -> None:
        self._lines.append(f"{kind.__module__}.{kind.__qualname__}")
        if is_others(kind):
            self._names(kind)
            for base in kind.__bases__:
                if base is not object:
                    self._put("base", base)
            return
        if issubclass(kind, nn.Module) and is_installed(file_of(kind)):
            self._refuse(f"{kind.__name__} belongs to an installed library")
        self._spaces[id(gc.get_referents(vars(kind))[0])] = self._numbers[id(kind)]
        for base in kind.__mro__[1:]:
            self._put("base", base)
        self._put("metaclass", type(kind))
        for name, x in list(vars(kind).items()):
            if name not in UNREAD:
                self._entry(kind, name, x)

    def _names(self, space: Any) -> None:
        """Which functions stand in a module or class of torch; the user may have put others in their place."""
        for name, x in list(vars(space).items()):
            self._name_of(name, x)

    def _name_of(self, name: str, x: Any) -> None:
        """Which function stands under a name in a module or class of torch."""
        if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
            self._lines.append(f"{name}: {x.__module__}.{x.__qualname__}")
        if isinstance(x, types.FunctionType) and is_users(x.__code__.co_filename):
            self._put(f"in torch {name}", x)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        is_watched = is_users(code.co_filename)
        self._functions.setdefault(code, []).append(function)
        self._lines.append(f"{function.__module__}.{function.__qualname__} {hash_of_code(code, self._codes)}")
        for name in ("__defaults__", "__kwdefaults__"):
            self._entry(function, name, getattr(function, name), hidden=not is_watched)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._put(f"cell {name}", cell, hidden=not is_watched)
        self._spaces[id(vars(function))] = self._numbers[id(function)]
        for name, x in list(vars(function).items()):
            self._entry(function, name, x, hidden=not is_watched)
        is_generated = code.co_filename.startswith("<")  # by exec
        if (is_watched and not is_installed(code.co_filename)) or is_generated:
            self._globals(code, function.__globals__)

    def _globals(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """The globals that a code names, and what it names of modules among these."""
        codes = list(with_inner(code))
        names = {name for each in codes for name in each.co_names}
        if "ops" in names:
            self._refuse(f"{code.co_qualname} may call operators that are registered with torch")
        self._namespace(space, space.get("__name__", ""))
        found = [name for each in codes for name, _ in globals_of(each) if name in space]
        for name in dict.fromkeys(found):
            self._entry(space, name, space[name])
            self._entries_of(space[name], names)

    def _namespace(self, space: dict[str, Any], name: str) -> None:
        if id(space) not in self._numbers:
            self._lines.append(f"#{self._register(space)} globals of {name}")

    def _entries_of(self, module: Any, names: set[str]) -> None:
        """What names of a code stand for in a module."""
        if not isinstance(module, types.ModuleType):
            return
        space = vars(module)
        if is_versioned(module.__name__):
            for name in sorted(names & set(space)):
                self._name_of(name, space[name])
                self._entries_of(space[name], names - {name})
            return
        self._namespace(space, module.__name__)
        for name in sorted(names & set(space)):
            if (self._numbers[id(space)], name) not in self._entries:
                self._entry(space, name, space[name])
            self._entries_of(space[name], names - {name})
