"""Questions about one model share its capture."""

from collections.abc import Iterator

import pytest

from autopar.explanation import few_layers
from tests.support.staged import captured_once


@pytest.fixture(scope="package", autouse=True)
def one_capture() -> Iterator[None]:
    with captured_once(few_layers):
        yield
