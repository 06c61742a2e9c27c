"""Ranks of their own: accelerate reads its process group from environment variables, which other tests do without."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.runtime.gloo_ranks import Ranks, kept_ranks

os.environ["ACCELERATE_USE_CPU"] = "true"


@pytest.fixture(scope="session")
def framework_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(2)


@pytest.fixture(scope="session")
def four_framework_ranks() -> Iterator[Ranks]:
    yield from kept_ranks(4)


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest) -> Callable[[int], Ranks]:
    """Gives two or four ranks, which start when they are first asked for."""
    names = {2: "framework_ranks", 4: "four_framework_ranks"}

    def found(count: int) -> Ranks:
        ranks: Ranks = request.getfixturevalue(names[count])
        return ranks

    return found
