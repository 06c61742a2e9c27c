"""Plans and local graphs for graphs of torch.compile; all inputs and results but sharded parameters are whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.analysis.factors import analyze
from autopar.backend.lifting import Lifted
from autopar.backend.sharding import layout_of
from autopar.capture.export import capture_forward
from autopar.errors import AutoparError, CaptureError
from autopar.ir import Mesh, ParameterPlan, Plan, R
from autopar.passes import clean_up, partition, verify_graph
from autopar.planning.planning import Prepared, make_plan
from autopar.program.checks import check_plan
from autopar.program.recomputation import mark_blocks
from autopar.runtime.processes import agreed
from autopar.search import RecipeLike
from autopar.search.recipes import format_recipe, resolve
from autopar.search.request import Request

log = logging.getLogger("autopar")


def prepare(lifted: Lifted, inputs: tuple[Tensor, ...]) -> Prepared:
    if not any(result is None for result in lifted.results) and not lifted.buffers:
        raise CaptureError("The graph computes nothing but views of its arguments.")
    try:
        captured = capture_forward(lifted.module, inputs, {})
    except CaptureError as error:
        raise CaptureError(f"{error}{lifted.place}") from error
    except (
        Exception
    ) as error:  # of the graph itself: it runs whole, and fails in the same way if it does so there
        raise CaptureError(f"{type(error).__name__}: {error}{lifted.place}") from error
    clean_up(captured.module)
    positions = zip(captured.inputs, lifted.inputs, strict=True)
    captured = replace(
        captured,
        # Activations of the graph before take a gradient, too.
        differentiable=frozenset(name for name, i in positions if i in lifted.differentiable),
        whole_outputs=True,
    )
    return Prepared(captured, analyze(captured))


def plan_of(
    prepared: Prepared, mesh: Mesh, request: Request, stored: Mapping[str, DTensor]
) -> Plan:
    """A plan, the same on all ranks, whose inputs and results are whole on every rank.

    A parameter in `stored` keeps its layout; all other parameters are whole. So are saved tensors, as the graph of
    torch.compile has no marks where a rank would take its slice.
    A recipe that the graph leaves no room for, as a fragment between two graph breaks or an uneven batch
    may, gives way to "auto": first on one axis, then on all.
    """
    replicated = (R,) * len(mesh.axes)
    graph = prepared.analysis.graph
    layouts = {
        name: layout_of(stored[name], graph.tensors[tensor].dims, mesh)
        if name in stored
        else replicated
        for name, tensor in graph.parameters.items()
    }

    lying = {name: ParameterPlan(at, at) for name, at in layouts.items()}

    def search(recipe: RecipeLike) -> Plan:
        return make_plan(prepared, request.but(recipe=recipe), fixed_storage=lying)

    def search_any() -> Plan:
        for recipe in _relaxed(request.recipe, mesh):
            try:
                return search(recipe)
            except AutoparError as error:
                log.info("recipe %s gives way for a graph: %s", format_recipe(recipe), error)
        return search("auto")

    plan = agreed(search_any)
    return replace(plan, inputs=dict.fromkeys(plan.inputs, replicated), saved={})


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
