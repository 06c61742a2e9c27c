"""Garbage collection while planning: rarer inside, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autopar.planning.garbage import collecting_rarely


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rarer_inside_and_as_before_after_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError), collecting_rarely():
        assert gc.get_threshold()[0] > 700
        raise ValueError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_who_collects_never_or_more_rarely_is_left_alone(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    with collecting_rarely():
        assert gc.get_threshold() == (first, 10, 10)


def test_of_two_threads_the_first_puts_thresholds_back() -> None:
    before = gc.get_threshold()
    first, second = collecting_rarely(), collecting_rarely()
    for context in (first, second):
        context.__enter__()
    for context in (first, second):
        context.__exit__(None, None, None)
    assert gc.get_threshold() == before
