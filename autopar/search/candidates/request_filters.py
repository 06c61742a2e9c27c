"""Which settings of the outer search a request allows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.ir import Mesh
from autopar.ir.recompute import Recompute, is_saved_option
from autopar.search.candidates.settings import DATA, TENSOR, ClusterSetting
from autopar.search.request.options import AXES
from autopar.search.request.recipe_rows import ALIASES
from autopar.search.request.request import Request


def recomputations(request: Request) -> tuple[Recompute | float, ...]:
    """The kinds of recomputation that a request allows. "none" with "full" also allows every number of blocks."""
    if "recompute" in request.without:
        return ("none",)
    asked = request.recompute
    if asked is None:
        return ("none", "full")
    return ("full",) if is_saved_option(asked) else (asked,)


def has_closed_form(request: Request) -> bool:
    """Whether the estimates of `autopar.search.candidates.candidates` support the recipe of every axis."""
    inside = request.inside
    given = {"": inside} if isinstance(inside, str) else inside
    known = {"": (*DATA, *TENSOR), "dp": DATA, "tp": TENSOR}
    return all(axis in known and ALIASES.get(name, name) in ("auto", *known[axis]) for axis, name in given.items())


def allows(request: Request, setting: ClusterSetting, devices_per_node: int) -> bool:
    """Whether a setting satisfies all constraints of a request."""
    return (
        (setting.cp == 1 or request.leaves_axes_open)
        and _allows_mesh(request, setting)
        and _allows_recipe(request, setting)
        and request.chosen_micro_batches in (None, setting.micro_batches)
        and _allows_schedule(request, setting)
        and stays_inside(request, setting.mesh, devices_per_node)
        and not any(_uses(setting, what) for what in request.without)
        and not any(_size(setting, axis) == 1 for axis in _pinned_axes(request))
    )


def _allows_mesh(request: Request, setting: ClusterSetting) -> bool:
    sizes = {"dp": setting.dp, "tp": setting.tp, "pp": setting.stages}
    given = dict(request.mesh.axes) if request.mesh else sizes
    return all(given.get(axis, 1) == size for axis, size in sizes.items())


def _allows_schedule(request: Request, setting: ClusterSetting) -> bool:
    """Whether a setting can have the request's schedule; 1F1B needs as many micro-batches as stages."""
    chosen = request.chosen_schedule
    if chosen is None or request.ranks == 1:
        return True
    return setting.stages > 1 and (chosen != "1f1b" or setting.schedule == "1f1b")


def _allows_recipe(request: Request, setting: ClusterSetting) -> bool:
    own = {"dp": setting.data, "tp": setting.tensor}
    return all(
        _size(setting, axis) == 1 if wanted == "" else wanted in ("auto", own[axis])
        for axis, wanted in recipes_of_axes(request).items()
        if _size(setting, axis) > 1 or wanted == ""
    )


def recipes_of_axes(request: Request) -> Mapping[str, str]:
    """The recipe of dp and of tp; "" where the axis must have one rank."""
    inside = request.inside
    if not isinstance(inside, str):
        named = {axis: ALIASES.get(name, name) for axis, name in inside.items()}
        return {"dp": "auto", "tp": "auto"} | named
    name = ALIASES.get(inside, inside)
    if name == "auto":
        return {"dp": name, "tp": name}
    return {"dp": name, "tp": ""} if name in DATA else {"dp": "", "tp": name}


def stays_inside(request: Request, mesh: Mesh, devices_per_node: int) -> bool:
    """Whether the groups of the axes that the user keeps inside a node lie inside one, on the mesh of a stage."""
    placed = mesh.placed  # where ranks are does not depend on the order of the axes
    reach = {axis: math.prod(placed.sizes[at:]) for at, axis in enumerate(placed.names)}
    return all(devices_per_node % reach.get(axis, 1) == 0 for axis in request.inside_node)


def _pinned_axes(request: Request) -> set[str]:
    """The axes along which pins split something: those of `tp`, of `S(0)@tp` and of `b@dp j@tp`."""
    parts = [part.rpartition("@") for text in request.pins.values() for part in text.split()]
    return {axis for choice, _, axis in parts if axis in AXES and choice not in ("R", "-")}


def _size(setting: ClusterSetting, axis: str) -> int:
    return setting.dp if axis == "dp" else setting.tp


def _uses(setting: ClusterSetting, what: str) -> bool:
    return {
        "recompute": setting.recompute != "none",
        "tp": setting.tp > 1,
        "dp": setting.dp > 1,
        "sp": setting.tp > 1 and setting.tensor == "tp+sp",
    }.get(what, setting.data == what and setting.dp > 1)
