"""The law of matrix products beside a table of kernels."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from benchmarks.accuracy.products import laws, table

DATA = Path(__file__).parents[3] / "shared" / "data" / "published2" / "simumax_kernels.csv"


def test_products_that_follow_the_law_have_no_error(tmp_path: Path) -> None:
    """1000 TFLOP/s of endless extents, half of it at an extent of 100; grouped products are at half of the law."""
    lines = ["op,gpu,dtype,M,N,K,tflops"]
    for m, n, k in itertools.product((64, 512, 4096), repeat=3):
        rate = 1000 * m * n * k / ((m + 100) * (n + 100) * (k + 100))
        lines += [f"matmul,one,bf16,{m},{n},{k},{rate}", f"grouped matmul,one,bf16,{m},{n},{k},{rate / 2}"]
    path = tmp_path / "kernels.csv"
    path.write_text("\n".join(lines))
    (law,) = laws(path)
    assert law.fit.half_size == pytest.approx(100, rel=1e-3)
    assert max(law.errors) < 1e-3
    assert law.grouped == pytest.approx([0.5] * 27, rel=1e-2)
    assert table([law])[-1].startswith("| one | 1000 | 100 | 13 | 0.0%")


@pytest.mark.skipif(not DATA.exists(), reason="the published kernels are not beside the project")
def test_published_products_are_within_a_tenth() -> None:
    found = laws(DATA)
    assert statistics.median(error for law in found for error in law.errors) < 0.1
