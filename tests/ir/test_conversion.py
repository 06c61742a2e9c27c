"""Conversions, on small tensors and on all ranks at once."""

import itertools
import math

import pytest
import torch

from autopar.ir import (
    WHOLE,
    Mesh,
    O,
    P,
    R,
    S,
    V,
    calls,
    calls_between,
    divides,
    local_elements,
    nested,
    parse_layout,
    steps,
    steps_of,
)
from autopar.ir.conversion import TRANSITIONS
from autopar.ops.sharding import shard
from autopar.proof.lockstep import convert

STATES = [R, V, P, S(0), S(0, 1), S(1), O(0), O(1)]
DIMS = ((4, 4), (8,))


def text(source, target):
    return words(steps(source, target))


def words(found):
    return [f"{s.axis}:{s.source}->{s.target} {s.transition.forward}" for s in found]


def text_of(dims, mesh, source, target):
    mesh = Mesh.parse(mesh)
    layouts = [parse_layout(each, mesh) for each in (source, target)]
    return words(steps_of(dims, *layouts, mesh))


def test_one_axis_takes_one_step():
    for source, target in itertools.product(STATES, STATES):
        assert len(steps((source,), (target,))) == (source != target)


def test_tensor_parallel_and_sequence_parallel_by_name():
    assert text((P,), (R,)) == ["0:P->R all_reduce"]
    assert text((P,), (S(1),)) == ["0:P->S(1) reduce_scatter"]
    assert text((S(1),), (V,)) == ["0:S(1)->V all_gather"]


def test_leaving_the_major_axis_unnests_the_minor_one():
    # See [Note: nested splits]: dp cannot leave S(0) while tp cuts dp's part.
    assert text((S(0), S(0)), (R, S(0))) == ["1:S(0)->R all_gather", "0:S(0)->R all_gather", "1:R->S(0) shard"]


def test_the_minor_axis_reorders_where_it_divides_the_major_one():
    assert text_of(((16,),), "a=4,b=2", "S(0)@a S(0)@b", "V@a S(0)@b") == [
        "0:S(0)->V all_gather",
        "1:S(0)->S(0) all_to_all",
    ]
    assert text_of(((16,),), "a=4,b=2", "P@a S(0)@b", "S(0)@a S(0)@b") == [
        "1:S(0)->S(0) all_to_all",
        "0:P->S(0) reduce_scatter",
    ]
    assert text_of(((64,), (8,)), "ep=8,dp=8", "S(0)@ep S(0)@dp", "S(1)@ep S(0)@dp") == [
        "0:S(0)->S(1) all_to_all",
        "1:S(0)->S(0) all_to_all",
    ]


def test_else_it_parks_on_a_free_factor():
    assert text_of(((16,), (8,)), "a=2,b=4", "S(0)@a S(0)@b", "V@a S(0)@b") == [
        "1:S(0)->S(1) all_to_all",
        "0:S(0)->V all_gather",
        "1:S(1)->S(0) all_to_all",
    ]


def test_else_it_unnests():
    assert text_of(((16,), (2,)), "a=2,b=4", "S(0)@a S(0)@b", "V@a S(0)@b") == [
        "1:S(0)->R all_gather",
        "0:S(0)->V all_gather",
        "1:R->S(0) shard",
    ]


def test_reordering_sends_an_eighth_of_unnesting():
    # 64 rows over 8 x 8 ranks: one row each. Two all-to-alls send 7/8 of a row each; un-nesting gathers 7 rows more,
    # and sends 7/8 of these 8 to other ranks.
    mesh, dims = Mesh.parse("ep=8,dp=8"), ((64,), (8,), (4096,))
    source, target = ((S(0), S(0)), (S(1), S(0)))
    moved = [
        7 / 8 * max(local_elements(dims, x, mesh) for x in (before, after))
        for before, _, after in calls_between(dims, source, target, mesh)
    ]
    row = 8 * 4096
    assert sum(moved) == 2 * 7 / 8 * row
    assert sum(moved) == (7 + 7 / 8 * 8) * row / 8


