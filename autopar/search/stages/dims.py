"""Tensor parallelism in two and three dims as a choice of the search, where memory is tight.

Under the recipes `2d`, `2.5d` and `3d` (`autopar.search.request.several_axes`) every rank keeps a block of the weights
and a slice of the saved activations. With data and tensor parallelism on two axes less is sent where that fits, so that
the search tries them only where the bound on memory rules out its fastest plan:

    on a mesh whose recipe is open     every assignment of a row of `STARTS` to its axes       `starts`
    where the mesh is searched         tensor parallelism over two axes, with the rest dp      `settings_in_dims`

A try ends as soon as the step under the recipe without a bound on memory is no shorter than the best step so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir import Mesh, Plan
from autopar.search.request.recipes import resolve, split_recipe
from autopar.search.request.several_axes import SEVERAL_AXES
from autopar.search.stages.pipeline_settings import divisors
from autopar.units import format_seconds

# Rows of recipes over several axes. The last one is 3d with one rank along z: no weight is gathered (Pope et al. 2023,
# section 3.2.2, "2D weight-stationary").
STARTS: tuple[tuple[str, ...], ...] = (*SEVERAL_AXES.values(), SEVERAL_AXES["3d"][:2])
_NAMES = {rows: name for name, rows in SEVERAL_AXES.items()} | {STARTS[-1]: "3d"}
OUTER, INNER_AXIS, DATA_AXIS = "tp", "tq", "dp"  # axes of a searched mesh


def starts(named: Mapping[str, str], mesh: Mesh) -> Iterator[dict[str, str]]:
    """Every way to give a row of `STARTS` to axes with the recipe `auto`, as a recipe for every axis.

    Args:
        named: recipe of every axis of the mesh.
        mesh: mesh of a stage; its axes of one rank are left out.

    >>> [" ".join(each.values()) for each in starts({"x": "auto", "y": "auto"}, Mesh.parse("x=2,y=2"))]
    ['columns zero3', 'zero3 columns', 'tp+sp width', 'width tp+sp']
    """
    free = [axis for axis, size in mesh.axes if size > 1 and named[axis] == "auto"]
    for rows in STARTS:
        for axes in itertools.permutations(free, len(rows)):
            yield {**named, **dict(zip(axes, rows, strict=True))}


def settings_in_dims(ranks: int) -> Iterator[tuple[Mesh, dict[str, str]]]:
    """Meshes of two axes of tensor parallelism and one of data parallelism, each with a row of `STARTS`.

    >>> [str(mesh) for mesh, _ in settings_in_dims(4)], [*settings_in_dims(8)][-1][1]
    (['tp=2,tq=2', 'tp=2,tq=2'], {'tp': 'tp+sp', 'tq': 'width', 'dp': 'zero3'})
    """
    for data in divisors(ranks):
        for outer in divisors(ranks // data):
            sizes = (outer, ranks // data // outer, data)
            if min(sizes[:2]) > 1:
                axes = tuple(zip((OUTER, INNER_AXIS, DATA_AXIS), sizes, strict=True))
                for name in ("2.5d", "3d"):
                    rows = dict(zip((axis for axis, _ in axes), SEVERAL_AXES[name], strict=True))
                    yield (Mesh(axes if data > 1 else axes[:2]), {axis: rows[axis] for axis, size in axes if size > 1})


def words_of_dims(plan: Plan, other: float | None, seconds: float) -> str:
    """A sentence on why a plan has tensor parallelism in two or three dims.

    Args:
        plan: the plan, whose recipe names a row of every axis.
        other: seconds of the best step of other recipes that fits; None if none fits.
        seconds: seconds of a step of the plan.
    """
    rows = [row.name for row in resolve(split_recipe(plan.recipe)[1], plan.mesh)]
    against = (
        "nothing else fits"
        if other is None
        else f"without this recipe, the fastest plan that fits takes {format_seconds(other)}"
    )
    return (
        f"memory is tight, and over {plan.mesh} ({name_of(rows)}) a rank keeps a block of every large matrix and a "
        f"slice of the saved activations: a step takes {format_seconds(seconds)}, and {against}"
    )


def name_of(rows: Sequence[str]) -> str:
    """The recipe over several axes whose rows are among these."""
    found = [name for each, name in _NAMES.items() if not set(each) - {*rows}]
    return max(found, key=lambda name: (len(SEVERAL_AXES[name]), name), default="2d")
