"""Parts of different sizes: torch.chunk's, converted on all ranks at once."""

import itertools

import pytest
import torch

from autopar.ir import (
    WHOLE,
    Mesh,
    R,
    S,
    V,
    calls,
    divides,
    is_storable,
    local_shape,
    parse_layout,
    part_shape,
    uneven_axes,
)
from autopar.ir.share import on
from autopar.ops.sharding import shard
from autopar.proof.lockstep import convert

MESH = Mesh.parse("a=2,b=3")
DIMS = ((7,), (2, 6), (4,))  # a divides all but the first, and b the second alone


@pytest.mark.parametrize(("size", "ranks"), [(2, 3), (5, 4), (7, 3), (97, 3), (9, 7)])
def test_ranks_have_the_parts_of_torch_chunk(size: int, ranks: int) -> None:
    mesh, x = Mesh.parse(f"a={ranks}"), torch.arange(size)
    parts = [shard(x, ((size,),), (S(0, WHOLE),), mesh, rank) for rank in range(ranks)]
    for part, expected in itertools.zip_longest(parts, x.chunk(ranks), fillvalue=x[:0]):
        assert torch.equal(part, expected)
    shapes = [part_shape(((size,),), (S(0, WHOLE),), mesh, rank) for rank in range(ranks)]
    assert shapes == [tuple(part.shape) for part in parts]
    assert [on(local_shape(((size,),), (S(0),), mesh), rank) for rank in range(ranks)] == shapes


def test_one_axis_alone_cuts_a_dim_in_different_sizes() -> None:
    def can(text: str) -> bool:
        return is_storable(DIMS, parse_layout(text, MESH), MESH)

    assert can("S(0.*)@a") and can("S(0.*)@b") and can("S(0.*)@a S(1.*)@b")
    assert can("S(1.*)@a S(0.*)@b")  # a divides 2 x 6
    assert not can("S(0.*)@a S(0.*)@b") and not can("S(1)@a S(1.*)@b")
    assert can("S(0)@a") and not can("S(0)@a S(0)@b")
    assert not can("S(1)@b")  # whose parts, of 2 x 6 entries, are not those of torch.chunk
    assert not can("S(0.*)@a O(1)@b")
    assert not is_storable(((1,), (4,)), parse_layout("S(0.*)@a", MESH), MESH)


def test_a_part_is_padded_and_what_is_gathered_is_cut() -> None:
    found = calls(DIMS, (S(0, WHOLE), R), (V, R), MESH)
    assert [(each.name, each.backward, each.fits) for each in found] == [
        ("fit", "fit", (4, 12, 4)),
        ("all_gather", "reduce_scatter", ()),
        ("fit", "fit", (7, 12, 4)),
    ]


def test_what_stays_in_parts_is_not_touched() -> None:
    (found,) = calls(DIMS, (R, S(0, WHOLE)), (V, S(0, WHOLE)), MESH)
    assert (found.name, found.backward) == ("vary", "all_reduce")


STATES = [R, S(0, WHOLE), S(1), S(1, 1), S(1, WHOLE), S(2), S(2, WHOLE)]
STORED = [
    layout
    for layout in itertools.product(STATES, STATES)
    if is_storable(DIMS, layout, MESH) and uneven_axes(DIMS, layout, MESH)
]
SPLITS = [S(0), S(1), S(1, 1), S(2)]
SPLIT = [layout for layout in itertools.product([R, *SPLITS], [R, *SPLITS]) if uneven_axes(DIMS, layout, MESH)]


@pytest.mark.parametrize("source", [*STORED, *SPLIT], ids=str)
def test_values_and_gradients_of_every_use_are_those_of_the_whole(source) -> None:
    """Every rank weighs what it uses by numbers of its own, and the loss is the sum over all ranks."""
    torch.manual_seed(0)
    x = torch.randn(7, 12, 4, dtype=torch.float64)
    weights = torch.randn(MESH.size, *x.shape, dtype=torch.float64)
    targets = [*itertools.product([V, *SPLITS], [V, *SPLITS])]
    if source in STORED:  # which no op takes in the parts in which it is stored
        targets = [target for target in targets if divides(DIMS, target, MESH)]
    for target in targets:
        own = [shard(x, DIMS, source, MESH, rank).clone().requires_grad_() for rank in range(MESH.size)]
        found = convert(own, DIMS, source, target, MESH)
        weighed = [shard(w, DIMS, target, MESH, rank) for rank, w in enumerate(weights)]
        for rank, each in enumerate(found):
            assert torch.equal(each, shard(x, DIMS, target, MESH, rank))
        sum((each * w).sum() for each, w in zip(found, weighed, strict=True)).backward()
        whole = _gathered(weighed, target)
        for rank, each in enumerate(own):
            assert each.grad is not None
            expected = shard(whole, DIMS, source, MESH, rank)
            torch.testing.assert_close(each.grad, expected, rtol=0, atol=1e-12)


def _gathered(weighed, target) -> torch.Tensor:
    """The gradient of the whole tensor: what every rank adds to the entries that it uses."""
    total = torch.zeros(7, 12, 4, dtype=torch.float64)
    index = torch.arange(total.numel()).reshape(total.shape)
    for rank, each in enumerate(weighed):
        total.view(-1)[shard(index, DIMS, target, MESH, rank).reshape(-1)] += each.reshape(-1)
    return total
