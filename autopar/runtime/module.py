"""The compiled module: a user's model that runs as programs on this rank.

It has the model's submodules, parameters and buffers under their own names, so that optimizers,
checkpoints, `train()` and `eval()` find everything where it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.guards import ChangedValue, Guards
from autopar.capture.structure import Structure
from autopar.capture.watch import Write
from autopar.errors import CaptureError, PeerError, PlanError, StepError
from autopar.ir import ParameterPlan, Pipeline, Plan
from autopar.ir.recompute import Recompute
from autopar.pipeline.schedules import takes
from autopar.program.program import Program
from autopar.runtime.adoption import Adoption, adopt
from autopar.runtime.clipping import clip_grad_norm_
from autopar.runtime.clock import StepClock
from autopar.runtime.comparison import Comparison
from autopar.runtime.compiled import Executor
from autopar.runtime.executor import BoundProgram, unflatten_outputs
from autopar.runtime.hooks import backward_hooks, refuse_hooks
from autopar.runtime.initialise import (
    InitFunction,
    initial_values,
    place_buffers,
    replaced_values,
)
from autopar.runtime.inputs import (
    Arguments,
    Shape,
    cut_inputs,
    cuts,
    first_micro_batch,
    fitting_micro_batches,
    form,
    shapes_of_parts,
    whole_shapes,
)
from autopar.runtime.outputs import as_dtensor
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.part import RankPart, Users, as_stored, held_by, take_part, users_of
from autopar.runtime.parts import shapes_of_whole, whole_or_own
from autopar.runtime.pipeline import BoundPipeline
from autopar.runtime.processes import world_size
from autopar.runtime.recaptures import Recaptures
from autopar.runtime.shared import SharedParameters
from autopar.runtime.shares import loss_shares
from autopar.runtime.stand_ins import stand_ins
from autopar.runtime.together import warn_together
from autopar.runtime.world import World

log = logging.getLogger("autopar")

Outputs = Literal["local", "dtensor"]
Batch = Literal["global", "local"]

# [Note: programs are kept] Each shape of a batch has a program, which holds a graph and no parameters. As
# many are kept, of steps and of forwards, as this; the one that was used longest ago makes room for another.
KEPT_PROGRAMS = 16
_MANY_SHAPES = 4  # captured so far: time to speak of buckets


@dataclass(frozen=True)
class Programs:
    """The programs that came of one capture.

    Attributes:
        whole: the program of the whole model.
        stages: the programs of its stages.
        guards: the Python values that they were made from.
        writes: what the captured forward does to attributes of modules.
    """

    whole: Program
    stages: Sequence[Program]
    guards: Guards
    writes: Sequence[Write]

    @property
    def pipeline(self) -> Pipeline | None:
        return self.whole.plan.pipeline


# Number of micro-batches -> a context in which the model can be captured with the arguments of one of them.
StandIns = Callable[[int], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]]


class ProgramMaker(Protocol):
    """Makes programs and knows the mesh they run on (implemented by autopar.api.planner)."""

    def program(
        self,
        model: nn.Module,
        stand_ins: StandIns,
        *,
        micro_batches: int | None,
        is_step: bool,
        fixed: Fixed | None,
    ) -> Programs:
        """Captures and plans a step or a forward.

        Args:
            model: the user's model.
            stand_ins: makes the arguments of one of so many micro-batches.
            micro_batches: number of micro-batches of a step; None leaves it open.
            is_step: whether a step is captured, or a forward.
            fixed: where parameters already lie; None for the first program.
        """
        ...

    def predicted(self, plan: Plan) -> tuple[float, float]:
        """Predicted seconds of a step and peak bytes of a rank, of the plan of the first program."""
        ...

    def world(self) -> World:
        """The mesh as it runs; known once the first program is."""
        ...

    def explain(self, plan: Plan) -> object:
        """The plan of the first program for people."""
        ...


@dataclass(frozen=True)
class Settings:
    """Options of a compiled module.

    Attributes:
        micro_batches: into how many parts `step` cuts its batch; None leaves it to the planner.
        device: where it runs.
        device_mesh: any mesh over all ranks, for parameters to become DTensors before there is a plan;
            None for a single rank without process groups.
        init_fn: initialises one meta-device module in place of its `reset_parameters`.
        seed: seed for the initial values of a meta-device model.
        outputs: what `model(...)` returns: local tensors, or DTensors.
        batch: what a rank gives: the batch of all ranks, or its own part of it.
        bucket_bytes: about how much one collective carries.
        executor: what runs the ops of a program.
        timeout_seconds: how long ranks wait for each other where they compare shapes; None for as long
            as the process group does.
    """

    micro_batches: int | None
    device: torch.device
    device_mesh: DeviceMesh | None
    init_fn: InitFunction | None
    seed: int
    outputs: Outputs
    bucket_bytes: int
    executor: Executor
    batch: Batch = "global"
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Fixed:
    """The layouts of parameters since the first program.

    Attributes:
        parameters: how each lies on the mesh of its stage.
        pipeline, recompute: stages and recomputation of the first program.
        users: parameter name -> the stages that use it.
    """

    parameters: Mapping[str, ParameterPlan]
    pipeline: Pipeline | None
    recompute: Recompute
    users: Users


@dataclass
class _Ready:
    """A program with what it was captured under.

    Attributes:
        bound: the program on this rank.
        state: modes of torch at the capture, see `CompiledModule._state`.
        count: number of micro-batches.
        guards: what the capture read of Python.
        structure: what the model was made of.
        writes: what the captured forward does to attributes of modules.
    """

    bound: BoundProgram | BoundPipeline
    state: tuple[object, ...]
    count: int
    guards: Guards
    structure: Structure
    writes: Sequence[Write]

    def holds(self) -> bool:
        """Whether the program still is what a capture would give."""
        return self.guards.hold() and self.structure.hold()

    def broken(self) -> ChangedValue | None:
        """What has changed since the capture."""
        return self.guards.broken() or self.structure.broken()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The global shapes of its inputs."""
        return whole_shapes(self.bound.program, self.count)

    def finish(self) -> None:
        """After a run: does what the forward would have done to Python's values."""
        for write in self.writes:
            write.repeat()


