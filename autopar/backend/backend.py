"""`torch.compile(model, backend="autopar", options={"mesh": {"dp": 2, "tp": 2}, "recipe": "auto"})`.

It runs an ordinary single-device script on several ranks, started by torchrun, without changes to the script.
Every rank gives the whole batch and receives the whole result. Parameters are whole on every rank, or shards if
`autopar.shard_` has cut them; a gradient has the placement of its parameter. The ranks share the work, and with it
the activations that are saved for backward.

Each graph that dynamo finds is lifted to a module, captured, and planned with all parameters as they lie, so
that the plans of several graphs agree about them. Only collectives that are their own derivatives stand
between the ops (`autopar.ops.collectives`), and eager autograd, or that of compiled regions
(`autopar.runtime.execute.compiled`), does the rest.

[Note: when graphs are planned] Dynamo compiles a frame when the frame first runs. So the backend plans a graph at
its first call with each set of shapes, when the arguments are real and all symbolic sizes of dynamo are known.
Every rank runs the same script, and so meets the same graphs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.backend.comparing import comparison_of
from autopar.backend.graphs import SplitGraph
from autopar.backend.lifting import argument_names
from autopar.backend.plans import leaves_mesh_open, meshes
from autopar.backend.sharding import (
    device_of,
    hardware_of,
    mesh_of,
    refuse_places,
    refuse_stages,
    whole_parameter,
    world_of,
)
from autopar.backend.unwatched import CachedCalls, HooksOfAllModules, Methods
from autopar.capture.guards.refusals import draws_from_own
from autopar.capture.remedies import traced_line
from autopar.errors import AutoparError, MeshError, RecipeError, did_you_mean
from autopar.ir import Mesh
from autopar.options import options_of, split_options
from autopar.runtime.execute.settings import RunOptions
from autopar.runtime.failures.failures import show_failures
from autopar.runtime.ranks.processes import check_world, join_process_group, world_size
from autopar.runtime.ranks.world import World, set_timeout
from autopar.search.request.options import PlanOptions
from autopar.search.request.recipes import split_recipe
from autopar.search.request.request import Request

# Before Dynamo reads a frame, and so here, when torch.compile looks the backend up: `options` come with a graph.
_torch.trace_recurrent_layers()
_torch.guard_hooks()
_torch.watch_cached_calls()
_torch.quiet_fake_failures()
show_failures()  # a first graph may fail in Dynamo itself

OPTIONS = {name: each for name, each in options_of(PlanOptions, RunOptions).items() if each.serves_backend}


def autopar(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., list[Any]]:
    """The backend function that torch.compile calls with each graph.

    Args:
        module: the graph that dynamo found.
        example_inputs: its arguments.
        options: what is asked, by name: those of the options of `autopar.compile` that `OPTIONS` has. `mesh` is by
            default that of `autopar.shard_`, or is searched for each graph. Under any `recipe` parameters stay stored
            as they lie.
        mode: a mode of torch.compile, which this backend does not have.

    Returns:
        The function that torch.compile calls in place of the graph. At its first call it raises AutoparError for an
        unknown option and for DTensors that `autopar.shard_` has not made, MeshError if the world or these do not
        match the mesh, RecipeError for an unknown recipe.
    """
    show_failures()
    try:
        return _opened(module, example_inputs, options or {}, mode)
    except AutoparError as error:
        return _refusing(error)


def _refusing(error: AutoparError) -> Callable[..., list[Any]]:
    """A function that raises the error at its call; Dynamo would wrap an error raised during compilation."""

    def run(*_: Any) -> list[Any]:
        raise type(error)(*error.args)

    return run


def _opened(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], mode: str | None
) -> SplitGraph:
    """The graph, to be planned as the options say; raises what `autopar` states."""
    if mode is not None:
        raise AutoparError(f"The backend autopar has no mode {mode!r}; leave mode out.")
    given, ran = split_options(_known(options), PlanOptions, RunOptions)
    run = RunOptions(**ran)
    _refuse_own_generators(module)
    names = argument_names(module)
    _refuse_distributed(module, names, example_inputs)
    device = device_of(example_inputs)
    join_process_group(device)
    stored = [mesh_of(x) for x in example_inputs if isinstance(x, DTensor)]
    request = _request(given, run.hardware, stored[0] if stored else None, device)
    limit = run.timeout_seconds

    def world_on(mesh: Mesh) -> World:
        world = world_of(mesh, device)
        if limit is not None:
            set_timeout(world, limit)
        return world

    return SplitGraph(
        module,
        names,
        request,
        world_on,
        run.executor,
        comparison_of(limit),
        (Methods(module.graph), CachedCalls(module.graph), HooksOfAllModules()),
    )


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises AutoparError for an option that the backend does not have."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise AutoparError(
            f"The backend autopar has no option {unknown[0]!r}{did_you_mean(unknown[0], OPTIONS)}; "
            f"it takes {', '.join(OPTIONS)}. "
            "Other settings are those of autopar.compile."
        )
    return options


def _request(options: Mapping[str, Any], hardware: Any, stored: Mesh | None, device: torch.device) -> Request:
    """The request that the options make for every graph, on the mesh on which parameters are `stored`, if any is.

    Raises MeshError unless the mesh is that one and has as many ranks as run, and RecipeError.
    """
    mesh, recipe = _mesh(options.get("mesh"), stored), options.get("recipe", "auto")
    if split_recipe(recipe)[0]:
        raise RecipeError(
            f"The recipe {recipe!r} is for pipeline stages, which need the whole step: use "
            "autopar.compile and its `step`, or another recipe."
        )
    ranks = world_size()
    if mesh is None and not leaves_mesh_open(recipe):
        mesh = Mesh((("dp", ranks),))
    request = Request(hardware_of(hardware, device), mesh=mesh, ranks=ranks, recipe=recipe, offload=False)
    refuse_places(recipe, meshes(request)[0])
    return request


def _mesh(given: Any, stored: Mesh | None) -> Mesh | None:
    """The mesh on which parameters are stored, or the one of the options; None leaves it open."""
    mesh = stored if given is None else Mesh.of(given)
    if mesh is None:
        return None
    refuse_stages(mesh)
    if stored is not None and not mesh.admits(stored):
        raise MeshError(
            f"autopar.shard_ has cut the parameters over the mesh {stored}, but the backend is given "
            f"{mesh}; leave the option out, or shard over the same."
        )
    check_world(stored or mesh)
    return stored or mesh


def _refuse_own_generators(module: fx.GraphModule) -> None:
    """Raises CaptureError where the frame draws from a generator of the user's own, whose first draw Dynamo repeats."""
    found = _torch.own_generators()
    if found:
        drawn = (n for n in module.graph.find_nodes(op="placeholder") if "random" in n.name)
        users = [user for node in drawn for user in node.users]
        raise draws_from_own(found[0], traced_line(users[0]) if users else "")


