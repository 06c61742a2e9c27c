import pytest
import torch

from autopar.errors import LayoutError
from autopar.ir import (
    WHOLE,
    Mesh,
    P,
    R,
    S,
    State,
    V,
    divides,
    format_layout,
    lies_in_chunks,
    local_factors,
    local_shape,
    parse_layout,
)
from autopar.ops.sharding import shard

MESH = Mesh.of({"dp": 2, "tp": 2})


@pytest.mark.parametrize("state", [R, V, P, S(0), S(1, 2), S(3, WHOLE)])
def test_state_reads_back(state):
    assert State.parse(str(state)) == state


@pytest.mark.parametrize("layout", [(R, R), (S(0), R), (S(0), S(0, 1)), (P, V), (S(1, WHOLE), R)])
def test_layout_reads_back(layout):
    assert parse_layout(format_layout(layout, MESH), MESH) == layout


def test_replicated_axes_are_left_out_of_the_text():
    assert format_layout((S(0), R), MESH) == "S(0)@dp"
    assert format_layout((R, R), MESH) == "R"


def test_unreadable_state():
    with pytest.raises(LayoutError, match=r"Cannot read the state 'S\[0\]'; write R, V, P, S\(0\)"):
        State.parse("S[0]")


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_empty_layout_is_not_taken_for_a_whole_tensor(text):
    with pytest.raises(LayoutError, match="A layout is empty; write R"):
        parse_layout(text, MESH)


def test_both_axes_on_one_factor_multiply():
    # 8 rows over 2 * 2 ranks are 2 each; the 5 columns stay
    assert local_shape(((8,), (5,)), (S(0), S(0)), MESH) == (2, 5)


def test_a_minor_factor_is_cut_inside_each_major_one():
    # (3, 4) * 16: the 4 is halved, 3 * 2 * 16 = 96 columns are left of 192
    dims = ((7,), (3, 4, 16))
    assert local_factors(dims, (S(1, 1), R), MESH) == ((7,), (3, 2, 16))
    assert local_shape(dims, (S(1, 1), R), MESH) == (7, 96)


def test_a_chunk_cuts_the_whole_dim():
    # 3 * 64 has an odd major factor, and 192 / 2 = 96
    assert not divides(((3, 64),), (S(0), R), MESH)
    assert divides(((3, 64),), (S(0, WHOLE), R), MESH)
    assert local_shape(((3, 64),), (S(0, WHOLE), R), MESH) == (96,)


def test_a_chunk_and_a_factor_do_not_share_a_dim():
    assert not divides(((4, 4),), (S(0, WHOLE), S(0)), MESH)


def test_chunks_are_what_nested_shards_give():
    """Each rank's part of 16 rows, against torch.chunk by one axis after the other."""
    mesh, rows = Mesh.parse("tp=4,tq=2"), torch.arange(16)
    for dims, layout in [
        (((4, 2, 2),), (S(0), S(0, 1))),
        (((4, 4),), (S(0), S(0, 1))),
        (((8, 2),), (S(0), S(0))),
        (((4, 2, 2),), (S(0), R)),
        (((4, 2, 2),), (R, S(0, 1))),
        (((2, 8),), (S(0, 1), S(0))),
    ]:
        parts = [rows] * 8
        for axis, state in enumerate(layout):
            if state.kind == "S":
                parts = [part.chunk(mesh.sizes[axis])[mesh.coordinates(rank)[axis]] for rank, part in enumerate(parts)]
        held = [shard(rows, dims, layout, mesh, rank) for rank in range(8)]
        assert lies_in_chunks(dims, layout, mesh) == all(map(torch.equal, held, parts)), layout
