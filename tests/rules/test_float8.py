"""The letters of a rounded product: its two matrix dims split between tiles alone."""

import pytest
import torch
from torch import fx

from autopar import _torch, rules
from autopar.ops import float8  # noqa: F401  (it defines the op)
from autopar.rules.spec import Spec


def spec_of(rows: int, inner: int, columns: int) -> Spec:
    graph = fx.Graph()
    shapes = {"x": (2, rows, inner), "weight": (columns, inner)}
    operands = [graph.placeholder(name) for name in shapes]
    for node, shape in zip(operands, shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    node = graph.call_function(_torch.autopar_op("float8_linear"), tuple(operands))
    node.meta["val"] = torch.empty((2, rows, columns), device="meta")
    found, has_rule = rules.spec(node)
    assert has_rule
    return found


def test_tiles_are_letters_of_their_own():
    spec = spec_of(rows=3, inner=512, columns=256)
    assert spec.operands[1] == (("j", "j_in_tile"), ("k", "k_in_tile"))
    assert spec.results[0][-1] == ("j", "j_in_tile")
    assert {x: spec.sizes[x] for x in ("j", "k", "j_in_tile", "k_in_tile")} == {
        "j": 2,
        "k": 4,
        "j_in_tile": 128,
        "k_in_tile": 128,
    }
    assert spec.flops == 2 * (2 * 3 * 512 * 256)


@pytest.mark.parametrize(("inner", "columns", "splits"), [(512, 256, "jk"), (128, 256, "j"), (128, 128, "")])
def test_a_dim_of_one_tile_stays_whole(inner, columns, splits):
    spec = spec_of(rows=3, inner=inner, columns=columns)
    assert {x for x in spec.sizes if spec.splittable(x) and x[0] in "jk"} == set(splits)
