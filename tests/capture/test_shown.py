"""Functions with a cache are found without a change to what the garbage collector looks at."""

from __future__ import annotations

import functools
import gc

from autopar.capture.shown import all_cached


@functools.cache
def of_a_module(x: int) -> int:
    return x


class Owner:
    @staticmethod
    @functools.cache
    def of_a_class(x: int) -> int:
        return x


def test_frozen_objects_stay_frozen_and_their_caches_are_found() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    local = functools.cache(lambda x: x)
    found = set(map(id, all_cached()))
    # Of the frozen objects some may have been freed since, without being thawed.
    assert count - 100 < gc.get_freeze_count() <= count
    assert {id(of_a_module), id(Owner.of_a_class), id(local)} <= found
