"""Plans and local graphs for graphs of torch.compile; all inputs and results but sharded parameters are whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.analysis.factors import analyze
from autopar.backend.lifting import Lifted
from autopar.backend.sharding import layout_of
from autopar.capture.export import capture_forward
from autopar.errors import AutoparError, CaptureError
from autopar.ir import Graph, Mesh, ParameterPlan, Plan, R
from autopar.passes import clean_up, partition, verify_graph
from autopar.planning.planning import Prepared, search_step
from autopar.program.checks import check_plan
from autopar.program.recomputation import mark_blocks
from autopar.runtime.ranks.processes import agreed
from autopar.search import RecipeLike
from autopar.search.exact.search import meshes_of
from autopar.search.request.recipes import format_recipe, is_open, recipe_axes, resolve
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned

log = logging.getLogger("autopar")


def prepare(lifted: Lifted, inputs: tuple[Tensor, ...]) -> Prepared:
    if not any(result is None for result in lifted.results) and not lifted.buffers:
        raise CaptureError("The graph computes nothing but views of its arguments.")
    try:
        captured = capture_forward(lifted.module, inputs, {})
    except CaptureError as error:
        raise CaptureError(f"{error}{lifted.place}") from error
    except Exception as error:  # of the graph itself: it runs whole, and fails in the same way if it does so there
        raise CaptureError(f"{type(error).__name__}: {error}{lifted.place}") from error
    clean_up(captured.module)
    positions = zip(captured.inputs, lifted.inputs, strict=True)
    captured = replace(
        captured,
        # Activations of the graph before require a gradient, too.
        differentiable=frozenset(name for name, i in positions if i in lifted.differentiable),
        whole_outputs=True,
    )
    return Prepared(captured, analyze(captured))


def plan_of(prepared: Prepared, request: Request, stored: Mapping[str, DTensor]) -> Plan:
    """A plan, the same on all ranks, whose inputs and results are whole on every rank.

    A parameter in `stored` keeps its layout; all other parameters are whole. So are saved tensors, as the graph of
    torch.compile has no marks where a rank would take its slice.
    Without a mesh in the request, the plan is the fastest on any mesh of its ranks.
    A recipe that the graph leaves no room for, as a fragment between two graph breaks or an uneven batch
    may, gives way to "auto": first on one axis, then on all.
    """

    def fastest() -> Plan:
        best = min(
            _on_meshes(prepared, request, stored), key=lambda each: (len(each.refused), each.planned.price.step_seconds)
        )
        for line in best.refused:
            log.info(line)
        return best.planned.plan

    plan = agreed(fastest)
    replicated = (R,) * len(plan.mesh.axes)
    return replace(plan, inputs=dict.fromkeys(plan.inputs, replicated), saved={})


def meshes(request: Request) -> list[Mesh]:
    """The mesh of a request, or else all meshes that its recipe leaves open, those of one axis first."""
    if request.mesh is not None:
        return [request.mesh]
    assert request.ranks is not None, "a request without a mesh has ranks"
    found = meshes_of(request.ranks, recipe_axes(request.recipe))
    return sorted(found, key=lambda mesh: len(mesh.axes))


def leaves_mesh_open(recipe: RecipeLike) -> bool:
    """Whether the mesh is searched under a recipe: one that names no axes but dp and tp, or leaves everything open."""
    named = recipe_axes(recipe)
    return is_open(recipe) if not named else {*named} <= {"dp", "tp"}


class _OnMesh(NamedTuple):
    """The plan on a mesh, with a line for each recipe that gave way."""

    planned: Planned
    refused: tuple[str, ...]


def _on_meshes(prepared: Prepared, request: Request, stored: Mapping[str, DTensor]) -> list[_OnMesh]:
    """The plans on all meshes that have one; raises the error of the first mesh if none has."""
    found, errors = list[_OnMesh](), list[AutoparError]()
    for mesh in meshes(request):
        try:
            found.append(_on_mesh(mesh, prepared, request, stored))
        except AutoparError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _on_mesh(mesh: Mesh, prepared: Prepared, request: Request, stored: Mapping[str, DTensor]) -> _OnMesh:
    lying = _lying(prepared.analysis.graph, mesh, stored)
    refused: list[str] = []

    def search(recipe: RecipeLike) -> _OnMesh:
        asked = request.but(mesh=mesh, recipe=recipe)
        best = search_step(prepared, asked, fixed_storage=lying).best
        return _OnMesh(best, tuple(refused))

    for recipe in _relaxed(request.recipe, mesh):
        try:
            return search(recipe)
        except AutoparError as error:
            refused.append(f"recipe {format_recipe(recipe)} is not applied to a graph: {error}")
    return search("auto")


def _lying(graph: Graph, mesh: Mesh, stored: Mapping[str, DTensor]) -> dict[str, ParameterPlan]:
    """The layouts of all parameters of a graph: those of `stored`, and the others whole."""
    layouts = {
        name: layout_of(stored[name], graph.tensors[tensor].dims, mesh) if name in stored else (R,) * len(mesh.axes)
        for name, tensor in graph.parameters.items()
    }
    return {name: ParameterPlan(at, at) for name, at in layouts.items()}


def _relaxed(recipe: RecipeLike, mesh: Mesh) -> Iterator[RecipeLike]:
    """A recipe, then with one axis after the other left to the search."""
    yield recipe
    rows = {axis: row.name for axis, row in zip(mesh.names, resolve(recipe, mesh), strict=True)}
    if len(rows) > 1:
        for axis in rows:
            yield {**rows, axis: "auto"}


def local_graph(prepared: Prepared, plan: Plan) -> fx.GraphModule:
    """The graph that one rank runs; it returns the updated buffers, then the results, each the unsplit tensor."""
    check_plan(prepared.captured, prepared.analysis, plan)
    local, _ = partition(prepared.captured, prepared.analysis, plan)
    verify_graph(local, after="partition")
    mark_blocks(local, prepared.analysis.graph, plan)
    return local


@torch.inference_mode(False)  # tensors of inference mode have no version
def stand_in(parameter: DTensor) -> nn.Parameter:
    """A tensor with the shape of the whole parameter and without memory."""
    found = _torch.without_memory(parameter.shape, parameter.dtype, parameter.device)
    return nn.Parameter(found, requires_grad=parameter.requires_grad)
