"""`autopar.shard_(model, recipe)`: parameters that lie in shards under the backend of torch.compile.

[Note: whole parameters] A module's forward asks for `self.weight` and has to get the whole weight; an optimizer, or a
script that clips, fills or looks at the gradient of `model.weight`, has to get the parameter itself. So `shard_` puts
a DTensor in the place of every parameter, where `model.parameters()` and `state_dict()` find it, and gives the module a
class with a property `weight`, which outside of forwards is the DTensor and inside
calls `whole_parameter` (as torchtitan's SimpleFSDP does). Dynamo takes the DTensor as an argument of its graph and
`whole_parameter` as a call. The backend plans with the layout that the DTensor has, and the call is the parameter:
what is gathered, when, and where its gradient goes is the plan's. Where a forward runs without the backend,
`whole_parameter` gathers, and gives each rank its part of the gradient, which is then the same on all.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autopar import _torch
from autopar.backend.comparing import check_alike
from autopar.capture.remedies import changed_in_place
from autopar.cost_model import Hardware
from autopar.cost_model.machines.software import named_hardware
from autopar.errors import CaptureError, MeshError, RecipeError
from autopar.ir import PIPELINE_AXIS, WHOLE, Dims, Layout, Mesh, Plan, R, S, has_owner
from autopar.ir.layout import split_count
from autopar.ops.sharding import shard
from autopar.options import takes_options
from autopar.planning.planning import make_plan, prepare_forward, split_example
from autopar.runtime.collectives.transfer import converted
from autopar.runtime.parameters.adoption import Adoption
from autopar.runtime.parameters.parameters import placements
from autopar.runtime.ranks.processes import (
    agreed,
    axes_of_device_mesh,
    check_world,
    join_process_group,
    make_world,
    world_size,
)
from autopar.runtime.ranks.world import World
from autopar.search import RecipeLike
from autopar.search.request.recipes import format_recipe, resolve
from autopar.search.request.request import Request

_OF_GRAPH = ("auto", "tp", "tp+sp", "columns", "width")  # recipes whose storage depends on what is computed


@takes_options()
def shard_(
    model: nn.Module,
    plan_or_recipe: Plan | RecipeLike = "zero3",
    *,
    mesh: Mesh | Mapping[str, int] | None = None,
    example_inputs: Any = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Turns a model's parameters into DTensors of which each rank holds its shard, in place.

    For `torch.compile(model, backend="autopar")`, which then keeps parameters, gradients and what an
    optimizer makes of them in shards. Every rank calls this with the same whole model. An optimizer may
    be made before, if it has made no step yet, or after; `named_parameters()` has the same names.

    Args:
        model: plain PyTorch; in forwards `module.weight` is the whole weight from now on, and elsewhere the DTensor.
        plan_or_recipe: a plan, whose storage layouts are taken, or a recipe for all axes or for each:
            zero1, zero2 and zero3 (fsdp) split a dim of every parameter that the axis divides, the first
            if possible; ddp, and an axis that is not named, leave parameters whole along it.
        mesh: axis name -> number of ranks; by default the plan's, or one axis `dp` of all ranks.
        example_inputs: inputs of the forward, as for `autopar.explain`; the recipes auto, tp and tp+sp, whose
            layouts depend on what is computed, need it (or a plan made elsewhere).
        hardware: what is then priced, by name or path; by default a guess from the device.

    Returns:
        The model. Buffers stay whole, and so does a parameter that no axis divides.

    Raises MeshError unless the mesh has as many ranks as run, RecipeError for a recipe that needs example
    inputs and has none, CaptureError for a model that is sharded already, holds its parameters elsewhere
    too or changes one in its forward (an embedding's max_norm), and AutoparError unless all ranks have the
    same parameters.

    On one rank every shard is the whole tensor:

    >>> import autopar, torch
    >>> model = autopar.shard_(torch.nn.Linear(4, 2))
    >>> model.weight.shape
    torch.Size([2, 4])
    """
    named = dict(model.named_parameters())
    device = device_of(named.values())
    join_process_group(device)
    _torch.treat_as_plain()
    axes = _axes(plan_or_recipe, mesh)
    world = world_of(axes, device)
    _refuse_held(model, named)
    check_alike(world, named)
    plan = plan_or_recipe
    if not isinstance(plan, Plan) and _needs_graph(plan, axes):
        plan = _planned(model, plan, axes, example_inputs, hardware_of(hardware, device))
    layouts = {name: _storage(name, x, plan, axes) for name, x in named.items()}
    _replace(model, named, layouts, world)
    return model


