"""What a question may ask: recipes and meshes that have estimates, and pins that name only an axis."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from autopar.cost_model.compute import is_product
from autopar.cost_model.machines.hardware import Hardware
from autopar.errors import MeshError, RecipeError
from autopar.ir import PIPELINE_AXIS, Graph
from autopar.search import search
from autopar.search.candidates.request_filters import has_closed_form
from autopar.search.candidates.settings import DATA, TENSOR
from autopar.search.request.options import AXES
from autopar.search.request.recipes import asks_for_replicas, format_recipe
from autopar.search.request.request import Request
from autopar.search.request.single_rank_ops import is_lone_pin

_KNOWN_AXES = (*AXES, PIPELINE_AXIS)  # axes of the meshes that have estimates


def check_closed_form(request: Request) -> None:
    """Raises RecipeError or MeshError if `candidates` of this folder cannot estimate what a request asks for."""
    if asks_for_replicas(request.recipe) or request.has_versions:
        asked = f"the schedule {request.chosen_schedule} updates without waiting"
        if asks_for_replicas(request.recipe):
            asked = f"the recipe {format_recipe(request.recipe)!r} trains replicas that synchronise every K steps"
        raise RecipeError(
            f"`autopar fit` and `autopar compare` price steps that give the result of a single device, but {asked}. "
            "`autopar explain` prices that on a given --mesh."
        )
    if request.has_lone_pins:
        pin = next(f"{name}={text}" for name, text in request.pins.items() if is_lone_pin(text))
        raise RecipeError(
            f"`autopar fit` and `autopar compare` price plans whose ranks all run every op, but the pin {pin} leaves "
            "ops to one rank. `autopar explain` prices that on a given --mesh."
        )
    if not has_closed_form(request):
        raise RecipeError(
            f"`autopar fit` and `autopar compare` price the recipes auto, {', '.join((*DATA, *TENSOR))}, or by axis "
            f"dp:{'|'.join(DATA)} and tp:{'|'.join(TENSOR)}, but the recipe {format_recipe(request.recipe)!r} is "
            "another. `autopar explain` prices it on a given --mesh."
        )
    axes = request.mesh.axes if request.mesh else ()
    others = [name for name, size in axes if size > 1 and name not in _KNOWN_AXES]
    if others:
        raise MeshError(
            f"`autopar fit` and `autopar compare` price meshes of the axes {', '.join(_KNOWN_AXES)}, but the mesh "
            f"{request.mesh} has {', '.join(others)}. Name its axes so; or `autopar explain` prices any mesh."
        )


def is_intent(choice: str) -> bool:
    """Whether a pin names only an axis, such as `tp`, not a label or state along one, such as `S(0)@tp`."""
    return "@" not in choice and choice.isidentifier()


def expand_pins(pins: Mapping[str, str], graph: Graph, hardware: Hardware) -> dict[str, str]:
    """The pins with labels in place of bare axes.

    The pin `{"layers.*.mlp.*": "tp"}` splits the matrix products with these parameters along tp as Megatron-LM does: by
    columns or rows, whichever the recipe `tp` chooses for each product. Raises RecipeError if no matrix product has
    such a parameter.
    """
    found = {name: choice for name, choice in pins.items() if not is_intent(choice)}
    for pattern, axis in pins.items():
        if is_intent(axis):
            found |= _split_over(pattern, axis, graph, hardware)
    return found


def _split_over(pattern: str, axis: str, graph: Graph, hardware: Hardware) -> dict[str, str]:
    plan = search(graph, {axis: 2}, hardware=hardware, recipe="tp")
    origin = _parameters_behind(graph)
    found = {
        op.name: f"{plan.ops[op.name][0]}@{axis}"
        for op in graph.ops
        if is_product(op) and op.choice(plan.ops[op.name][0]).splits
        if any(fnmatchcase(origin.get(name, ""), pattern) for name in op.operands)
    }
    if not found:
        raise RecipeError(
            f"The pin {pattern!r}={axis} matches no product of matrices that could be split; "
            f"parameters are named like {', '.join(list(graph.parameters)[:3])}."
        )
    return found


def _parameters_behind(graph: Graph) -> dict[str, str]:
    """Name of a tensor that is a parameter, or that one-operand ops compute from it -> name of the parameter."""
    found = {tensor: name for name, tensor in graph.parameters.items()}
    for op in graph.ops:
        if len(op.operands) == 1 and op.operands[0] in found:
            found.update(dict.fromkeys(op.results, found[op.operands[0]]))
    return found
