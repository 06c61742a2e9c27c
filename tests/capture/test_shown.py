"""Functions with a cache are found without a change to what the garbage collector looks at."""

from __future__ import annotations

import functools
import gc
from unittest import mock

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
    local = functools.cache(lambda x: x)
    # A count of frozen objects would not do: some may be freed meanwhile without being thawed.
    with mock.patch.object(gc, "unfreeze") as thaw:
        found = set(map(id, all_cached()))
    thaw.assert_not_called()
    assert gc.get_freeze_count() > 0
    assert {id(of_a_module), id(Owner.of_a_class), id(local)} <= found