def _axes(plan_or_recipe: Plan | RecipeLike, mesh: Mesh | Mapping[str, int] | None) -> Mesh:
    is_plan = isinstance(plan_or_recipe, Plan)
    planned = plan_or_recipe.world_mesh if is_plan else Mesh((("dp", world_size()),))  # type: ignore[union-attr]
    axes = planned if mesh is None else Mesh.of(mesh)
    if is_plan and not axes.admits(planned):
        raise MeshError(f"The plan is for the mesh {planned}, but the mesh given is {axes}.")
    axes = planned if is_plan else axes  # with the order of its axes
    refuse_stages(axes)
    refuse_places(plan_or_recipe, axes)
    if is_plan and plan_or_recipe.meeting is not None:  # type: ignore[union-attr]
        raise RecipeError(
            "The plan has replicas that synchronise every K steps, but torch.compile knows no steps: use "
            "autopar.compile and its `step`, or another plan."
        )
    check_world(axes)
    return axes


def refuse_stages(mesh: Mesh) -> None:
    """Raises MeshError for a mesh with an axis of pipeline stages."""
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(
            f"The mesh {mesh} has the axis {PIPELINE_AXIS!r}, and pipeline stages need the whole "
            "step: use autopar.compile and its `step`, or split over other axes."
        )


def refuse_places(plan_or_recipe: Plan | RecipeLike, mesh: Mesh) -> None:
    """Raises RecipeError for a plan or recipe that stores parameters outside the devices, or on one rank."""
    if isinstance(plan_or_recipe, Plan):
        plans = plan_or_recipe.parameters.values()
        tiers, owned = [how.tier for how in plans], any(has_owner(how.storage) for how in plans)
    else:
        rows = resolve(plan_or_recipe, mesh)
        tiers, owned = [row.tier for row in rows], any(row.owner is not None for row in rows)
    asked = "The plan" if isinstance(plan_or_recipe, Plan) else format_recipe(plan_or_recipe)
    far = next((tier for tier in tiers if tier != "device"), None)
    if far is not None:
        raise RecipeError(
            f"{asked} stores parameters on the {far}, but under torch.compile they stay on the device: use "
            "autopar.compile and its `step`, or another recipe."
        )
    if owned:
        raise RecipeError(
            f"{asked} stores each parameter on one rank, but under torch.compile every rank has all or a part of each: "
            "use autopar.compile and its `step`, or another recipe such as ddp or zero1."
        )


def _refuse_held(model: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            raise CaptureError(f"Parameter {name} is a DTensor already; shard_ takes a plain model, once.")
    known = {id(x): name for name, x in named.items()}
    for path, module in model.named_modules():
        if (changed := _changed(module)) in known:
            raise changed_in_place(known[changed])
        for attribute, value in vars(module).items():
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if id(x) in known:
                    raise CaptureError(
                        f"{path or 'The model'} ({type(module).__name__}) holds parameter {known[id(x)]} in "
                        f"its attribute {attribute!r} too, which would keep the whole parameter; "
                        "use autopar.compile, or a module that reads its parameters by name."
                    )


def _changed(module: nn.Module) -> int | None:
    """The id of the parameter that the module's forward changes in place."""
    is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return id(module.weight) if is_lookup and module.max_norm is not None else None


# --- where a parameter lies


def _needs_graph(recipe: RecipeLike, mesh: Mesh) -> bool:
    if isinstance(recipe, str) and ":" not in recipe:
        return resolve(recipe, mesh)[0].name in _OF_GRAPH
    return any(part in format_recipe(recipe).replace(",", ":").split(":")[1::2] for part in _OF_GRAPH)


def _planned(model: nn.Module, recipe: RecipeLike, mesh: Mesh, example_inputs: Any, hardware: Hardware) -> Plan:
    if example_inputs is None:
        raise RecipeError(
            f"The dims in which the recipe {format_recipe(recipe)} shards parameters depend on what the model "
            "computes: give shard_ example_inputs=..., or a plan; zero3 and ddp need neither."
        )
    args, kwargs = split_example(example_inputs)
    request = Request(hardware, mesh=mesh, recipe=recipe, offload=False)
    return agreed(lambda: make_plan(prepare_forward(model, args, kwargs), request))


def _storage(name: str, parameter: Tensor, plan: Plan | RecipeLike, mesh: Mesh) -> Layout:
    if isinstance(plan, Plan):
        planned = plan.parameters.get(name)  # a parameter that the model does not use has none
        return (R,) * len(mesh.axes) if planned is None else planned.storage
    stages = [row.stages if row.name not in _OF_GRAPH else (0,) for row in resolve(plan, mesh)]
    layout: list[Any] = [R] * len(stages)
    for axis, allowed in enumerate(stages):
        if allowed != (0,) and mesh.sizes[axis] > 1:
            layout[axis] = _first_dividing(parameter, tuple(layout), axis, mesh)
    return tuple(layout)


def _first_dividing(parameter: Tensor, layout: Layout, axis: int, mesh: Mesh) -> Any:
    for dim, size in enumerate(parameter.shape):
        parts = split_count(layout, mesh, dim, 0) * mesh.sizes[axis]
        if size and size % parts == 0:
            return S(dim)
    return R


def layout_of(parameter: DTensor, dims: Dims, mesh: Mesh) -> Layout:
    """The layout of a parameter that `shard_` has made, whose dims have these factors in a graph."""
    split = [p.dim if isinstance(p, Shard) else None for p in parameter.placements]

    def state(dim: int | None) -> Any:
        if dim is None:
            return R
        parts = 1
        for other, size in zip(split, mesh.sizes, strict=True):
            parts *= size if other == dim else 1
        return S(dim) if dims[dim] and dims[dim][0] % parts == 0 else S(dim, WHOLE)

    return tuple(map(state, split))


# --- how a module reads it


def _replace(model: nn.Module, named: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], world: World) -> None:
    adoption = Adoption()
    weakref.finalize(model, adoption.stop)
    new: dict[int, nn.Parameter] = {}
    for name, old in named.items():
        new[id(old)] = _sharded(old, layouts[name], world)
        adoption.replace(old, new[id(old)])
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in model.modules():
        own = [name for name, x in module._parameters.items() if x is not None]
        for name in own:
            module._parameters[name] = new[id(module._parameters[name])]
        if own:
            key = (type(module), tuple(own))
            classes[key] = classes.get(key) or _reading_whole(*key)
            module.__class__ = classes[key]
            module.register_load_state_dict_pre_hook(_cut_whole)


