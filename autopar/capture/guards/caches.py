"""The content that Python's function caches would have if no capture had run these functions again.

[Note: caches that a capture does not fill]
Dynamo runs the function behind a `functools.lru_cache` each time that it compiles. `autopar.compile` asks the cache,
and then has to empty it of tensors without values. Either way the function runs again with the values that its globals
have by then, where Python would return what it gave for the first values, until somebody empties its cache. So we
note what a function has read, and what it gave, since its cache was emptied.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from autopar._torch import FakeTensor
from autopar.capture.guards.refusals import runs_cached
from autopar.capture.guards.stdlib_views import all_cached, cached_by, tensors_cached_by
from autopar.capture.guards.user_code import globals_of, is_users
from autopar.capture.guards.values import MISSING, is_same, seen


@dataclass(frozen=True, eq=False)
class Cache:
    """The content that Python's cache of one function would have since it was last cleared.

    Attributes:
        reads: the globals that the function names, as they were when a capture first ran it.
        results: key of a call -> its result.
    """

    reads: dict[str, Any]
    results: dict[tuple[Any, ...], Any] = field(default_factory=dict)


_CACHES: weakref.WeakKeyDictionary[Any, Cache] = weakref.WeakKeyDictionary()


def cache_of(cached: Any, reads: dict[str, Any] | None = None) -> Cache:
    """The record of a cached function since its cache was last cleared; a new record begins with these globals."""
    found = _CACHES.get(cached)
    if found is not None:
        return found

    def cache_clear() -> None:
        empty(cached)
        _CACHES.pop(cached, None)

    cached.cache_clear = cache_clear
    return _CACHES.setdefault(cached, Cache(reads_of(cached) if reads is None else reads))


def empty(cached: Any) -> None:
    """Empties a cache without a change of its `Cache` record, since Python would still return the cached results."""
    type(cached).cache_clear(cached)


def reads_of(cached: Any) -> dict[str, Any]:
    """The globals that a function with a cache names, as they are; the same dict as long as none changes."""
    before = _CACHES.get(cached)
    if before is not None and not changed(cached, before):
        return before.reads
    return {name: seen(value) for name, value in _globals(_function(cached))}


def changed(cached: Any, cache: Cache) -> str:
    """The first global that has changed since the notes began; "" if none has."""
    now = dict(_globals(_function(cached)))
    different = (n for n, x in cache.reads.items() if not is_same(now.get(n, MISSING), x))
    return next(different, "")


def stale(cached: Any, read: str) -> Exception:
    """The error for a function that was run again, though Python would return an old result; `read` has changed."""
    function = _function(cached)
    code = function.__code__
    return runs_cached(function.__qualname__, f"{code.co_filename}:{code.co_firstlineno}", read)


def forget_traced(read: Iterable[Any]) -> list[Any]:
    """Empties caches of functions in which a trace has left tensors without values, which serve nobody else.

    Args:
        read: functions with a cache that the trace is known to have read.

    Returns:
        These functions, without those of installed libraries, to be checked by `refuse_stale`.
    """
    traced = [x for x in all_cached(read) if type(x).cache_info(x).currsize and _is_own(x) and _holds_traced(x)]
    for cached in traced:
        empty(cached)
    return [x for x in traced if cached_by(x) is not None]


def refuse_stale(run: Iterable[Any]) -> None:
    """Raises CaptureError if a function ran with globals other than those behind the results in Python's cache."""
    for cached in run:
        if read := changed(cached, cache_of(cached)):
            raise stale(cached, read)


def _is_own(cached: Any) -> bool:
    code = getattr(inspect.unwrap(cached), "__code__", None)
    return code is not None and is_users(code.co_filename)


def _holds_traced(cached: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in tensors_cached_by(cached))


def _function(cached: Any) -> FunctionType:
    function = cached_by(cached)
    assert function is not None, f"{cached} keeps no results of a function of the user's"
    return function


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, without functions, classes and modules."""
    for name, _ in globals_of(function.__code__):
        value = function.__globals__.get(name, MISSING)
        if not callable(value) and not isinstance(value, ModuleType):
            yield name, value
