"""The front door: `compile` and `explain`."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import errors
from autopar.capture import LossFunction
from autopar.cost_model import Cluster, Hardware, find_cluster, find_hardware, price
from autopar.cost_model.software import as_eager_runs
from autopar.errors import AutoparError, MeshError, RecipeError, SearchError
from autopar.explanation import Explanation, run_of
from autopar.ir import (
    PIPELINE_AXIS,
    Graph,
    Mesh,
    MixedPrecision,
    ParameterPlan,
    Plan,
    R,
    without_pipeline,
)
from autopar.ir.recompute import RecomputeWish
from autopar.planning import (
    Prepared,
    StageWishes,
    has_same_ops,
    make_plan,
    plan_again,
    policy_of,
    prepare_forward,
    prepare_step,
    split_example,
    unsplit_plan,
    why_not_again,
)
from autopar.program import build_program
from autopar.runtime.compiled import Executor, ExecutorName
from autopar.runtime.initialise import InitFunction
from autopar.runtime.module import CompiledModule, Fixed, Outputs, Programs, Settings
from autopar.runtime.world import World, set_timeout
from autopar.schedules import check_micro_batches, takes, unbounded
from autopar.search import RecipeLike
from autopar.search.batches import captured_batch, with_batch
from autopar.search.notes import axis_lines, format_count
from autopar.search.recipes import split_recipe
from autopar.stages import cut_stages, cuts_where_parameters_lie

log = logging.getLogger("autopar")

MeshLike = DeviceMesh | Mesh | Mapping[str, int]
_BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel
_NO_BOUND_BYTES = 2**62


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
    precision: MixedPrecision | str | None = None,
    hardware: Hardware | str | None = None,
    memory_bytes: int | None = None,
    device: torch.device | str | None = None,
    init_fn: InitFunction | None = None,
    seed: int = 0,
    outputs: Outputs = "local",
    timeout_seconds: float | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
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
        loss_fn: takes the model's result and then the last entries of the batch, and returns a scalar;
            None if the model returns its loss itself.
        mesh: the axes; without it its shape is searched too. The axis `pp` is that of pipeline stages.
        plan: one made before, or the file it was saved in; nothing is searched then.
        recipe: constraints on the search, for all axes or by axis:
            `{"pp": "1f1b", "dp": "zero1", "tp": "tp"}`.
        pins: single choices, such as `{"layers.*.mlp.up.weight": "S(0)@tp"}`.
        micro_batches: into how many parts `step` cuts the batch along dim 0 of every input; by default
            1, and with pipeline stages what the search finds best.
        schedule: in which order stages run micro-batches: gpipe, 1f1b, interleaved, looped-bfs, zb, zbv or
            dualpipev; by default what the search finds best.
        chunks: stages of each pipeline rank, for schedules that take several.
        recompute: "none" keeps everything for backward; "full" keeps of every layer only what enters it, and
            runs it again in backward; 3 does so with the first three layers of every stage; 0.5 with as
            few as leave half of the memory that "full" would save. By default nothing runs again that
            fits into memory, and where not, as few layers as do, if that is faster than to shard more.
        precision: a mixed-precision policy, such as "bf16" or a `MixedPrecision`: parameters stay in their
            own format, are cast once a step before they are gathered, and gradients are added up and
            reduced in theirs. By default everything is computed as the model has it (docs/precision.md).
        hardware: what to price for, a catalogue name or figures; by default that of the device's kind.
        memory_bytes: bound on the memory of a rank; by default what the hardware has.
        device: where this rank computes; by default the model's own device, or the mesh's kind for a
            model on the meta device.
        init_fn: called with each meta-device module that owns tensors, in place of its
            `reset_parameters()`.
        seed: of the initial values of a meta-device model.
        outputs: what `model(...)` returns: "local" tensors in the layout of the plan, or "dtensor".
        timeout_seconds: how long a collective may wait for the other ranks before the step ends with an
            error; by default as the process groups have it. Gloo notices a dead process at once.
        bucket_bytes: about how much one collective carries.
        executor: "eager" runs the plan op by op; "inductor" and "aot_eager" compile what lies between
            gathers of parameters, block by block, with these backends of torch.compile.

    Raises AutoparError for an unknown executor, MeshError if the world does not match the mesh,
    PlanError for a plan of another model,
    CaptureError, RecipeError or SearchError where no plan can be made.
    """
    loaded = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    stages = StageWishes(schedule, chunks, recompute)
    _refuse_other_wishes(loaded, stages)
    planner = _Planner(
        loss_fn=loss_fn, mesh=mesh, plan=loaded, recipe=recipe, pins=pins, hardware=hardware,
        memory_bytes=memory_bytes, timeout_seconds=timeout_seconds,
        device=_device(model, mesh, device), stages=stages,
        precision=policy_of(precision, loaded),
    )  # fmt: skip
    settings = Settings(
        micro_batches=_micro_batches(micro_batches, loaded), device=planner.device, device_mesh=planner.device_mesh(),
        init_fn=init_fn, seed=seed, outputs=outputs, bucket_bytes=bucket_bytes,
        executor=Executor(executor), timeout_seconds=timeout_seconds,
    )  # fmt: skip
    compiled = CompiledModule(model, planner, settings)
    if example_inputs is not None:
        args, kwargs = split_example(example_inputs)
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


