"""The parts of a model that stages are made of."""

import pytest

from autopar.ir.recompute import Recompute
from autopar.pipeline.parts import Part, ends_of_repeats

# An embedding, two blocks cut in halves, a block that is whole, and a head.
PARTS = [
    Part("embed", 0, False, 0),
    *(Part(f"op{i}", block, True, i) for i, block in enumerate((1, 1, 2, 2, 3), start=1)),
    Part("head", 4, False, 6),
]


@pytest.mark.parametrize(
    ("recompute", "ends"),
    [
        ("none", [0, 1, 2, 3, 4, 5, 6]),
        (1, [3, 3, 3, 5, 5, 6, 6]),
        (2, [5, 5, 5, 6, 6, 6, 6]),
        ("full", [6, 6, 6, 6, 6, 6, 6]),
    ],
)
def test_a_stage_recomputes_its_first_blocks(recompute: Recompute, ends: list[int]) -> None:
    assert ends_of_repeats(PARTS, recompute) == ends
