"""Objects of the standard library that show what others hold: how their contents are asked for, and which hide it."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from autopar._torch import pytree
from autopar.capture.guards.user_code import is_installed, is_users, is_users_type
from autopar.capture.guards.values import MISSING

Cached = type(functools.cache(len))
_Statistics = type(functools.cache(len).cache_info())
_TABLES = (types.MappingProxyType, collections.ChainMap, collections.UserDict)


def contents_of(value: Any) -> Callable[[], Any] | None:
    """The function that returns an object's visible contents; None for an object without any.

    A weak table is asked for the entries behind its weak references, which stay weak.
    """
    if isinstance(value, contextvars.ContextVar):
        return partial(value.get, MISSING)
    if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return partial(dict, vars(value)["data"])
    if isinstance(value, _TABLES):
        return partial(dict, value)
    return None


def is_weak(value: Any) -> bool:
    """Whether a value refers weakly to an object of the user's, which a guard would keep alive. Modules are guarded."""
    if type(value) in weakref.ProxyTypes:
        return True
    found = value() if isinstance(value, weakref.ref) else None
    return found is not None and not isinstance(found, nn.Module) and is_users_type(type(found))


def cached_by(value: Any) -> types.FunctionType | None:
    """The user's function whose results `functools.lru_cache` keeps in this object; None for another object."""
    function = getattr(value, "__wrapped__", None) if isinstance(value, Cached) else None
    if not isinstance(function, types.FunctionType):
        return None
    file = function.__code__.co_filename
    return function if is_users(file) and not is_installed(file) else None


def times_computed(value: Any) -> int:
    """How often a function with a cache was run since its cache was emptied."""
    return int(value.cache_info().misses)


def was_emptied(value: Any, times: int) -> bool:
    """Whether the cache of a function was emptied since the function had run this many times.

    Further runs alone, for other arguments, leave the results in the cache that a program was made from.
    """
    return times_computed(value) < times


def kept_by(cached: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple with the cached result for positional arguments, without running the function; () if there is none.

    Nothing is found in a cache that tells the types of arguments apart (`typed=True`).
    """
    is_alone = len(arguments) == 1 and type(arguments[0]) in (int, str)
    key = arguments[0] if is_alone else arguments
    held = (x for x in gc.get_referents(cached) if type(x) is dict and x is not vars(cached))
    is_kept = any(key in x for x in held) and not cached.cache_parameters()["typed"]
    return (cached(*arguments),) if is_kept else ()


def all_cached(seen: Iterable[Any] = ()) -> list[Any]:
    """All functions of the process with a cache of `functools`, among them those that somebody has seen."""
    return _CACHED.functions(seen)


class _AllCached:
    """The functions with a cache, looked for anew only where there may be others than the known ones.

    Each refers to its class and to the class of its statistics, so both have a reference more for every function that
    was made. References from elsewhere hardly change in number: they are those of modules that name the classes. Where
    as many went from both as functions were made, one of these that somebody has seen tells of it. A look through all
    objects takes as long as the capture of a small model.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        # Negative before the first look, and in an interpreter that does not count references to classes.
        self._references_from_elsewhere = [-1]
        self._frozen = _Frozen()

    def functions(self, seen: Iterable[Any]) -> list[Any]:
        """These functions.

        Args:
            seen: some of them.
        """
        known, before = list(self._known), self._references_from_elsewhere
        if _references(known) == before and min(before) >= 0 and all(x in self._known for x in seen):
            return known
        found = self._looked_for()
        self._known = weakref.WeakSet(found)
        self._references_from_elsewhere = _references(found)
        return found

    def _looked_for(self) -> list[Any]:
        """All functions with a cache.

        The garbage collector finds what refers to a class in half the time of a list of all objects. It does not see
        what `gc.freeze` has put aside. That stays as it is, and modules are asked instead.
        """
        found = gc.get_referrers(Cached, self._frozen)
        all_found = (*self._known, *self._frozen.functions(found), *found)
        return list({id(x): x for x in all_found if type(x) is Cached}.values())


def _references(known: list[Any]) -> list[int]:
    """How often others than the known functions refer to the classes that every function with a cache refers to."""
    return [sys.getrefcount(each) - len(known) for each in (Cached, _Statistics)]


class _Frozen:
    """The functions with a cache that `gc.freeze` has put aside, found anew after every freeze.

    Without a freeze their number cannot grow: what is made later is not frozen. A witness, which is frozen with all
    else, shows whether there was one: asking for the number of frozen objects counts all of them, and looking through
    the modules takes as long as the capture of a small model.
    """

    def __init__(self) -> None:
        self._witness: list[_Frozen] = []
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()

    def functions(self, seen: list[Any]) -> list[Any]:
        """These functions.

        Args:
            seen: objects that refer to this one and that the garbage collector sees.
        """
        if not any(x is self._witness for x in seen):
            self._witness = [self]
            self._functions.update(_cached_in_modules() if gc.get_freeze_count() else ())
        return list(self._functions)


_CACHED = _AllCached()


def _cached_in_modules() -> Iterator[Any]:
    """Functions with a cache among the globals of all modules, and among the methods of the classes there."""
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            # by type(): isinstance would wake what a module puts in place of an import
            for x in (value, *(vars(value).values() if issubclass(type(value), type) else ())):
                function = x.__func__ if type(x) in (staticmethod, classmethod) else x
                if type(function) is Cached:
                    yield function


def tensors_cached_by(value: Any) -> list[Tensor]:
    """The tensors that a function's cache holds, by themselves or in containers."""
    found: list[Tensor] = []
    waiting = [x for x in gc.get_referents(value) if not callable(x)]
    seen: set[int] = set()
    while waiting:
        x = waiting.pop()
        # A tensor is tracked by the garbage collector, and a table of texts is not.
        if not gc.is_tracked(x) or id(x) in seen:
            continue
        seen.add(id(x))
        if type(x) in (dict, list, tuple):
            waiting.extend(x.values() if type(x) is dict else x)
        elif type(x) not in (set, frozenset):
            found.extend(leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))
    return found
