"""Python state that Dynamo reads and does not watch: methods of classes, and results that functions cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.refusals import replaces_method, runs_cached
from autopar.capture.shown import all_cached, cached_by
from autopar.capture.user_code import globals_of
from autopar.capture.values import MISSING, is_same, seen

# Function with a cache -> the globals that it names, as they were when a graph was first made of its code.
_READ: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class Methods:
    """The methods of modules that Dynamo has traced into a graph; to be made while Dynamo compiles the frame.

    Dynamo guards the attributes of a module and not those of its class: it would go on with the old method.
    """

    def __init__(self, graph: fx.Graph) -> None:
        traced = _torch.traced_code()
        names = {code.co_name for code in traced}
        self._found = [
            (kind, name, method)
            for kind in _torch.traced_modules(graph)
            for name in names
            if getattr(method := _function_of(kind, name), "__code__", None) in traced
            and method is _function_of(kind, name)  # else a descriptor makes another at each read
        ]

    def check(self) -> None:
        """Raises CaptureError if a class has another method by now."""
        for kind, name, before in self._found:
            if (now := _function_of(kind, name)) is not before:
                raise replaces_method(f"{kind.__qualname__}.{name}", line_of(now or before))


def _function_of(kind: type, name: str) -> Any:
    """The function behind a method of a class; each read of a classmethod makes another object around it."""
    found = getattr(kind, name, None)
    return getattr(found, "__func__", found)


def refuse_cached() -> None:
    """Raises CaptureError if the frame that Dynamo compiles runs a function whose cache should spare that.

    Dynamo runs the function of a `functools.lru_cache` each time that it compiles, and so with the values that its
    globals have by then. Python would return what the function gave for the first values.
    """
    traced = _torch.traced_code()
    for cached in all_cached():
        function = cached_by(cached)
        if function is not None and function.__code__ in traced:
            now = dict(_globals(function))
            before = _READ.setdefault(cached, {name: seen(value) for name, value in now.items()})
            for name, value in before.items():
                if not is_same(now.get(name, MISSING), value):
                    raise runs_cached(function.__qualname__, line_of(function), name)


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, without functions, classes and modules."""
    for name, _ in globals_of(function.__code__):
        value = function.__globals__.get(name, MISSING)
        if not callable(value) and not isinstance(value, ModuleType):
            yield name, value


def line_of(function: Any) -> str:
    """The line where a function begins: `file:line`; its name where it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return str(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
