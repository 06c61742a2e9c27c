"""Ranks shared by all tests of a session: starting processes is slower than most of what they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.gloo_ranks import Ranks, kept_ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(4)