def _refuse_other_wishes(plan: Plan | None, wishes: StageWishes) -> None:
    if plan is None:
        return
    pipeline = plan.pipeline
    found = {
        "schedule": None if pipeline is None else pipeline.schedule,
        "chunks": None if pipeline is None else pipeline.chunks,
        "recompute": plan.recompute,
    }
    for name, asked in asdict(wishes).items():
        if asked not in (None, found[name]):
            raise AutoparError(
                f"The plan has {name}={found[name]!r}, and compile was given {name}={asked!r}; leave it "
                "out, or make another plan."
            )


def _device(
    model: nn.Module, mesh: MeshLike | None, device: torch.device | str | None
) -> torch.device:
    if device is not None:
        return torch.device(device)
    own = {p.device for p in model.parameters() if not p.is_meta}
    if len(own) > 1:
        raise AutoparError(
            f"The model lies on several devices ({', '.join(sorted(map(str, own)))}); move it to one, or "
            "pass device=... to autopar.compile."
        )
    if own:
        return own.pop()
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    return (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


class _Planner:
    """Makes programs, one plan for all ranks, and the mesh they run on."""

    def __init__(
        self,
        *,
        loss_fn: LossFunction | None,
        mesh: MeshLike | None,
        plan: Plan | None,
        recipe: RecipeLike,
        pins: Mapping[str, str] | None,
        hardware: Hardware | str | None,
        memory_bytes: int | None,
        device: torch.device,
        timeout_seconds: float | None,
        stages: StageWishes,
        precision: MixedPrecision | None,
    ) -> None:
        self.device, self._stages, self._precision = device, stages, precision
        self._loss_fn, self._plan = loss_fn, plan
        self._recipe, self._pins, self._memory_bytes = recipe, pins, memory_bytes
        self._hardware, self._assumed = _hardware(hardware, device)
        self._timeout_seconds = timeout_seconds
        self._device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
        join_process_group(device)
        self._mesh = _axes(mesh, plan)
        if self._mesh is not None:
            check_world(self._mesh)
        self._world: World | None = None
        self._first: Prepared | None = None
        self._made: dict[bool, list[Plan]] = {True: [], False: []}  # of steps, of forwards

    def device_mesh(self) -> DeviceMesh | None:
        """A mesh over all ranks: that of the plan if its shape is known, else of one axis."""
        if self._mesh is not None:
            return self.world().device_mesh
        return make_world(Mesh((("all", world_size()),)), self.device, None).device_mesh

    def micro_batches(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int:
        """How many micro-batches are best for a step of this whole batch."""
        if self._mesh is not None and PIPELINE_AXIS not in self._mesh.names:
            return 1
        prepared = self._prepare_step(model, args, kwargs)
        return agreed(lambda: self._search(prepared, None, captured=1)).micro_batches

    def program(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        micro_batches: int,
        is_step: bool,
        fixed: Fixed | None,
    ) -> Programs:
        """Captures and plans; `fixed` is where parameters already lie."""
        if is_step:
            prepared = self._prepare_step(model, args, kwargs)
        else:
            prepared = prepare_forward(model, args, kwargs, precision=self._precision)
        plan = self._plan if fixed is None else None
        if plan is None:
            plan = agreed(
                lambda: (
                    self._search(
                        prepared, micro_batches if is_step else None, captured=micro_batches
                    )
                    if fixed is None
                    else self._following(prepared, fixed, micro_batches, is_step=is_step)
                )
            )
        if is_step and plan.pipeline is not None:
            check_micro_batches(plan.pipeline, plan.micro_batches)
        program = build_program(prepared.captured, prepared.analysis, plan)
        stages = cut_stages(program, prepared.analysis.graph)
        if self._first is None:
            self._first, self._mesh = prepared, plan.world_mesh
        if all(plan.ops != made.ops for made in self._made[is_step]):
            self._made[is_step].append(plan)
        return Programs(program, stages)

    def _prepare_step(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Prepared:
        return prepare_step(model, args, kwargs, loss_fn=self._loss_fn, precision=self._precision)

    def _search(self, prepared: Prepared, micro_batches: int | None, *, captured: int) -> Plan:
        plan = make_plan(
            prepared, self._mesh, world_size=world_size(), hardware=self._hardware,
            recipe=self._recipe, pins=self._pins, memory_bytes=self._memory_bytes,
            micro_batches=micro_batches, captured_micro_batches=captured, stages=self._stages,
        )  # fmt: skip
        if self._mesh is not None:
            warn_of_idle_axes(plan)
        for note in plan.notes:
            log.info("%s", note)
        return replace(plan, notes=(*plan.notes, *self._assumed))

    def _following(
        self, prepared: Prepared, fixed: Fixed, micro_batches: int, *, is_step: bool
    ) -> Plan:
        """A plan for another graph of the model, or other shapes; its parameters stay where they lie.

        The choices of an earlier plan are taken again where they are legal, so that nothing is searched.
        """
        earlier = self._made[is_step]
        plan = next(
            (again for p in earlier if (again := plan_again(p, prepared, micro_batches))
             and self._has_room(again, prepared)), None,
        )  # fmt: skip
        if plan is None:
            plan = self._search_anew(prepared, fixed, micro_batches)
            alike = [p for p in earlier if has_same_ops(p, prepared)]
            if alike:
                warn_of_shape(alike[0], plan, prepared)
        if plan.pipeline is None or fixed.pipeline is None:
            return plan
        pipeline = replace(fixed.pipeline, cuts=plan.pipeline.cuts)
        if is_step and not takes(pipeline, micro_batches):
            pipeline = unbounded(pipeline)
            warnings.warn(
                f"This batch can be cut into {format_count(micro_batches, 'micro-batch')}, which the schedule "
                f"{fixed.pipeline.schedule} does not take; it is run by {pipeline.schedule}.",
                stacklevel=2,
            )
        return replace(plan, pipeline=pipeline)

    def _has_room(self, plan: Plan, prepared: Prepared) -> bool:
        """Whether the plan fits into memory; stages and recomputation were sized for the first batch."""
        if plan.pipeline is not None or plan.recompute != "none":
            return True
        bound = self._hardware.memory_bytes if self._memory_bytes is None else self._memory_bytes
        return price(prepared.analysis.graph, plan, self._hardware).memory_bytes <= bound

    def _search_anew(self, prepared: Prepared, fixed: Fixed, micro_batches: int) -> Plan:
        assert self._mesh is not None, "there was a first program"
        mesh, graph = without_pipeline(self._mesh), prepared.analysis.graph
        parameters = _with_unused(fixed.parameters, prepared, mesh)
        is_whole = fixed.pipeline is None and fixed.recompute == "none"

        def search(recipe: RecipeLike) -> Plan:
            return make_plan(
                prepared, mesh, hardware=self._hardware, recipe=recipe,
                memory_bytes=self._memory_bytes if is_whole else _NO_BOUND_BYTES,
                micro_batches=micro_batches, fixed_storage=parameters,
            )  # fmt: skip

        try:
            plan = search(split_recipe(self._recipe)[1])
        except (MeshError, RecipeError, SearchError):
            try:
                # The parameters lie as the recipe has it; this graph need not.
                plan = search("auto")
            except MeshError:  # an axis divides nothing any more
                plan = unsplit_plan(prepared, mesh, parameters, micro_batches)
        plan = replace(plan, recompute=fixed.recompute)
        if fixed.pipeline is None:
            return plan
        cuts = cuts_where_parameters_lie(graph, fixed.users, fixed.pipeline.stages)
        return replace(plan, pipeline=replace(fixed.pipeline, cuts=cuts))

    def world(self) -> World:
        """The mesh as it runs; known once the first program is."""
        if self._world is None:
            assert self._mesh is not None, "the mesh is known once there is a program"
            self._world = make_world(
                self._mesh, self.device, self._device_mesh, self._timeout_seconds
            )
            if self._timeout_seconds is not None:
                set_timeout(self._world, self._timeout_seconds)
        return self._world

    def explain(self, plan: Plan) -> Explanation:
        """The plan of the first program for people, with what it costs."""
        assert self._first is not None, "a plan was made for a program"
        return _explained(self._first.analysis.graph, plan, self._hardware)


def explain(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: MeshLike,
    cluster: Cluster | str = "h100",
    loss_fn: LossFunction | None = None,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: RecomputeWish | None = None,
    precision: MixedPrecision | str | None = None,
) -> Explanation:
    """Plans a model without devices, weights or a process group, and says what the plan costs.

    Args:
        model: plain PyTorch, on any device; on the meta device it takes no memory.
        example_inputs: one micro-batch of all ranks, or the whole batch if `micro_batches` is left
            out: a tuple of arguments, a dict of keyword arguments, or one tensor.
        mesh: the axes.
        cluster: a name such as `h100x8x16`, the path of a TOML file, or a `Cluster`.
        loss_fn, recipe, pins, memory_bytes, schedule, chunks, recompute: as in `compile`.
        micro_batches: of a step; by default what the search finds best with stages, and 1 without.
        precision: as in `compile`. Gradients are priced in the format that they are reduced in, and
            parameters at rest and two moments in the parameters' own.

    Raises CaptureError, MeshError, RecipeError or SearchError as `compile` does, AutoparError for an
    unknown cluster.
    """
    found = as_eager_runs(find_cluster(cluster)) if isinstance(cluster, str) else cluster
    axes = _axes(mesh, None)
    assert axes is not None, "a mesh was given"
    if axes.size > found.ranks:
        raise MeshError(f"The mesh {axes} has {axes.size} ranks, and {found} has {found.ranks}.")
    args, kwargs = split_example(example_inputs)
    prepared = prepare_step(
        model, args, kwargs, loss_fn=loss_fn, precision=MixedPrecision.of(precision)
    )
    plan = make_plan(
        prepared, axes, hardware=found.hardware, recipe=recipe, pins=pins,
        memory_bytes=memory_bytes, micro_batches=micro_batches,
        stages=StageWishes(schedule, chunks, recompute),
    )  # fmt: skip
    graph = prepared.analysis.graph
    if micro_batches is None and plan.micro_batches > 1:
        graph = with_batch(graph, captured_batch(graph) // plan.micro_batches)
    run = run_of(plan)
    return Explanation(graph, plan, found, run, memory_bound_bytes=memory_bytes)


def _explained(graph: Graph, plan: Plan, hardware: Hardware) -> Explanation:
    nodes = -(-plan.world_mesh.size // hardware.devices_per_node)
    return Explanation(graph, plan, Cluster(hardware, nodes), run_of(plan))


def warn_of_idle_axes(plan: Plan) -> None:
    """Warns of axes of the mesh that was asked for whose ranks all do the same."""
    for axis, (name, size) in enumerate(plan.mesh.axes):
        stored = any(p.storage[axis].kind == "S" for p in plan.parameters.values())
        if size > 1 and not stored and all(labels[axis] in "-~" for labels in plan.ops.values()):
            warnings.warn(
                f"The axis {name}={size} splits nothing: its {size} ranks all do the same, because that was "
                "found cheapest for so small a model. Name a recipe to have it split, such as "
                f"recipe={{{name!r}: 'ddp'}}; the axis of pipeline stages is called {PIPELINE_AXIS!r}.",
                stacklevel=2,
            )


def warn_of_shape(first: Plan, plan: Plan, prepared: Prepared) -> None:
    """Warns that a batch of another shape cannot be split as the first was, and how it is instead."""
    axes = "; ".join(axis_lines(prepared.analysis.graph, plan))
    reason = why_not_again(first, prepared) or "it would not fit into memory"
    warnings.warn(
        f"This batch cannot be split as the first was: {reason}. It has a plan of "
        f"its own, where {axes}. To avoid it drop a last, smaller batch (drop_last=True), or pad.",
        stacklevel=2,
    )


def _with_unused(
    fixed: Mapping[str, ParameterPlan], prepared: Prepared, mesh: Mesh
) -> Mapping[str, ParameterPlan]:
    """Parameters that the first program had not are stored replicated."""
    replicated = ParameterPlan((R,) * len(mesh.axes), (R,) * len(mesh.axes))
    return {name: fixed.get(name, replicated) for name in prepared.analysis.graph.parameters}


def _hardware(
    hardware: Hardware | str | None, device: torch.device
) -> tuple[Hardware, tuple[str, ...]]:
    """What to price for, and a note where it was assumed."""
    if isinstance(hardware, Hardware):
        return hardware, ()
    if hardware is not None:
        return find_hardware(hardware), ()
    name = "cpu-gloo" if device.type == "cpu" else "h100"
    return find_hardware(name), (f"priced for {name}, a guess from the device {device.type}",)


def _axes(mesh: MeshLike | None, plan: Plan | None) -> Mesh | None:
    """The mesh as data, None if it is to be searched. Raises MeshError where plan and mesh differ."""
    if mesh is None:
        return plan.world_mesh if plan is not None else None
    axes = _device_mesh_axes(mesh) if isinstance(mesh, DeviceMesh) else Mesh.of(mesh)
    if dict(axes.axes).get(PIPELINE_AXIS) == 1:
        axes = without_pipeline(axes)
    if axes.names == (PIPELINE_AXIS,):  # every stage has a mesh, if one of a single rank
        axes = Mesh((*axes.axes, *without_pipeline(axes).axes))
    if plan is not None and plan.world_mesh != axes:
        raise MeshError(
            f"The plan was made for the mesh {plan.world_mesh}, and the mesh given is {axes}."
        )
    return axes


def _device_mesh_axes(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "The DeviceMesh has no axis names; make it with init_device_mesh(..., mesh_dim_names=('dp',))."
        )
    return Mesh(tuple(zip(names, tuple(mesh.mesh.shape), strict=True)))


def join_process_group(device: torch.device) -> None:
    """Under torchrun, makes the default process group if there is none yet."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if launched and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def check_world(mesh: Mesh) -> None:
    """Raises MeshError with both numbers unless the mesh has as many ranks as run."""
    if mesh.size != world_size():
        raise MeshError(
            f"The mesh {mesh} has {mesh.size} ranks, and {world_size()} run here. Start as many with "
            f"torchrun --nproc-per-node {mesh.size}, or give a mesh of {world_size()}."
        )


def make_world(
    mesh: Mesh,
    device: torch.device,
    device_mesh: DeviceMesh | None,
    timeout_seconds: float | None = None,
) -> World:
    """The process groups of the mesh; a single rank without a default group needs none."""
    known = device_mesh is not None and device_mesh.mesh_dim_names == mesh.names
    if not known and dist.is_initialized():
        device_mesh = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.names)
    if PIPELINE_AXIS in mesh.names:
        assert device_mesh is not None, "check_world has found the ranks of the mesh"
        return World.with_pipeline(mesh, device, device_mesh, timeout_seconds)
    return World(mesh, device, device_mesh)


def agreed(make: Callable[[], Plan]) -> Plan:
    """The plan that the first rank makes, on every rank. Its error, too, is raised on every rank."""
    if world_size() == 1:
        return make()
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [json.dumps(make().to_json())]
        except AutoparError as error:
            made = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], str):
        return Plan.from_json(json.loads(made[0]))
    raise _error_of(*made[0])


def _error_of(name: str, text: str) -> AutoparError:
    return getattr(errors, name)(text)
