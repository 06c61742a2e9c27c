"""Rows of public kernels, held against functions of the same signature in plain PyTorch (tests/support/kernels.py)."""

import math
from pathlib import Path

import pytest
from proof import _captured, labels_of, prove
from torch import Tensor

from autopar.analysis.factors import analyze
from autopar.rules.kernels import ROWS
from autopar.rules.trial import kept_bytes
from tests.support.kernels import KERNELS, applied


def test_every_row_has_a_stand_in_and_a_line_in_the_docs() -> None:
    assert sorted(KERNELS) == sorted(ROWS)
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    for name, row in ROWS.items():
        split = row.partition(" | flops")[0].replace("|", r"\|")
        assert f"| `{name}` | `{split}` |" in page, name


# One of every kind of row; the others are like them.
QUICK = ("FlashAttnFunc", "LigerFusedLinearCrossEntropyFunction", "LigerRopeFunction")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.endswith(QUICK) else pytest.mark.slow) for name in sorted(KERNELS)]
)
def test_a_kernel_is_split_as_its_row_says_and_keeps_as_many_bytes(name: str) -> None:
    run, kernel = applied(name), KERNELS[name]
    assert labels_of(run, *kernel.tensors, kind=name) == {"-", *kernel.splits.split()}
    graph = analyze(_captured(run, kernel.tensors)[1]).graph
    (op,) = (each for each in graph.ops if each.kind == name)
    assert not op.guess
    saved = (graph.tensors[x] for x in op.saved)
    priced = sum(math.prod(x.shape) * x.itemsize_bytes for x in saved)
    wanted = [i for i, x in enumerate(kernel.tensors) if x.is_floating_point()]
    assert priced == kept_bytes(lambda *x: as_tuple(run(*x)), kernel.tensors, wanted)
    assert prove(run, *kernel.tensors, kind=name) > len(kernel.splits.split())


def as_tuple(results: object) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)  # type: ignore[return-value]
