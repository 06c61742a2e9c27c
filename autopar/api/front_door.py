"""The front door: `compile` and `explain`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.machine import MeshLike, axes_of, device_of, hardware_of
from autopar.api.notebook import shown_planning
from autopar.api.planner import Planner
from autopar.capture.export import LossFunction
from autopar.capture.rows import arguments_of_replica
from autopar.cost_model import Cluster, Hardware, find_cluster
from autopar.cost_model.items import TrainingState
from autopar.cost_model.software import with_eager_runs
from autopar.errors import AutoparError, MeshError, names_its_arguments
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.ir import PIPELINE_AXIS, Mesh, MixedPrecision, Plan
from autopar.ir.recompute import SAVED_TIERS, RecomputeWish, is_saved_wish
from autopar.planning.planning import (
    Prepared,
    in_parts,
    make_plan,
    policy_of,
    prepare_step,
    split_example,
)
from autopar.planning.stored_plans import StoredPlans
from autopar.runtime.compiled import Executor, ExecutorName
from autopar.runtime.failures import show_failures
from autopar.runtime.files import Files
from autopar.runtime.initialise import InitFunction
from autopar.runtime.inputs import Arguments, first_micro_batch
from autopar.runtime.loss_scale import LossScaling
from autopar.runtime.module import CompiledModule
from autopar.runtime.processes import (
    BUCKET_BYTES,
    check_world,
    join_process_group,
    world_size,
)
from autopar.runtime.settings import Batch, Outputs, Settings
from autopar.runtime.weights import WeightFiles
from autopar.search import RecipeLike
from autopar.search.recipes import format_recipe, is_open
from autopar.search.request import Request, in_bytes, listed_depths, listed_names
from autopar.search.request_fields import HEADROOM


@names_its_arguments
def compile(
    model: nn.Module,
    *,
    example_inputs: Any = None,
    loss_fn: LossFunction | None = None,
    mesh: MeshLike | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: RecomputeWish | None = None,
    stages: int | Sequence[int] | None = None,
    offload: bool = False,
    without: str | Sequence[str] = (),
    inside_node: str | Sequence[str] = (),
    decompose: str | Sequence[str] = (),
    overlap_batches: int | None = None,
    precision: MixedPrecision | str | None = None,
    training_state: TrainingState | str | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    memory_bytes: int | str | None = None,
    headroom: float = HEADROOM,
    device: torch.device | str | None = None,
    init_fn: InitFunction | None = None,
    weights: str | os.PathLike[str] | None = None,
    nvme: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
    outputs: Outputs | None = None,
    batch: Batch = "global",
    timeout_seconds: float | None = None,
    skip_nonfinite: bool = False,
    loss_scale: LossScaling | float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    executor: ExecutorName = "eager",
) -> CompiledModule:
    """Makes a single-device model run on all ranks.

    Under `torchrun` the default process group is used, and made if there is none; without it the model
    runs on one rank. Every rank calls this with the same arguments.

    Args:
        model: plain PyTorch; its parameters may be on the meta device. They become DTensors in place, so
            that an optimizer made of them before stays valid.
        example_inputs: a global batch as `step` takes it: a tuple, a dict of keyword arguments, or one
            tensor. Without it the first call is the example.
        loss_fn: takes the model's result and then the last entries of the batch, and returns a scalar, or
            `(scalar, extras)` with further results of a step; None if the model returns its loss itself.
        mesh: the axes and their sizes, such as `{"dp": 2, "tp": 4}` or `"dp=2,tp=4"`; without it they are searched
            too. The axis `pp` has the pipeline stages. Ranks along the last axis are neighbours. Text may name the
            order in which axes nest where several split one dim, as `"dp=2,tp=4 order tp,dp"`; else it is searched.
        plan: an earlier plan, or the file it was saved in; nothing is searched then.
        recipe: constraints on the search, for all axes or by axis:
            `{"pp": "1f1b", "dp": "zero1", "tp": "tp"}`. With `local:K`, `geo:K` or `diloco:K` for its first axis the
            ranks along it are replicas that meet every K steps, which is no longer the result of one device
            (docs/local_steps.md).
        pins: single choices, such as `{"layers.*.mlp.up.weight": "S(0)@tp"}`.
        micro_batches: number of micro-batches that `step` cuts the batch into, along dim 0 of every input;
            by default what the search finds best, which is 1 unless memory is scarce, and where several would change
            a result.
        schedule: order in which stages run micro-batches: gpipe, 1f1b, interleaved, looped-bfs, zb, zbv or
            dualpipev; by default what the search finds best. Under pipedream, pipedream-sync and 2bw stages update
            inside of a step, which is no longer the result of one device (docs/versions.md).
        chunks: stages of each pipeline rank, for schedules that take several.
        recompute: "none" keeps everything for backward; "full" keeps only the inputs of every layer, and
            recomputes the layer in backward; "partitioned" keeps each rank's slice of these inputs along axes on which
            they are replicated, and gathers them again; "offloaded" moves these slices to the host's memory until
            backward; 3 does so with the first three layers of every stage; 0.5
            keeps at most half of what recomputation can save. By default nothing is recomputed if the step
            fits into memory; else blocks or single ops, whichever is faster within the memory, unless
            sharding more is.
        stages: numbers of pipeline ranks to choose among, such as 4 or (1, 2). By default any; under a recipe that does
            not name `pp`, several only where no plan with one fits.
        offload: whether parameters may be stored in the host's memory also where a plan fits without; by default only
            where that is needed, or promises a faster step (docs/tiers.md).
        without: what the plan must not use: recompute, offload, dp, tp, sp, ddp, zero1, zero2 or zero3.
        inside_node: axes, dp or tp, whose ranks must share a node.
        decompose: mesh axes, such as "tp", along which an all-gather before linear layers, or a reduce-scatter after
            one, runs piece by piece while the pieces that are there are multiplied (docs/overlap.md); "auto" for the
            axes along which that makes the priced step shorter. By default none.
        overlap_batches: number of micro-batches that run at a time, such as 2: their ops take turns, so that the
            collectives of each travel while another computes (docs/overlap.md). By default 1.
        precision: a mixed-precision policy, such as "bf16" or a `MixedPrecision`: parameters stay in their
            own format, are cast once a step before they are gathered, and gradients are added up and
            reduced in the format of the policy. By default everything is computed in the model's own
            formats (docs/precision.md).
        training_state: what the optimizer will keep for each parameter, such as "adamw8bit" for the AdamW8bit
            of torchao; the memory of a plan is priced with it (docs/optimizers.md). By default AdamW with two
            moments in the parameters' own formats.
        hardware: machine to price for: a catalogue name, the path of a TOML file such as `autopar
            calibrate` writes, or figures; by default a guess from the kind of the device.
        memory_bytes: bound on the memory of a rank, in bytes or as text such as "70GB" (GB is 1e9 bytes); by default
            the memory of the hardware less the headroom. Where nothing fits on the devices, or where that is faster,
            parameters are stored in the host's memory (docs/tiers.md).
        headroom: fraction of the hardware's memory that the plan leaves free.
        device: where this rank computes, such as "cpu" to insist on processors, or "cuda". By default a model that
            lies on an accelerator stays there; under a launcher any other goes to this rank's accelerator, shard by
            shard, if there is one (docs/start.md). Batches may lie anywhere.
        init_fn: called with each meta-device module that owns tensors, in place of its
            `reset_parameters()`.
        weights: folder or file of safetensors with initial values under the names of `state_dict()`, such
            as `save_pretrained` of transformers writes; each rank reads its own shards alone.
        nvme: folder on a disk of this machine, for a plan or recipe that keeps parameters in the tier nvme; files there
            have no names, and their space is free again when the process ends (docs/tiers.md).
        cache: folder where the plans that the first rank searches and the captures of the model are kept, as JSON, for
            the next start of the script; by default what the environment variable AUTOPAR_CACHE names, and nothing is
            kept without it (docs/search.md). They are taken again only for the same model, Python code and values,
            sizes, request and versions.
        seed: seed for the initial values of a meta-device model.
        outputs: what `model(...)` returns: "whole", all of it on every rank, of which all ranks compute the same loss;
            "local", this rank's part in the layout of the plan, where the gradients are those of the mean of the
            ranks' losses, as under DDP; or "dtensor". By default "whole", and "local" with batch="local"
            (docs/training.md).
        batch: what every rank gives to `step` and `model(...)`: "global", the same whole batch, or "local",
            rows of its own, as DistributedSampler hands them out; `example_inputs` is given likewise.
        timeout_seconds: time that a collective may wait for the other ranks before the step ends with an
            error; by default the timeout of the process groups. Gloo notices a dead process at once.
        skip_nonfinite: whether a step whose loss or gradients hold a NaN or an infinity is skipped on all ranks
            alike: it leaves no gradients, so that torch's optimizers change nothing, and the buffers as they were
            (docs/training.md).
        loss_scale: number that the backward of `step` begins with, so that small gradients of float16 are not zero: an
            `autopar.LossScaling`, by which it changes, or a number that stays. By default the scaling of
            `torch.amp.GradScaler` where `precision` has float16, and none elsewhere (docs/precision.md).
        bucket_bytes: about the size of the message of one collective.
        executor: "eager" runs the plan op by op; "inductor" and "aot_eager" compile the ops between
            gathers of parameters, block by block, with these backends of torch.compile.

    On one rank, without torchrun:

    >>> import autopar, torch
    >>> model = autopar.compile(torch.nn.Linear(8, 2), loss_fn=torch.nn.functional.mse_loss)
    >>> loss = model.step(torch.ones(4, 8), torch.zeros(4, 2))
    >>> loss.shape, model.plan.mesh.size
    (torch.Size([]), 1)

    Raises AutoparError for an unknown executor and for a device that is not there, MeshError if the world does not
    match the mesh or two ranks compute on one accelerator, PlanError for a plan of another model, and CaptureError,
    RecipeError or SearchError where no plan can be made.
    """
    show_failures()
    decomposed = listed_names(decompose)
    loaded = _loaded(plan, {
        "schedule": schedule, "chunks": chunks, "recompute": recompute, "decompose": decomposed or None,
        "overlap_batches": overlap_batches,
    })  # fmt: skip
    _refuse_search(loaded, {
        "recipe": recipe, "pins": pins, "stages": stages, "offload": offload, "without": without,
        "inside_node": inside_node, "memory_bytes": memory_bytes,
    })  # fmt: skip
    _refuse_unknown("batch", batch, get_args(Batch))
    outputs = outputs or ("whole" if batch == "global" else "local")
    _refuse_unknown("outputs", outputs, get_args(Outputs))
    policy = policy_of(precision, loaded)
    device = device_of(model, mesh, device)
    priced, assumed = hardware_of(hardware, device)
    join_process_group(device)
    request = Request(
        priced, ranks=world_size(), mesh=_checked(axes_of(mesh, loaded)), recipe=recipe,
        pins=pins or {}, memory_bytes=in_bytes(memory_bytes), headroom=headroom,
        micro_batches=_micro_batches(micro_batches, loaded), schedule=schedule, chunks=chunks,
        recompute=recompute, stages=listed_depths(stages), offload=offload or None,
        without=frozenset(listed_names(without)), inside_node=listed_names(inside_node),
        decompose=decomposed, precision=policy, cuts_batch=True,
        overlap_batches=1 if overlap_batches is None else overlap_batches,
        training_state=TrainingState.of(training_state),
        splits_backward=not Executor(executor).compiles,
        refines=loaded is None and not isinstance(mesh, DeviceMesh),
    ).of_replica(loaded)  # fmt: skip
    planner = Planner(
        request, loss_fn=loss_fn, plan=loaded, device=device, timeout_seconds=timeout_seconds,
        device_mesh=mesh if isinstance(mesh, DeviceMesh) else None, assumed=assumed,
        files=None if nvme is None else Files.at(nvme), stored=_stored(cache),
    )  # fmt: skip
    device_mesh = planner.device_mesh()
    settings = Settings(
        micro_batches=request.micro_batches, device=device, device_mesh=device_mesh,
        replicas=None if request.meeting is None else planner.world().replicas,
        init_fn=init_fn, seed=seed, outputs=outputs, batch=batch,
        bucket_bytes=bucket_bytes, executor=Executor(executor), timeout_seconds=timeout_seconds,
        returns_loss=loss_fn is None, skip_nonfinite=skip_nonfinite, weights=_weights_of(model, weights),
        has_stages=request.mesh is not None and PIPELINE_AXIS in request.mesh.names,
        loss_scaling=LossScaling.of(loss_scale, policy),
    )  # fmt: skip
    return _prepared(CompiledModule(model, planner, settings), example_inputs)


def _stored(cache: str | os.PathLike[str] | None) -> StoredPlans:
    """The folder of plans that was named, by the caller or else by the environment."""
    folder = cache or os.environ.get("AUTOPAR_CACHE")
    return StoredPlans(Path(folder) if folder else None)


def _loaded(
    plan: Plan | str | os.PathLike[str] | None, choices: Mapping[str, object]
) -> Plan | None:
    """The plan that was given, read from its file; AutoparError for a choice that it was not made with."""
    loaded = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    _refuse_other_choices(loaded, choices)
    return loaded


def _weights_of(model: nn.Module, weights: str | os.PathLike[str] | None) -> WeightFiles | None:
    """The files of weights, which are this model's."""
    if weights is None:
        return None
    files = WeightFiles.at(weights)
    files.check(model)
    return files