def test_leaving_the_minor_axis_does_not():
    assert text((S(0), S(0)), (S(0), R)) == ["1:S(0)->R all_gather"]


def test_reductions_come_before_gathers():
    # the all-gather over dp then moves the reduced tensor, and both move half as much
    assert text((S(0), P), (V, S(1))) == ["1:P->S(1) reduce_scatter", "0:S(0)->V all_gather"]


def test_a_chunk_is_gathered_before_a_factor_is_split():
    assert text((S(0, WHOLE), R), (V, S(0))) == ["0:S(0.*)->V all_gather", "1:R->S(0) shard"]


def test_every_transition_has_the_transpose_of_its_transpose():
    # S -> V gathers and reduce-scatters back; P -> S reduce-scatters and gathers back
    pairs = {(t.forward, t.backward) for t in TRANSITIONS.values()}
    assert all((backward, forward) in pairs for forward, backward in pairs)


def values(full, layout, mesh, dims=DIMS):
    """Local tensors of all ranks whose sum or union is `full`."""
    ranks = [shard(full, dims, layout, mesh, rank).clone() for rank in range(mesh.size)]
    for rank, local in enumerate(ranks):
        if any(s == P and mesh.coordinates(rank)[axis] for axis, s in enumerate(layout)):
            local.zero_()
    return ranks


@pytest.mark.parametrize("shape", [{"a": 2}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}])
def test_every_conversion_on_every_mesh(shape):
    mesh = Mesh.of(shape)
    full = torch.arange(128.0, dtype=torch.float64).reshape(16, 8)
    layouts = [x for x in itertools.product(STATES, repeat=len(shape)) if divides(DIMS, x, mesh)]
    pairs = list(itertools.product(layouts, layouts))
    for source, target in pairs[:: 1 if len(shape) < 3 else 71]:
        got = convert(values(full, source, mesh), DIMS, source, target, mesh)
        want = values(full, target, mesh)
        if P not in target:
            assert all(map(torch.equal, got, want)), (source, target)
        else:
            assert torch.equal(summed(got, target, mesh), summed(want, target, mesh)), (source, target)


@pytest.mark.parametrize("text", ["a=4,b=2", "a=2,b=4", "a=4,b=2,c=2", "a=2,b=3,c=2", "a=2,b=4,c=2"])
def test_conversions_of_nested_splits(text):
    """A matrix of 16 rows, where the sizes of axes differ, and others over three axes."""
    mesh = Mesh.parse(text)
    dims = ((16,), (4,)) if len(mesh.axes) == 2 else ((mesh.size * 2,), (mesh.size,))
    full = torch.arange(float(math.prod(sizes[0] for sizes in dims))).reshape(*(f[0] for f in dims))
    layouts = [x for x in itertools.product([V, S(0), S(1)], repeat=len(mesh.axes))]
    layouts = [x for x in layouts if divides(dims, x, mesh)]
    for source, target in itertools.product(layouts, layouts):
        got = convert(values(full, source, mesh, dims), dims, source, target, mesh)
        assert all(map(torch.equal, got, values(full, target, mesh, dims))), (source, target)


@pytest.mark.parametrize("text", ["a=4,b=2", "a=2,b=4", "a=2,b=2,c=2"])
def test_conversions_between_orders_of_the_axes(text):
    """Every tensor may have the axes that split it in an order of its own; the rows of each rank tell which it has."""
    mesh = Mesh.parse(text)
    dims = ((16,), (8,)) if len(mesh.axes) == 2 else ((16,), (4,))
    full = torch.arange(float(math.prod(sizes[0] for sizes in dims))).reshape(*(f[0] for f in dims))
    states = itertools.product([V, P, S(0), S(1)], repeat=len(mesh.axes))
    orders = list(itertools.permutations(range(len(mesh.axes))))
    layouts = list({nested(x, order): None for x in states for order in orders})
    layouts = [x for x in layouts if divides(dims, x, mesh)]
    pairs = list(itertools.product(layouts, layouts))
    assert any(x.depth == 2 for layout in layouts for x in layout) == (len(mesh.axes) == 3)
    for source, target in pairs[:: 1 if len(mesh.axes) < 3 else 13]:
        got = convert(values(full, source, mesh, dims), dims, source, target, mesh)
        want = values(full, target, mesh, dims)
        if P not in target:
            assert all(map(torch.equal, got, want)), (source, target)
        else:
            assert torch.equal(summed(got, target, mesh), summed(want, target, mesh))