@torch.no_grad()
def _sharded(parameter: Tensor, layout: Layout, world: World) -> nn.Parameter:
    if world.device_mesh is None:
        return cast(nn.Parameter, parameter)
    # A DTensor cuts a dim, whatever its factors: into the same chunks.
    layout = tuple(S(state.dim) if state.kind == "S" else R for state in layout)
    dims = tuple((size,) for size in parameter.shape)
    own = shard(parameter, dims, layout, world.mesh, world.rank).contiguous().clone()
    stored = _torch.dtensor(own, world.device_mesh, placements(layout, world.mesh), tuple(parameter.shape))
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


def _cut_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cuts the whole parameters of a state dict as those of the module lie, before they are loaded.

    So `load_state_dict` takes what one device saved, and with `assign=True`, too, leaves shards.
    """
    named: Mapping[str, Tensor | None] = module._parameters
    for name, own in named.items():
        given = state_dict.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(given, Tensor):
            continue
        if not isinstance(given, DTensor) and given.shape == own.shape:
            mesh, dims = mesh_of(own), tuple((size,) for size in own.shape)
            layout, world = layout_of(own, dims, mesh), world_of(mesh, own.device)
            state_dict[prefix + name] = _sharded(given.to(own.device), layout, world)


def _reading_whole(kind: type, names: tuple[str, ...]) -> type:
    """A class of modules whose forwards read their parameters whole; see [Note: whole parameters]."""

    def reading(name: str) -> property:
        def read(module: nn.Module) -> Any:
            own = module._parameters[name]
            return whole_parameter(own) if _torch.is_computing() else own

        return property(read)

    attributes = {name: reading(name) for name in names}
    return type(f"Sharded{kind.__name__}", (kind,), {**attributes, "__module__": kind.__module__})


@torch.compiler.allow_in_graph
def whole_parameter(parameter: Any) -> Any:
    """The whole of a parameter, of the shape that it has on one device; a plain tensor is that already."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = mesh_of(parameter)
    dims = tuple((size,) for size in parameter.shape)
    replicated = (R,) * len(mesh.axes)
    world = world_of(mesh, parameter.device)
    layout = layout_of(parameter, dims, mesh)
    # A forward may read it inside of vmap or grad, to which it is a constant.
    with _torch.outside_functorch_transforms():
        return converted(_torch.differentiable_local(parameter), dims, layout, replicated, world)


def mesh_of(parameter: DTensor) -> Mesh:
    """The mesh on which a parameter lies."""
    return axes_of_device_mesh(parameter.device_mesh)


# --- what it shares with the backend


def device_of(tensors: Any) -> torch.device:
    """The device that a graph computes on: the accelerator if any of these tensors is there."""
    found = [x.device for x in tensors if isinstance(x, Tensor)]
    return next((device for device in found if device.type != "cpu"), _torch.CPU)


def hardware_of(hardware: Hardware | str | os.PathLike[str] | None, device: torch.device) -> Hardware:
    """The hardware to price: by name or path, or a guess from the device."""
    return named_hardware(hardware or _torch.catalogue_name(device))


_WORLDS: weakref.WeakKeyDictionary[Any, dict[tuple[Mesh, str], World]] = weakref.WeakKeyDictionary()


def world_of(mesh: Mesh, device: torch.device) -> World:
    """The process groups of a mesh, made once for all graphs; they end with the default group."""
    if not dist.is_initialized():
        return World(mesh, device)
    known = _WORLDS.setdefault(dist.group.WORLD, {})
    key = (mesh, device.type)
    if key not in known:
        made = make_world(mesh, device, None)
        assert made.device_mesh is not None, "there is a default group"
        # `mesh_of` reads the mesh from the DTensors, and an axis of one rank may then have another place.
        read = axes_of_device_mesh(made.device_mesh)
        known[key] = known[read, device.type] = made
    return known[key]
