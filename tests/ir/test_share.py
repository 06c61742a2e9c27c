"""Sizes by rank: their arithmetic is that of every rank, and no text of them is mistaken for a number."""

import copy

import pytest
import torch

from autopar.ir import Mesh, S, local_shape, nested, parse_layout
from autopar.ir.share import Share, on


def test_arithmetic_is_that_of_every_rank() -> None:
    rows = Share(11, 11, 10)
    assert [on([rows * 4 + 1, 40 - rows, -(-rows // 4), rows % 2], rank) for rank in range(3)] == [
        (45, 29, 3, 1),
        (45, 29, 3, 1),
        (41, 30, 3, 0),
    ]
    assert -(-rows // 4) == 3 and not isinstance(-(-rows // 4), Share)


def test_a_share_equals_no_number_and_its_text_is_none() -> None:
    rows = Share(2, 2, 1)
    assert rows != 2 and (rows, 3) != (2, 3) and copy.deepcopy(rows) == rows == Share(2, 2, 1)
    with pytest.raises(NameError):
        eval(f"[{rows}]", {})


@pytest.mark.parametrize("text", ["S(0)@a S(0)@b", "S(0)@b S(0)@a"])
def test_each_axis_cuts_what_the_more_major_ones_leave(text: str) -> None:
    mesh = Mesh.parse("a=3,b=2")
    layout = parse_layout(text, mesh)
    (rows,) = local_shape(((32,),), layout, mesh)
    major, minor = (3, 2) if text.startswith("S(0)@a") else (2, 3)
    parts = [len(part) for whole in torch.arange(32).chunk(major) for part in whole.chunk(minor)]
    found = [on([rows], mesh.rank_at((i, j) if major == 3 else (j, i)))[0] for i in range(major) for j in range(minor)]
    assert found == parts and nested(layout, (0, 1)) == (S(0), S(0))
