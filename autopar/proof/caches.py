"""Tensors that functions cache: a reference in another arithmetic must not be made of them.

A function with `functools.lru_cache` gives a model the tensor that an earlier run has computed, in that run's
arithmetic. A capture records what the function computes, so that the program in float64 computes it in float64, and a
model in float64 would still be given the numbers of float32. What a reference computes is emptied after it, so that the
user's next run is not given numbers of float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autopar._torch import has_storage, storage_key
from autopar.capture.guards.caches import empty
from autopar.capture.guards.stdlib_views import all_cached, tensors_cached_by


class CachedTensors:
    """The caches of functions that hold tensors, and how often each had been asked until now.

    Args:
        captured: constants of a captured program; a cache that holds one of them gives the program the same numbers.
    """

    def __init__(self, captured: Iterable[Tensor]) -> None:
        known = set(map(storage_key, captured))
        self._asked = {
            x: x.cache_info().hits
            for x in all_cached()
            if (keys := set(map(storage_key, filter(has_storage, tensors_cached_by(x))))) and not keys & known
        }

    def used(self) -> list[Any]:
        """The functions whose caches have given a tensor since."""
        return [x for x, hits in self._asked.items() if x.cache_info().hits > hits]


@contextmanager
def emptied_after() -> Iterator[None]:
    """Context at whose end functions that have cached a new tensor inside of it are emptied."""
    before = {x: tensors_cached_by(x) for x in all_cached()}
    try:
        yield
    finally:
        clear(x for x in all_cached() if not {*map(id, tensors_cached_by(x))} <= {*map(id, before.get(x, []))})


def clear(cached: Iterable[Any]) -> None:
    """Empties caches, so the functions compute again."""
    for each in cached:
        empty(each)
