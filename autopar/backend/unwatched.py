"""Python state that Dynamo reads and does not watch: methods of classes, cached results, hooks of all modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.guards.caches import cache_of, changed, reads_of, stale
from autopar.capture.guards.refusals import changes_hooks_of_all, replaces_method
from autopar.capture.guards.stdlib_views import cached_by, kept_by
from autopar.capture.guards.values import is_plain, is_same


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


class CachedCalls:
    """The calls of functions with a cache in a graph; to be made while Dynamo compiles the frame.

    See [Note: caches that a capture does not fill] in autopar/capture/guards/caches.py.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._calls = [x for x in _torch.cached_calls() if cached_by(x.cached) is not None]
        self._reads = {x.cached: reads_of(x.cached) for x in self._calls}
        self._inputs = set(map(_torch.dynamo_source, graph.find_nodes(op="placeholder")))

    def check(self) -> None:
        """Raises CaptureError if Python would give a call another result, or if nothing tells that it would not."""
        for call in self._calls:
            reads = self._reads[call.cached]
            cache = cache_of(call.cached, reads)
            if call.key is not None and call.results and all(map(is_plain, call.results)):
                if call.key not in cache.results:
                    kept = () if call.key[1] else kept_by(call.cached, call.key[0])
                    cache.results[call.key] = kept or call.results
                is_right = is_same(call.results, cache.results[call.key])
            else:
                is_right = cache.reads is reads and not self._takes(reads)
            if not is_right:
                raise stale(call.cached, changed(call.cached, cache) or self._takes(reads))

    def _takes(self, reads: Iterable[str]) -> str:
        """The first of these globals that is an input of the graph, which takes the value of each call; "" if none."""
        return next((name for name in reads if f"G[{name!r}]" in self._inputs), "")


def line_of(function: Any) -> str:
    """The line where a function begins: `file:line`; its name where it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return str(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


class HooksOfAllModules:
    """The hooks of all modules that Dynamo has traced into a graph; to be made while Dynamo compiles the frame."""

    def __init__(self) -> None:
        self._found = _torch.hooks_of_all_modules()

    def check(self) -> None:
        """Raises CaptureError if there are others by now, which would not run, or ones fewer, which would."""
        if self._found != _torch.hooks_of_all_modules():
            raise changes_hooks_of_all()
