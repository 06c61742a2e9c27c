"""Ranks of their own: accelerate reads its process group from environment variables, which other tests do without."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks, kept_ranks

os.environ["ACCELERATE_USE_CPU"] = "true"


@pytest.fixture(scope="session")
def framework_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


@pytest.fixture(scope="session")
def four_framework_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(4)
