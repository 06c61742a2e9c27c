"""Functions with a cache under `compile`: they give what Python's cache gives, or are refused by their line."""

from __future__ import annotations

import pytest

from autopar.errors import CaptureError
from tests.support.odd.odd_caches import CACHES
from tests.support.scripts import by_compile, outcome
from tests.support.tables import often

CHANGING = {
    "cached function that fills a dict": "TABLE",
    "cached function that sets its own global": "SHIFT",
    "cached function that counts in a global": "COUNT",
}
STALE = ("cached tensor emptied after one change", "cached tensor whose global goes back")
EQUAL = [name for name in CACHES if name not in (*CHANGING, *STALE)]


OFTEN = {
    "cached tensor emptied after each change",
    "cached number emptied after one change",
    "cached number whose global goes back",
    "cached number that was asked before",
}


@pytest.mark.parametrize("name", often(EQUAL, OFTEN | {"cached function whose dict is written"}))
def test_a_cache_gives_what_it_gives_plainly(name: str) -> None:
    expected = outcome(CACHES[name])
    assert outcome(CACHES[name], by_compile) == expected


@pytest.mark.parametrize("name", STALE)
def test_a_tensor_that_only_an_old_cache_has_is_refused_by_its_line(name: str) -> None:
    with pytest.raises(CaptureError, match=r"weights in \S*odd_caches\.py:\d+ keeps its results"):
        outcome(CACHES[name], by_compile)


@pytest.mark.parametrize("name", CHANGING)
def test_a_function_that_changes_a_global_is_refused_by_its_line(name: str) -> None:
    changes = rf"changes the global {CHANGING[name]} \(read in \S*odd_caches\.py:\d+\)"
    with pytest.raises(CaptureError, match=changes):
        outcome(CACHES[name], by_compile)