def _refuse_unknown(name: str, asked: object, known: Sequence[str]) -> None:
    """Raises AutoparError where an argument is none of the words that it can be."""
    if asked not in known:
        *words, last = map(repr, known)
        raise AutoparError(f"{name}={asked!r} is neither {', '.join(words)} nor {last}.")


def _prepared(compiled: CompiledModule, example_inputs: Any) -> CompiledModule:
    """The compiled module, with its program where an example was given."""
    if example_inputs is not None:
        args, kwargs = split_example(example_inputs)
        with shown_planning() as progress:
            progress("capturing and planning the model")
            compiled.prepare(*args, **kwargs)
    return compiled


def _micro_batches(asked: int | None, plan: Plan | None) -> int | None:
    if plan is None or asked == plan.micro_batches:
        return asked
    if asked is None:
        return plan.micro_batches
    raise AutoparError(
        f"The plan was made for {plan.micro_batches} micro-batches, and compile was given "
        f"micro_batches={asked}; leave it out, or make another plan."
    )


def _checked(mesh: Mesh | None) -> Mesh | None:
    """A mesh that has as many ranks as run; MeshError otherwise."""
    if mesh is not None:
        check_world(mesh)
    return mesh


def _refuse_other_choices(plan: Plan | None, choices: Mapping[str, object]) -> None:
    """Raises AutoparError where an argument asks for something else than the given plan has."""
    if plan is None:
        return
    pipeline = plan.pipeline
    wish = choices.get("recompute")
    tiers = {how.tier for how in plan.saved.values()}
    asks_for_slices = (
        is_saved_wish(wish) and plan.recompute == "full" and tiers <= {SAVED_TIERS[wish]}
    )
    found = {
        "schedule": None if pipeline is None else pipeline.schedule,
        "chunks": None if pipeline is None else pipeline.chunks,
        "recompute": wish if asks_for_slices else plan.recompute,
        "decompose": plan.decomposed,
        "overlap_batches": plan.overlap_batches,
    }
    for name, asked in choices.items():
        if asked not in (None, found[name]):
            raise AutoparError(
                f"The plan has {name}={found[name]!r}, and compile was given {name}={asked!r}; leave it "
                "out, or make another plan."
            )


