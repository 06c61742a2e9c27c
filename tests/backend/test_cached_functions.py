"""Functions with a cache under torch.compile give what Python's cache would give, or are refused by their line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from autopar.errors import CaptureError
from tests.support.odd.odd_caches import CACHES, scale
from tests.support.scripts import by_backend_with_loss, outcome

EQUAL = (
    "cached function that fills a dict",
    "cached function that sets its own global",
    "cached number emptied after each change",
    "cached tensor emptied after each change",
)
STALE = [name for name in CACHES if name not in EQUAL]
ONE_RANK = {"mesh": {"dp": 1}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", EQUAL)
def test_a_fresh_cache_trains_as_it_does_plainly(name: str) -> None:
    expected = outcome(CACHES[name])
    assert outcome(CACHES[name], by_backend_with_loss, ONE_RANK) == expected


@pytest.mark.parametrize("name", STALE)
def test_a_stale_cache_is_refused_by_its_line(name: str) -> None:
    with pytest.raises(CaptureError, match=r"odd_caches\.py:\d+ keeps its results"):
        outcome(CACHES[name], by_backend_with_loss, ONE_RANK)


def test_a_cache_is_emptied_as_before() -> None:
    outcome(CACHES["cached number emptied after each change"], by_backend_with_loss, ONE_RANK)
    torch.compiler.reset()
    scale.cache_clear()
    assert scale() == scale() and scale.cache_info()[:2] == (1, 1)
    scale.cache_clear()
    assert scale.cache_info()[:2] == (0, 0)