def _refuse_distributed(module: fx.GraphModule, names: Sequence[str], arguments: Sequence[Any]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name, x in zip(placeholders, names, arguments, strict=True):
        if isinstance(x, DTensor) and not _is_read_whole(node):
            raise AutoparError(
                f"{name} is a DTensor of placements {x.placements}, but the backend takes plain tensors "
                "and the parameters that autopar.shard_ has cut, read by the model or a checkpointed block "
                "(not by the branches of torch.cond: read them before it)."
            )


def _is_read_whole(node: fx.Node) -> bool:
    """Whether `whole_parameter` is the only user of an argument, also in the graphs to which the argument is passed."""
    return all(
        user.target is whole_parameter or (inside and all(map(_is_read_whole, inside)))
        for user in node.users
        for inside in [_arguments_of_bodies(user, node)]
    )


def _arguments_of_bodies(call: fx.Node, given: fx.Node) -> list[fx.Node]:
    """The placeholders for `given` in the graphs that a call runs, such as the graph of a checkpointed block."""
    bodies = [x for x in call.args if isinstance(x, fx.Node) and x.op == "get_attr"]
    found = []
    for body in (getattr(call.graph.owning_module, str(x.target)) for x in bodies):
        if isinstance(body, fx.GraphModule):
            operands = [x for x in call.args if x not in bodies]
            inner = body.graph.find_nodes(op="placeholder")
            if len(inner) == len(operands):  # not those of torch.cond, which takes no DTensor
                found += [x for x, outer in zip(inner, operands, strict=True) if outer is given]
    return found