def _refuse_search(plan: Plan | None, wishes: Mapping[str, object]) -> None:
    """Raises AutoparError where a plan is given and an argument is a wish for the search of another one."""
    if plan is None:
        return
    beside = [name for name, wish in wishes.items() if wish]
    recipe: Any = wishes.get("recipe")
    if beside and recipe and (is_open(recipe) or format_recipe(recipe) == plan.recipe):
        beside.remove("recipe")
    if beside:
        words = ", ".join(f"{name}={wishes[name]!r}" for name in beside)
        raise AutoparError(
            f"A plan is given, so that nothing is searched, and {words} would have no effect: leave out "
            f"{', '.join(f'{name}=' for name in beside)}, or plan= to search with it."
        )


@names_its_arguments
def explain(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: MeshLike | None = None,
    cluster: Cluster | Hardware | str | os.PathLike[str] = "h100",
    loss_fn: LossFunction | None = None,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | str | None = None,
    headroom: float = HEADROOM,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: RecomputeWish | None = None,
    stages: int | Sequence[int] | None = None,
    offload: bool = False,
    without: str | Sequence[str] = (),
    inside_node: str | Sequence[str] = (),
    decompose: str | Sequence[str] = (),
    overlap_batches: int = 1,
    precision: MixedPrecision | str | None = None,
    training_state: TrainingState | str | None = None,
) -> Explanation:
    """Plans a model without devices, weights or a process group, and says what the plan costs.

    Args:
        model: plain PyTorch, on any device; on the meta device it takes no memory.
        example_inputs: one micro-batch of all ranks, or the whole batch if `micro_batches` is left
            out: a tuple of arguments, a dict of keyword arguments, or one tensor.
        mesh: the axes and their sizes; without it they are searched for all ranks of the cluster.
        cluster: a name such as `h100x8x16`, the path of a TOML file, or figures.
        loss_fn, recipe, pins, memory_bytes, headroom, schedule, chunks, recompute, stages, offload, without,
            inside_node, decompose, overlap_batches: the same as in `compile`.
        micro_batches: number of micro-batches in a step; by default as in `compile`.
        precision: the same as in `compile`. Gradients are priced in the format that they are reduced in, and
            parameters at rest in their own.
        training_state: the same as in `compile`.

    >>> import autopar, torch
    >>> model = torch.nn.Linear(1024, 1024, device="meta")
    >>> x = torch.empty(64, 1024, device="meta")
    >>> found = autopar.explain(model, x, mesh={"dp": 8}, cluster="h100x8", loss_fn=torch.mean)
    >>> found.plan.mesh.size, found.fits
    (8, True)

    Raises CaptureError, MeshError, RecipeError or SearchError as `compile` does, AutoparError for an
    unknown cluster.
    """
    found, axes = _cluster_with(cluster, mesh)
    request = Request(
        found.hardware, ranks=found.ranks if axes is None else None, mesh=axes, recipe=recipe,
        pins=pins or {}, memory_bytes=in_bytes(memory_bytes),
        headroom=headroom, micro_batches=micro_batches, schedule=schedule, chunks=chunks,
        recompute=recompute, stages=listed_depths(stages), offload=offload or None,
        without=frozenset(listed_names(without)), inside_node=listed_names(inside_node),
        decompose=listed_names(decompose), precision=MixedPrecision.of(precision), overlap_batches=overlap_batches,
        training_state=TrainingState.of(training_state), refines=True, cuts_batch=True,
    )  # fmt: skip
    args, kwargs = split_example(example_inputs)
    request = request.of_replica()
    if request.meeting is not None:
        args, kwargs = arguments_of_replica(args, kwargs, 0, request.meeting.replicas)
    arguments = Arguments.of(args, kwargs)

    def captured(count: int) -> Prepared:
        own_args, own_kwargs = arguments.rebuild(first_micro_batch(arguments, count))
        return prepare_step(
            model, own_args, own_kwargs, loss_fn=loss_fn, precision=request.precision
        )

    def searched(prepared: Prepared, count: int) -> Plan:
        return make_plan(prepared, request.of_micro_batches(count))

    with shown_planning() as progress:
        progress("capturing the model")
        batch = captured(1)
        progress("searching the plan")
        prepared, plan = batch, make_plan(batch, request)
        if micro_batches is None:
            prepared, plan = in_parts(plan, batch, captured, searched)
    return Explanation(
        prepared.analysis.graph, plan, found, run_of(plan, request.training_state),
        memory_bound_bytes=request.bound_bytes, request=request,
    )  # fmt: skip


def _cluster_with(
    cluster: Cluster | Hardware | str | os.PathLike[str], mesh: MeshLike | None
) -> tuple[Cluster, Mesh | None]:
    """A cluster and the mesh on it, if one is named; MeshError where the mesh has more ranks."""
    found = find_cluster(cluster)
    if isinstance(cluster, (str, os.PathLike)):
        found = with_eager_runs(found)
    axes = axes_of(mesh, None)
    if axes is not None and axes.ranks > found.ranks:
        raise MeshError(f"The mesh {axes} has {axes.ranks} ranks, and {found} has {found.ranks}.")
    return found, axes