def _words(shapes: Sequence[Sequence[int]]) -> str:
    """`[8, 8], [8]`."""
    return ", ".join(str(list(shape)) for shape in shapes)


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """Inside it inference mode is off: tensors that are made in it can take no part in training later."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


def _release(ready: dict[bool, list[_Ready]]) -> None:
    """Lets go of bound programs before the interpreter ends, and of what they hold of process groups:
    groups that outlive Python abort the process when their threads are torn down.
    """
    for programs in ready.values():
        programs.clear()
    gc.collect()


class CompiledModule(nn.Module):
    """A model that runs on all ranks, as `autopar.compile` returns it.

    `step(*batch)` runs forward and backward of a global batch and leaves gradients; `model(*inputs)` runs
    the forward alone. Everything else is as in the model that was compiled: parameters, buffers,
    `state_dict` and attributes have their original names.
    """

    def __init__(self, model: nn.Module, planner: ProgramMaker, settings: Settings) -> None:
        super().__init__()
        self._hooked = backward_hooks(model)  # adoption leaves the hooks of parameters behind
        self._adoption: Adoption | None = None
        if settings.device_mesh is not None:
            self._adoption = adopt(model, settings.device_mesh)
            weakref.finalize(self, self._adoption.stop)
        self._planner, self._settings = planner, settings
        self._store: ParameterStore | None = None
        self._plan: Plan | None = None
        self._micro_batches = settings.micro_batches
        self._fixed: Fixed | None = None
        self._part = RankPart()
        self._shared: SharedParameters | None = None
        self._ready: dict[bool, list[_Ready]] = {True: [], False: []}  # of steps, of forwards
        self._first_step: Program | None = None
        self._comparison = Comparison(settings.timeout_seconds)
        self._gives_parts = False  # whether ranks have given parts of batches
        self._cuts: dict[str, Shape] = {}  # path of an input -> how the first program cuts its dims
        self._captures, self._capture_seconds = 0, 0.0  # of further shapes
        self._recaptures = Recaptures()
        self._seeds = torch.Generator()  # of random ops; the same on every rank
        self._steps = 0
        self._clock = StepClock()
        # The tables themselves are shared, so that names need no prefix and changes are seen by both.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, table, getattr(model, table))
        object.__setattr__(self, "_original", model)
        self.training = model.training
        weakref.finalize(self, _release, self._ready)

    # --- running

    def step(self, *batch: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward of one global batch; gradients are then ready in `.grad`.

        Under `torch.no_grad()` only the loss is computed, and gradients are left alone.

        Args:
            batch: the model's inputs, and behind them what the loss function takes besides the model's
                result. Each tensor is of the global shape, of which this rank takes its part, or of the
                shape of that part. The first shape is global, or with batch="local" that of a part; another
                one is captured and planned when it first comes, the parameters staying where they lie
                (docs/shapes.md).
            kwargs: keyword arguments of the model.

        Returns:
            The loss of the whole batch, the same on every rank. A mean over what a mask leaves is a mean over the
            whole batch; a loss that is neither a mean, a sum nor a ratio of sums over rows is the mean of the
            micro-batches' losses.

        Raises StepError where the ranks give other shapes or values, or none, PeerError if another rank died or hangs.
        """
        arguments = Arguments.of(batch, kwargs)
        ready = self._program(arguments, is_step=True)
        bound = ready.bound
        parts = self._cut(ready, arguments)
        self._steps += 1
        if self._clock.tick() and bound.world.rank == 0 and log.isEnabledFor(logging.INFO):
            predicted = self._planner.predicted(self.plan)
            log.info("%s", self._clock.against(predicted, self._settings.device))
        try:
            with self._as_captured():
                shares = loss_shares(bound.program, parts, self._original, bound.world)
                loss = bound.step(parts, shares)
        except PeerError as error:
            raise bound.world.explain(error, f"Step {self._steps}") from error
        ready.finish()
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, in the layout of the plan: local tensors, or DTensors if asked for.

        Inputs are as in `step`.
        """
        arguments = Arguments.of(args, kwargs)
        ready = self._program(arguments, is_step=False)
        bound = ready.bound
        if isinstance(bound, BoundPipeline) and torch.is_grad_enabled():
            raise StepError(
                "model(...) was called with autograd on, and its graph ends where a pipeline stage sends "
                "to the next. Call it under torch.no_grad(), or train with model.step(*batch)."
            )
        inputs = self._cut(ready, arguments)[0]
        try:
            with self._as_captured():
                outputs = bound.forward(inputs)
        except PeerError as error:
            raise bound.world.explain(error, "The forward") from error
        ready.finish()
        if self._settings.outputs == "dtensor":
            specs = bound.program.outputs
            outputs = [as_dtensor(x, s, bound.world) for x, s in zip(outputs, specs, strict=True)]
        return unflatten_outputs(bound.program, outputs)

    def _cut(self, ready: _Ready, arguments: Arguments) -> list[list[Tensor]]:
        """What this rank computes with, for every micro-batch."""
        program, world = ready.bound.program, ready.bound.world
        if self._settings.batch == "local":
            arguments = whole_or_own(program, arguments, ready.count, world)
        return cut_inputs(program, arguments, ready.count, world)

    def prepare(self, *batch: Any, **kwargs: Any) -> None:
        """Captures and plans for a batch of this shape, given as `step` takes it, before `step` meets it."""
        arguments = Arguments.of(batch, kwargs)
        self._compare(arguments, "")
        if self._settings.batch == "local":
            arguments = arguments.of_shapes(shapes_of_whole(arguments, world_size()))
        self._add(arguments, is_step=True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.

        As torch.nn.utils.clip_grad_norm_ does for one device, whatever the plan. Every rank calls it.

        Returns:
            The norm before clipping, of shape `()`, the same on every rank.

        Raises StepError for a `norm_type` that is none, PeerError if another rank died or hangs.
        """
        world = self._planner.world()
        stages = None if world.pipe is None else world.pipe.group
        return clip_grad_norm_(
            self._original.named_parameters(), world, max_norm, norm_type,
            stages=stages, counted_elsewhere=self._part.counted_elsewhere,
        )  # fmt: skip

    # --- programs

    def _program(self, arguments: Arguments, *, is_step: bool) -> _Ready:
        """The program for these arguments, made now if there is none."""
        programs = self._ready[is_step]
        known = [r for r in programs if arguments.fits(r.bound.program)]
        shapes, state = self._global_shapes(arguments, known), self._state()
        alike = [r for r in reversed(known) if r.state == state and r.shapes == shapes]
        for each in alike:
            if each.holds():
                # Every rank runs the same number of steps; a single rank may run a forward by itself.
                if is_step:
                    programs.append(programs.pop(programs.index(each)))
                return each
        try:
            if alike:
                return self._add_again(alike[0], arguments.of_shapes(shapes), is_step=is_step)
            return self._add(arguments.of_shapes(shapes), is_step=is_step)
        except CaptureError as error:
            if shapes == arguments.shapes:
                raise
            raise CaptureError(
                f"{error}\n  shapes: {_words(arguments.shapes)} were taken for this rank's parts of "
                f"{_words(shapes)}, as the ranks gave different values. Give all of them whole or all as parts; what "
                'model(...) returns is whole with outputs="dtensor", and may be given back.'
            ) from error

    def _global_shapes(self, arguments: Arguments, known: Sequence[_Ready]) -> tuple[Shape, ...]:
        """The shapes of the whole batch.

        [Note: whole or part] A shape may be the global one, or that of this rank's part of a larger batch.
        The first is global. Where it can be either, ranks compare what they were given: a whole batch is
        the same on all of them, and parts differ. With batch="local" every rank gives its own part always.

        Raises StepError where the ranks gave different values and these cannot be parts.
        """
        if self._settings.batch == "local":
            whole = shapes_of_whole(arguments, world_size())
            if all(each.shapes != whole for each in known):
                self._compare(arguments, "")
            return whole
        forms = [form(r.bound.program, arguments, r.count, r.bound.world) for r in known]
        as_part = next((r.shapes for r, f in zip(known, forms, strict=True) if f == "part"), None)
        if "whole" in forms and as_part is None and not self._gives_parts:
            return arguments.shapes
        if as_part is not None and "whole" not in forms and self._gives_parts:
            return as_part
        if self._compare(arguments, arguments.digest):
            return arguments.shapes
        found = as_part or shapes_of_parts(arguments, self._cuts)
        if found == arguments.shapes:
            raise self._differences(arguments)
        self._gives_parts = True
        return found

    def _compare(self, arguments: Arguments, digest: str) -> bool:
        """Whether all ranks have the same values. Raises StepError unless they have the same shapes."""
        own = json.dumps([[list(shape) for shape in arguments.shapes], digest])
        why = f"The batch has the shapes {_words(arguments.shapes)}, which all ranks compare."
        found = [json.loads(text) for text in self._comparison.gather(own, why)]
        others = [rank for rank, each in enumerate(found) if each[0] != found[0][0]]
        if others:
            said = "; ".join(f"rank {rank} {_words(found[rank][0])}" for rank in (0, *others[:4]))
            raise StepError(
                f"The ranks gave batches of different shapes: {said}. Each has to give the same whole "
                "batch, or parts of one shape: pad parts to one length, and let the samplers drop what "
                "does not divide (DistributedSampler(..., drop_last=True))."
            )
        return all(each == found[0] for each in found)

    def _differences(self, arguments: Arguments) -> StepError:
        """The error of ranks whose values differ where each has to give the whole batch."""
        return StepError(
            f"The ranks gave different values in a batch of the shapes {_words(arguments.shapes)}, where every "
            "rank has to give the same whole batch. If each gives a part of its own, as DistributedSampler "
            'hands them out, say so: autopar.compile(..., batch="local"). Else seed the samplers alike on all '
            'ranks; what model(...) returns is whole with outputs="dtensor", and may be given back.'
        )

    def _add(self, arguments: Arguments, *, is_step: bool) -> _Ready:
        """Captures, plans and binds a program for arguments of global shapes."""
        start = time.perf_counter()
        model = self._original
        refuse_hooks(self._hooked or backward_hooks(model))
        replaced = self._forget_replaced()
        with _lasting():
            programs = self._planner.program(
                model, partial(self._stand_ins, arguments), fixed=self._fixed, is_step=is_step,
                micro_batches=self._count(arguments) if is_step else 1,
            )  # fmt: skip
            count = 1
            if is_step:
                count = programs.whole.plan.micro_batches
                self._micro_batches = self._micro_batches or count
            if self._store is None:
                self._place(programs)
            elif replaced:
                self._place_replaced(programs, replaced)
            ready = _Ready(
                self._bind(programs, count), self._state(), count,
                programs.guards, Structure(model), programs.writes,
            )  # fmt: skip
        self._keep(ready, arguments, time.perf_counter() - start)
        return ready

    def _add_again(self, earlier: _Ready, arguments: Arguments, *, is_step: bool) -> _Ready:
        """Captures anew what a Python value has changed since; says which, and how often."""
        difference = earlier.broken()
        assert difference is not None, "its guards do not hold"
        # A rank whose Python did not change would not come: those that are here find out in time.
        self._comparison.gather(
            difference.words, f"{difference}, for which the model is captured again."
        )
        start = time.perf_counter()
        ready = self._add(arguments, is_step=is_step)
        self._recaptures.count(difference, time.perf_counter() - start)
        return ready

    def _keep(self, ready: _Ready, arguments: Arguments, seconds: float) -> None:
        """Remembers a program, see [Note: programs are kept], and says what shapes cost."""
        program, world = ready.bound.program, ready.bound.world
        kept = self._ready[program.is_step]
        alike = [r for r in kept if r.state == ready.state and arguments.fits(r.bound.program)]
        another = bool(alike) and all(r.shapes != ready.shapes for r in alike)
        for path, cut in zip(arguments.paths, cuts(program, world), strict=True):
            self._cuts.setdefault(path, cut)
        if program.is_step and self._first_step is None:
            self._first_step = program
        kept.append(ready)
        if world.rank == 0:
            log.info("Captured for the shapes %s in %.1f s.", _words(ready.shapes), seconds)
        self._captures += another
        self._capture_seconds += seconds * another
        if another and self._captures + 1 in (_MANY_SHAPES, KEPT_PROGRAMS + 1):
            self._warn_of_shapes()
        del kept[:-KEPT_PROGRAMS]

    def _warn_of_shapes(self) -> None:
        warn_together(
            f"{self._captures + 1} programs so far, one for each shape of a batch and mode of the model: those "
            f"after the first took {self._capture_seconds:.1f} s to capture and plan, and {KEPT_PROGRAMS} are "
            "kept. Pad to few lengths (pad_to_multiple_of=64 of transformers' "
            "collators, or buckets), and drop a last, smaller batch (drop_last=True).",
            stacklevel=5,
        )

    def _count(self, arguments: Arguments) -> int | None:
        """Number of micro-batches of a step: that of the first, where it divides the batch; None if open."""
        if self._first_step is None:
            return self._micro_batches
        assert self._fixed is not None, "there was a first program"
        assert self._micro_batches is not None, "the first step had some number"
        pipeline, usual = self._fixed.pipeline, self._micro_batches
        count = fitting_micro_batches(
            arguments.shapes, self._first_step, usual, self._planner.world(),
            lambda count: pipeline is None or takes(pipeline, count),
        )  # fmt: skip
        if count != usual:
            warn_together(
                f"A batch of the shapes {_words(arguments.shapes)} is run in micro-batches to the number of "
                f"{count}, not {usual}, which do not divide it or leave what the ranks cannot share alike.",
                stacklevel=6,
            )
        return count

    @contextlib.contextmanager
    def _stand_ins(
        self, arguments: Arguments, count: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Inside it the model is fit to be captured, with these arguments of one micro-batch."""
        examples, device = first_micro_batch(arguments, count), self._settings.device
        with stand_ins(self._original, examples, device, self._part.absent) as fakes:
            yield arguments.rebuild(fakes)

    def _bind(self, programs: Programs, micro_batches: int) -> BoundProgram | BoundPipeline:
        assert self._store is not None
        self._refuse_other_factors(programs.whole)
        bucket_bytes, executor = self._settings.bucket_bytes, self._settings.executor
        if programs.pipeline is None:
            return BoundProgram(
                programs.whole, self._store, self._original, seeds=self._seeds,
                bucket_bytes=bucket_bytes, executor=executor,
            )  # fmt: skip
        assert self._shared is not None, "there was a first program, with stages"
        return BoundPipeline(
            programs.whole, programs.stages, self._store, self._original, seeds=self._seeds,
            bucket_bytes=bucket_bytes, micro_batches=micro_batches, shared=self._shared,
            executor=executor,
        )  # fmt: skip

    def _refuse_other_factors(self, program: Program) -> None:
        """A parameter lies as the factors of its dims in the first program have it."""
        assert self._store is not None
        for spec in program.parameters:
            kept = self._store.kept.get(spec.name)
            inner = [s for s in (*spec.layout, *(kept.storage if kept else ())) if s.factor > 0]
            if kept is not None and inner and kept.spec.dims != spec.dims:
                raise PlanError(
                    f"Parameter {spec.name} lies split within dims of factors {kept.spec.dims}, and with "
                    f"these inputs the model uses it with {spec.dims}. Compile it again for these inputs."
                )

    def _state(self) -> tuple[object, ...]:
        """What of torch's modes is built into a program: the casts of autocast, and the default dtype.

        Modes of modules that the forward reads have guards.
        """
        device = self._settings.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return (casts, torch.get_default_dtype(), self._original.training)

    def _as_captured(self) -> AbstractContextManager[Any]:
        """Inside it autocast is off: its casts are in the graph, and so are regions without it."""
        return torch.autocast(self._settings.device.type, enabled=False)

    def _place(self, programs: Programs) -> None:
        """Puts parameters and buffers to rest."""
        model, world, settings = self._original, self._planner.world(), self._settings
        users, pipe = users_of(model, programs.stages), world.pipe
        held = frozenset(users)
        if programs.pipeline is not None and pipe is not None:
            held = held_by(pipe.rank, users, programs.pipeline)
        values = initial_values(model, world, init_fn=settings.init_fn, seed=settings.seed)
        self._store = ParameterStore(world)
        self._store.fill(programs.whole, model, values, held)
        place_buffers(model, world)
        self._seeds.manual_seed(world.agree(torch.initial_seed() % 2**62))
        plan = self._plan = programs.whole.plan
        self._fixed = Fixed(plan.parameters, plan.pipeline, plan.recompute, users)
        if pipe is not None:
            assert self._adoption is not None and programs.pipeline is not None
            self._part = take_part(model, programs.stages, users, world, self._adoption)
            self._shared = SharedParameters(users, programs.pipeline, self._store)

    def _forget_replaced(self) -> list[str]:
        """The names of parameters that are other objects since they were placed; all programs hold the old ones."""
        if self._store is None or self._fixed is None:
            return []
        replaced = self._store.replaced(self._original)
        if not replaced:
            return []
        if self._fixed.pipeline is not None:
            raise StepError(
                f"The parameter {replaced[0]} was replaced by another, which a model with pipeline stages does not "
                "follow. Copy the values into it (with torch.no_grad(): parameter.copy_(...)), or compile again."
            )
        for programs in self._ready.values():
            programs.clear()
        shapes = {name: p.shape for name, p in self._original.named_parameters()}
        self._fixed = replace(
            self._fixed,
            parameters={
                name: lies for name, lies in self._fixed.parameters.items()
                if shapes.get(name) == self._store.kept[name].spec.shape
            },
        )  # fmt: skip
        return replaced

    def _place_replaced(self, programs: Programs, names: Sequence[str]) -> None:
        """Puts parameters to rest that took the place of others."""
        assert self._store is not None and self._fixed is not None
        model, world = self._original, self._store.world
        if self._adoption is not None and self._settings.device_mesh is not None:
            adopt(model, self._settings.device_mesh, self._adoption)
        values = replaced_values(model, names, world)
        self._store.fill(programs.whole, model, values, frozenset(names))
        self._fixed = replace(
            self._fixed,
            parameters={
                **self._fixed.parameters,
                **{
                    n: programs.whole.plan.parameters[n]
                    for n in names
                    if n in programs.whole.plan.parameters
                },
            },
        )

    # --- what was chosen

    @property
    def plan(self) -> Plan:
        """The plan of the first program. Raises PlanError before there is one."""
        if self._plan is None:
            raise PlanError(
                "There is no plan yet: it is made at the first call. Pass example_inputs to "
                "autopar.compile to have it at once."
            )
        return self._plan

    def explain(self) -> object:
        """The plan and its reasons with the model's own names; prints as tables."""
        return self._planner.explain(self.plan)

    # --- the model behind

    @property
    def original(self) -> nn.Module:
        """The model that was compiled; its parameters are the compiled module's."""
        return self._original

    def train(self, mode: bool = True) -> CompiledModule:
        """Sets the mode of the model, as `nn.Module.train` does."""
        self.training = mode
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own state dict; parameters are DTensors.

        With pipeline stages, that of the stages on this rank: those of all ranks make up the model's, which
        is how torch.distributed.checkpoint takes them.
        """
        state = self._original.state_dict(*args, **kwargs)
        return self._part.only_own(state, kwargs.get("prefix", ""))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the model, as `nn.Module.load_state_dict` does; `assign` only before the first call."""
        if kwargs.get("assign") and self._store is not None:
            raise StepError(
                "load_state_dict(assign=True) would replace the parameters that the plan has placed; "
                "leave assign out, so that values are copied."
            )
        given, *rest = args or (kwargs.pop("state_dict"),)
        present = self._original.state_dict()
        own = self._part.completed(as_stored(given, present), present)
        return self._original.load_state_dict(own, *rest, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        if original is None or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)
