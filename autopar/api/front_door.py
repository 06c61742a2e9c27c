"""The front door: `compile` and `explain`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.api.announcing import shown_planning
from autopar.api.asked import alike_asked, read_asked, without_idle
from autopar.api.machine import MeshLike, axes_of, device_of, measured_hardware
from autopar.api.planner import Planner
from autopar.capture.export import LossFunction
from autopar.capture.quantized import inner_tensors_stored, store_inner_tensors
from autopar.capture.rows import arguments_of_replica
from autopar.cost_model import Cluster, Hardware, find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.errors import AutoparError, MeshError
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.ir import Graph, Mesh, MixedPrecision, Plan
from autopar.options import takes_options
from autopar.pipeline.composed import composed
from autopar.planning.cache_files import cache_key
from autopar.planning.loss_tiles import best_in_tiles, tile_bytes_of
from autopar.planning.planning import Prepared, in_parts, make_plan, prepare_step, split_example
from autopar.planning.stored_plans import StoredPlans
from autopar.runtime.execute.inputs import Arguments, micro_batch
from autopar.runtime.execute.settings import RunOptions, Settings
from autopar.runtime.failures.failures import show_failures
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.parameters.loss_scale import LossScaling
from autopar.runtime.ranks.processes import join_process_group
from autopar.search import RecipeLike
from autopar.search.request.options import PlanOptions
from autopar.search.request.recipes import is_open
from autopar.search.request.request import Request


@takes_options(PlanOptions, RunOptions)
def compile(
    model: nn.Module,
    *,
    loss_fn: LossFunction | None = None,
    example_inputs: Any = None,
    mesh: MeshLike | None = None,
    recipe: RecipeLike = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    precision: MixedPrecision | str | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> CompiledModule:
    """Makes a single-device model run on all ranks.

    Under `torchrun` the default process group is used, and made if there is none; without it the model
    runs on one rank. Every rank calls this with the same arguments.

    Args:
        model: plain PyTorch; its parameters may be on the meta device. They become DTensors in place, so
            that an optimizer made of them before stays valid.
        loss_fn: takes the model's result and then the last entries of the batch, and returns a scalar, or
            `(scalar, extras)` with further results of a step; None if the model returns its loss itself.
        example_inputs: a global batch as `step` takes it: a tuple, a dict of keyword arguments, or one
            tensor. Without it the first call is the example.
        mesh: the axes and their sizes, such as `{"dp": 2, "tp": 4}` or `"dp=2,tp=4"`, or a `DeviceMesh`; without it
            they are searched too. The axis `pp` has the pipeline stages.
        recipe: constraints on the search, for all axes or by axis: `{"pp": "1f1b", "dp": "zero1", "tp": "tp"}`.
        plan: an earlier plan, or the file it was saved in; nothing is searched then.
        precision: a mixed-precision policy, such as "bf16" or a `MixedPrecision`.
        device: where this rank computes, such as "cpu" to insist on processors, or "cuda". By default a model that
            lies on an accelerator stays there; under a launcher any other goes to this rank's accelerator, shard by
            shard, if there is one (docs/start.md). Batches may lie anywhere.
        options: further options by name, such as `micro_batches=4`; docs/api.md and `help(autopar.compile)` list
            them.

    On one rank, without torchrun:

    >>> import autopar, torch
    >>> model = autopar.compile(torch.nn.Linear(8, 2), loss_fn=torch.nn.functional.mse_loss)
    >>> loss = model.step(torch.ones(4, 8), torch.zeros(4, 2))
    >>> loss.shape, model.plan.mesh.size
    (torch.Size([]), 1)

    Raises TypeError for an unknown option, AutoparError for an unknown executor, for a device that is not there, for a
    model that is compiled already and for a loss that is no function, MeshError if the world does not match the mesh or
    two ranks compute on one accelerator, PlanError for a plan of another model, and CaptureError, RecipeError or
    SearchError where no plan can be made.
    """
    show_failures()
    _refuse_odd(model, loss_fn)
    device = device_of(model, mesh, device)
    join_process_group(device)
    given = options | {"mesh": mesh, "recipe": recipe, "precision": precision}
    asked = alike_asked(lambda: read_asked(given, plan, device), has_example=example_inputs is not None)
    request, run, loaded, assumed = asked
    stored = _stored(run.cache)
    # Only where the search decides whether anything is split: recipes hold on any machine.
    opens = mesh is None and loaded is None and is_open(recipe)
    if opens and run.hardware is None and not _torch.is_accelerator(device):
        hardware, assumed = measured_hardware(request.hardware, stored.folder)
        request = dataclasses.replace(request, hardware=hardware)
    planner = Planner(
        request,
        loss_fn=loss_fn,
        plan=loaded,
        device=device,
        timeout_seconds=run.timeout_seconds,
        device_mesh=mesh if isinstance(mesh, DeviceMesh) else None,
        assumed=assumed,
        files=run.nvme,
        stored=stored,
    )
    device_mesh = planner.device_mesh()
    store_inner_tensors(model)
    if run.weights is not None:
        run.weights.check(model)
    settings = Settings(
        micro_batches=request.micro_batches,
        bucket_bytes=request.bucket_bytes,
        device=device,
        device_mesh=device_mesh,
        replicas=None if request.meeting is None else planner.world().replicas,
        returns_loss=loss_fn is None,
        has_stages=request.has_stages,
        loss_scaling=LossScaling.of(run.loss_scale, request.precision),
        **vars(run),
    )
    return _prepared(CompiledModule(model, planner, settings), example_inputs)


def _stored(cache: str | os.PathLike[str] | None) -> StoredPlans:
    """The folder of plans that was named, by the caller or by the environment. Raises AutoparError for a bad key."""
    folder = cache or os.environ.get("AUTOPAR_CACHE")
    if folder:
        cache_key()
    return StoredPlans(Path(folder) if folder else None)


def _prepared(compiled: CompiledModule, example_inputs: Any) -> CompiledModule:
    """The compiled module, with its program where an example was given."""
    if example_inputs is not None:
        args, kwargs = split_example(example_inputs)
        with shown_planning() as progress:
            progress("capturing and planning the model")
            compiled.prepare(*args, **kwargs)
    return compiled


@takes_options(PlanOptions)
def explain(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: MeshLike | None = None,
    cluster: Cluster | Hardware | str | os.PathLike[str] = "h100",
    loss_fn: LossFunction | None = None,
    **options: Any,
) -> Explanation:
    """Plans a model without devices, weights or a process group, and says what the plan costs.

    Args:
        model: plain PyTorch, on any device; on the meta device it takes no memory.
        example_inputs: one micro-batch of all ranks, or the whole batch if `micro_batches` is left
            out: a tuple of arguments, a dict of keyword arguments, or one tensor.
        mesh: the axes and their sizes; without it they are searched for all ranks of the cluster.
        cluster: a name such as `h100x8x16`, the path of a TOML file, or figures.
        loss_fn: the same as in `compile`.
        options: `recipe`, `precision` and the further options of a plan by name, as in `compile`; docs/api.md and
            `help(autopar.explain)` list them. Gradients are priced in the format that they are reduced in, and
            parameters at rest in their own.

    >>> import autopar, torch
    >>> model = torch.nn.Linear(1024, 1024, device="meta")
    >>> x = torch.empty(64, 1024, device="meta")
    >>> found = autopar.explain(model, x, mesh={"dp": 8}, cluster="h100x8", loss_fn=torch.mean)
    >>> found.plan.mesh.size, found.fits
    (8, True)

    Raises TypeError for an unknown option, CaptureError, MeshError, RecipeError or SearchError as `compile` does,
    AutoparError for an unknown cluster.
    """
    found, axes = _cluster_with(cluster, mesh)
    request = Request(
        found.hardware,
        ranks=found.ranks if axes is None else None,
        mesh=axes,
        refines=True,
        cuts_batch=True,
        **without_idle(options),
    )
    args, kwargs = split_example(example_inputs)
    request = request.of_replica()
    if request.meeting is not None:
        args, kwargs = arguments_of_replica(args, kwargs, 0, request.meeting.replicas)
    arguments = Arguments.of(args, kwargs)

    def captured(count: int, loss_tile_bytes: int | None) -> Prepared:
        own_args, own_kwargs = arguments.rebuild(micro_batch(arguments, count))
        policy = request.precision
        found = prepare_step(
            model, own_args, own_kwargs, loss_fn=loss_fn, precision=policy, loss_tile_bytes=loss_tile_bytes
        )
        return found.skewed(request.skew)

    def searched(prepared: Prepared, count: int) -> Plan:
        return make_plan(prepared, request.of_micro_batches(count))

    def planned(loss_tile_bytes: int | None) -> tuple[Prepared, Plan]:
        progress("capturing the model")
        batch = captured(1, loss_tile_bytes)
        progress("searching the plan")
        plan = make_plan(batch, request)
        if request.micro_batches is not None:
            return batch, plan
        return in_parts(plan, batch, lambda count: captured(count, loss_tile_bytes), searched)

    def graph_and_plan(found: tuple[Prepared, Plan]) -> tuple[Graph, Plan]:
        return found[0].analysis.graph, found[1]

    def faster(*found: tuple[Prepared, Plan]) -> tuple[Prepared, Plan]:
        return min(found, key=lambda each: composed(*graph_and_plan(each), **request.figures).step_seconds)

    with shown_planning() as progress, inner_tensors_stored(model):
        prepared, plan = best_in_tiles(planned, tile_bytes_of(request), graph_and_plan, faster)
    return Explanation(
        prepared.analysis.graph,
        plan,
        found,
        run_of(plan, request.training_state),
        memory_bound_bytes=request.bound_bytes,
        request=request,
    )


def _cluster_with(
    cluster: Cluster | Hardware | str | os.PathLike[str], mesh: MeshLike | None
) -> tuple[Cluster, Mesh | None]:
    """A cluster and the mesh on it, if one is named; MeshError where the mesh has more ranks."""
    found = find_cluster(cluster)
    if isinstance(cluster, (str, os.PathLike)):
        found = with_eager_runs(found)
    axes = axes_of(mesh, None)
    if axes is not None and axes.ranks > found.ranks:
        raise MeshError(f"The mesh {axes} has {axes.ranks} ranks, but {found} has {found.ranks}.")
    return found, axes


def _refuse_odd(model: nn.Module, loss_fn: object) -> None:
    """Raises AutoparError for a model that is compiled already, and for a loss that is no function."""
    if isinstance(model, CompiledModule):
        raise AutoparError("This model is compiled already: autopar.compile takes the plain model, once.")
    if loss_fn is not None and not callable(loss_fn):
        raise AutoparError(f"loss_fn={loss_fn!r} is no function: give one such as torch.nn.functional.cross_entropy.")