@pytest.mark.parametrize("dims", [((144,),), ((144,), (144,)), ((144,), (144,), (144,))])
@pytest.mark.parametrize("sizes", list(itertools.product((2, 3, 4), repeat=3)))
def test_every_conversion_ends(sizes, dims):
    """Also where no axis divides another, so that none can cross it; with and without a dim to park on."""
    mesh = Mesh(tuple(zip("abc", sizes, strict=True)))
    states = [R, P, *(S(dim) for dim in range(len(dims)))]
    layouts = list(itertools.product(states, repeat=3))
    for source, target in list(itertools.product(layouts, layouts))[::17]:
        layout = list(source)
        for step in steps_of(dims, source, target, mesh):
            assert layout[step.axis] == step.source
            layout[step.axis] = step.target
        assert tuple(layout) == target


def test_an_axis_waits_for_a_major_one_that_cannot_cross_it():
    """a, of 2 ranks, cannot enter or leave the rows above b, of 4, while b splits them; c would be in its way."""
    mesh, dims = "a=2,b=4,c=2", ((64,), (64,))
    assert text_of(dims, mesh, "S(0)@b S(0)@c", "S(0)@a S(0)@b S(0)@c") == [
        "2:S(0)->S(1) all_to_all",
        "1:S(0)->R all_gather",
        "0:R->S(0) shard",
        "1:R->S(0) shard",
        "2:S(1)->S(0) all_to_all",
    ]
    assert text_of(dims, mesh, "S(0)@a S(0)@b", "S(1)@a S(0)@b S(1)@c") == [
        "1:S(0)->R all_gather",
        "0:S(0)->S(1) all_to_all",
        "1:R->S(0) shard",
        "2:R->S(1) shard",
    ]


def test_an_order_of_a_tensor_saves_the_detour():
    """b may leave a factor that a splits too by one all-gather, wherever it stands in the mesh."""
    mesh = "a=2,b=4"
    assert text_of(((16,),), mesh, "S(0)@b S(0)@a", "S(0)@b V@a") == ["0:S(0)->V all_gather"]
    assert text_of(((16,),), mesh, "P@a P@b", "S(0)@b S(0)@a") == [
        "1:P->S(0) reduce_scatter",
        "0:P->S(0) reduce_scatter",
    ]


def test_another_order_of_the_same_axes_unnests():
    assert text_of(((16,),), "a=2,b=2", "S(0)@a S(0)@b", "S(0)@b S(0)@a") == [
        "1:S(0)->R all_gather",
        "0:S(0)->R all_gather",
        "1:R->S(0) shard",
        "0:R->S(0) shard",
    ]


def summed(ranks, layout, mesh):
    """The sum over the partial axes, for rank 0's coordinates elsewhere."""
    picked = [
        local
        for rank, local in enumerate(ranks)
        if all(s == P or not i for s, i in zip(layout, mesh.coordinates(rank), strict=True))
    ]
    return torch.stack(picked).sum(0)


def test_a_major_factor_needs_no_view_and_a_minor_one_does():
    mesh = Mesh.of({"a": 2})
    (major,) = calls(DIMS, (S(0),), (V,), mesh)
    (minor,) = calls(DIMS, (S(0, 1),), (V,), mesh)
    assert (major.dims, major.before, major.after) == ((0,), None, None)
    # local rows are (4, 2): gathered along the second, and merged to 16 rows
    assert (minor.dims, minor.before, minor.after) == ((1,), (4, 2, 8), (16, 8))
