"""Meshes with an axis that is taken as a product of two: `tp=16` as `tp=8,tq=2`.

An op splits one factor (one named model dimension) along an axis. Two axes in place of one therefore let it split two
factors, as Shardy's sub-axes do. With grouped queries (Ainslie et al. 2023) the outer axis splits the key-value heads
to their end, and the inner one the queries of each head, while both ranks of it have the head's key and value whole, as
in Megatron-LM. So the parts of a tensor-parallel axis may be more than the key-value heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from autopar.ir import PIPELINE_AXIS, Graph, Mesh, Op, without_pipeline
from autopar.search.candidates.settings import INNER, TENSOR
from autopar.search.request.notes import head_factors
from autopar.search.request.recipe_rows import RecipeLike
from autopar.search.request.recipes import resolve, split_recipe
from autopar.search.request.request import Request
from autopar.units import format_seconds


class Grouping(NamedTuple):
    """Sizes of grouped-query attention.

    Attributes:
        heads: number of heads of keys and values.
        queries: number of heads of queries for each of them.
    """

    heads: int
    queries: int

    def inner_ranks(self, ranks: int) -> int:
        """Size of the inner one of two axes that split attention over `ranks` ranks; 1 if one axis does, or none can.

        >>> Grouping(8, 4).inner_ranks(16), Grouping(8, 4).inner_ranks(8), Grouping(8, 4).inner_ranks(64)
        (2, 1, 1)
        """
        inner, rest = divmod(ranks, self.heads)
        return inner if not rest and inner and self.queries % inner == 0 else 1


class Finer(NamedTuple):
    """A mesh with two axes in place of one.

    Attributes:
        mesh: the mesh.
        axis: the axis that it has two axes for.
        recipes: recipes to search on it, by axis.
    """

    mesh: Mesh
    axis: str
    recipes: list[dict[str, str]]


def grouping_of(graph: Graph) -> Grouping | None:
    """The grouped-query attention of a model; None if it has none, or several with different sizes."""
    heads = head_factors(graph)
    pairs = {
        (before, after)
        for tensor in graph.parameters.values()
        for dim in graph.tensors[tensor].factors
        for before, after in itertools.pairwise(dim)
        if before in heads
    }
    of_queries = {*heads, *_of_queries_alone(graph, {before for before, _ in pairs})}
    found = {
        Grouping(graph.factors[before].size, graph.factors[after].size)
        for before, after in pairs
        if after in of_queries
    }
    return found.pop() if len(found) == 1 else None


def _of_queries_alone(graph: Graph, heads: set[str]) -> Iterator[str]:
    """Factors that attention ops can split in the queries and the result, while keys and values stay whole."""
    for op in graph.ops:
        if any(leaf.factor in heads for work in op.work for leaf in work.batch):
            yield from _split_by_queries(op)


def _split_by_queries(op: Op) -> Iterator[str]:
    for choice in op.choices:
        queries, *others = (state.kind == "S" for state in choice.operands)
        if choice.splits and queries and not any(others) and choice.results[0].kind == "S":
            yield choice.factor


def inner_name(axis: str) -> str:
    """The name of the inner one of two axes that an axis is taken as.

    >>> inner_name("tp"), inner_name("x")
    ('tq', 'x_inner')
    """
    return INNER if axis == "tp" else f"{axis}_inner"


def refine(mesh: Mesh, axis: str, inner: int) -> Mesh:
    """The mesh with two axes in place of one, of which the second has `inner` ranks.

    >>> str(refine(Mesh.parse("dp=2,tp=16"), "tp", 2))
    'dp=2,tp=8,tq=2'
    """
    return mesh.with_split_axis(axis, inner_name(axis), inner)


def with_inner_axes(recipe: RecipeLike, mesh: Mesh, given: Mesh | None) -> RecipeLike:
    """The recipe for a mesh in which the search took an axis as two: both parts have the recipe of the axis.

    Args:
        recipe: recipe of the axes of a stage, which names the axes that the user knows.
        mesh: the mesh of a stage of the plan.
        given: the mesh that the user gave; its axes keep the recipe as it is.

    >>> with_inner_axes({"dp": "zero3", "tp": "tp"}, Mesh.parse("dp=2,tp=8,tq=2"), None)
    {'dp': 'zero3', 'tp': 'tp', 'tq': 'tp'}
    """
    known = given.names if given else ()
    inner = {inner_name(axis): axis for axis in mesh.names if inner_name(axis) in mesh.names}
    made = {name: axis for name, axis in inner.items() if name not in known}
    if not made:
        return recipe
    rows = zip(mesh.names, resolve(recipe, mesh), strict=True)
    named = {axis: row.name for axis, row in rows}
    return named | {name: named[axis] for name, axis in made.items()}


def words_of_heads(mesh: Mesh, axis: str, whole: float | None, seconds: float) -> str:
    """A sentence on why attention is split over two axes.

    Args:
        mesh: the refined mesh.
        axis: the axis that it has two axes for.
        whole: seconds of a step on the mesh with one axis; None where it has no plan.
        seconds: seconds of a step on the refined mesh.
    """
    sizes = dict(mesh.axes)
    outer, inner = sizes[axis], sizes[inner_name(axis)]
    against = "has no plan" if whole is None else f"takes {format_seconds(whole)}"
    return (
        f"{axis}={outer * inner} is two axes, {axis}={outer} for the {outer} key-value heads and "
        f"{inner_name(axis)}={inner} for the queries of each: a step takes {format_seconds(seconds)}, and with one "
        f"axis, which leaves these heads whole, it {against}"
    )


def of_given_mesh(graph: Graph, request: Request) -> Finer | None:
    """The mesh with one axis split in two for grouped-query attention, and the recipes to try on it.

    None if no axis needs it, if single ranks run ops, or if the request names what is split along it: by a pin, or by
    a recipe other than those of tensor parallelism.
    """
    mesh, grouping = request.mesh, grouping_of(graph) if request.refines else None
    if mesh is None or grouping is None:
        return None
    for axis, recipes in _open_axes(request, without_pipeline(mesh)).items():
        inner = grouping.inner_ranks(dict(mesh.axes)[axis])
        if inner > 1 and inner_name(axis) not in mesh.names:
            return Finer(refine(mesh, axis, inner), axis, recipes)
    return None


def _open_axes(request: Request, inside: Mesh) -> dict[str, list[dict[str, str]]]:
    """The axes that may be refined, with the recipes of all axes after that: those of its two parts are equal."""
    if request.has_lone_ops:  # they number the ranks of an axis
        return {}
    schedule, recipe = split_recipe(request.recipe)
    rows = zip(inside.names, resolve(recipe, inside), strict=True)
    named = {axis: row.name for axis, row in rows}
    asked = {**named, PIPELINE_AXIS: schedule} if schedule else named
    pins = [f"@{choice} " for choice in request.pins.values()]  # a choice may be an axis alone
    found = {}
    for axis, name in named.items():
        names = TENSOR if name == "auto" else (name,) if name in TENSOR else ()
        if names and not any(f"@{axis} " in pin for pin in pins):
            found[axis] = [{**asked, axis: each, inner_name(axis): each} for each in names]
    return found
