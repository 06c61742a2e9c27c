"""Numbers of micro-batches that divide a batch, which may be large."""

from __future__ import annotations

import pytest

from autopar.search.stages.pipeline_settings import divisors


@pytest.mark.parametrize("n", [0, 1, 2, 12, 36, 97])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_divisors_of_a_large_prime_are_found_at_once() -> None:
    assert divisors(999_999_937) == [1, 999_999_937]
