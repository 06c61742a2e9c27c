"""Recipes over several mesh axes: tensor parallelism in two and three dims, as one recipe of a single axis for each.

    {"x,y": "2d"}        the same as {"x": "columns", "y": "zero3"}

Take a product C = A B, with A of (m, k), B of (k, n) and C of (m, n). Every axis splits one of m, n and k:

    2d      x: n, y: m          SUMMA (van de Geijn and Watts 1997; Xu et al. 2021): A, B and C lie in q x q blocks.
                                Each rank gathers A along x and B along y, and C stays where it is.
    2.5d    x: n, y: m, z: m    2d on every layer of z, with a copy of B for each (Wang et al. 2021, Tesseract)
    3d      x: n, y: k, z: m    A is gathered along x, B along z, and C scattered along y (Agarwal et al. 1995; Bian
                                et al. 2021). x and y change places from one product to the next.

m is the batch, so that the recipe of its axis is `zero3`, which gathers weights around each use. SUMMA broadcasts
panels one after the other, where a plan gathers the whole operand before the product: a rank receives as many bytes,
and holds the gathered operand while the product runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.errors import RecipeError

# The recipe of each axis, in the order in which a user names the axes.
SEVERAL_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"2d": ("columns", "zero3"), "2.5d": ("columns", "zero3", "ddp"), "3d": ("tp+sp", "width", "zero3")}
)


def by_axis(recipe: Mapping[str, str]) -> dict[str, str]:
    """A recipe for every axis by itself, in place of those over several axes.

    Raises RecipeError for a wrong number of axes, and for an axis with two recipes.

    >>> by_axis({"dp": "ddp", "x,y": "2d"})
    {'dp': 'ddp', 'x': 'columns', 'y': 'zero3'}
    """
    found, asked = dict[str, str](), dict[str, str]()
    for key, name in recipe.items():
        axes = [axis.strip() for axis in key.split(",")]
        for axis, each in zip(axes, _names(name, axes), strict=True):
            if axis in found:
                raise RecipeError(
                    f"The axis {axis!r} is given two recipes, by {asked[axis]} and by {key!r}: {name!r}; leave one out."
                )
            found[axis], asked[axis] = each, f"{key!r}: {name!r}"
    return found


def over_mesh(name: str, axes: tuple[str, ...]) -> dict[str, str]:
    """The recipe of every axis of a mesh whose axes all belong to one recipe, such as `2d` on the mesh x=2,y=2."""
    return by_axis({",".join(axes): name})


def _names(name: str, axes: list[str]) -> tuple[str, ...]:
    """The recipe of each of these axes. Raises RecipeError unless `name` is one of this many axes."""
    if not isinstance(name, str) or name not in SEVERAL_AXES:  # a name that is not text is refused as unknown
        if len(axes) == 1:
            return (name,)
        remedy = ", ".join(f"{axis!r}: {name!r}" for axis in axes)
        raise RecipeError(
            f"The recipe {name!r} is for a single axis, but {','.join(axes)!r} names {len(axes)}. Write {{{remedy}}}; "
            f"the recipes over several axes are {', '.join(SEVERAL_AXES)}."
        )
    wanted = SEVERAL_AXES[name]
    if len(axes) != len(wanted):
        example = {2: "x,y", 3: "x,y,z"}[len(wanted)]
        raise RecipeError(
            f"The recipe {name!r} is for {len(wanted)} axes, but {','.join(axes)!r} names {len(axes)}. Write "
            f"recipe={{{example!r}: {name!r}}} on a mesh with these axes."
        )
    return wanted
