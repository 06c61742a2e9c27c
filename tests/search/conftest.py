"""Searches over one model share its capture."""

from collections.abc import Iterator

import pytest

from autopar.api import front_door
from tests.support.staged import captured_once


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    with captured_once(front_door):
        yield
