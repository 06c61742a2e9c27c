"""Proofs of one model under many plans share its capture: were two models wrongly taken for one, a proof would fail."""

from collections.abc import Iterator

import pytest

from autopar.proof import subject
from tests.support.staged import captured_once


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    with captured_once(subject):
        yield
