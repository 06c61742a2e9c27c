"""The compiled module: a user's model that runs as programs on this rank.

It has the model's submodules, parameters and buffers under their own names, so that optimizers,
checkpoints, `train()` and `eval()` find everything where it was.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import PeerError, PlanError, StepError
from autopar.ir import ParameterPlan, Pipeline, Plan
from autopar.ir.plan import Recompute
from autopar.program import Program
from autopar.runtime.adoption import Adoption, adopt
from autopar.runtime.clipping import clip_grad_norm_
from autopar.runtime.executor import BoundProgram, unflatten_outputs
from autopar.runtime.hooks import backward_hooks, warn_of_hooks
from autopar.runtime.initialise import InitFunction, initial_values, place_buffers
from autopar.runtime.inputs import (
    Arguments,
    accepts,
    as_whole,
    cut_inputs,
    first_micro_batch,
)
from autopar.runtime.outputs import as_dtensor
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.part import Part, Users, as_stored, held_by, take_part, users_of
from autopar.runtime.pipeline import BoundPipeline
from autopar.runtime.shared import SharedParameters
from autopar.runtime.stand_ins import stand_ins
from autopar.runtime.world import World

Outputs = Literal["local", "dtensor"]


@dataclass(frozen=True)
class Programs:
    """What was planned: the program of the whole model, and those of its stages."""

    whole: Program
    stages: Sequence[Program]

    @property
    def pipeline(self) -> Pipeline | None:
        return self.whole.plan.pipeline


class Planner(Protocol):
    """Makes programs and knows the mesh they run on (implemented by autopar.api)."""

    def micro_batches(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int:
        """How many micro-batches are best for a step of this whole batch."""
        ...

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
        ...

    def world(self) -> World:
        """The mesh as it runs; known once the first program is."""
        ...

    def explain(self, plan: Plan) -> object:
        """The plan of the first program for people."""
        ...


@dataclass(frozen=True)
class Settings:
    """How a compiled module behaves.

    Attributes:
        micro_batches: into how many parts `step` cuts its batch; None leaves it to the planner.
        device: where it runs.
        device_mesh: any mesh over all ranks, for parameters to become DTensors before there is a plan;
            None for a single rank without process groups.
        init_fn: initialises one meta-device module in place of its `reset_parameters`.
        seed: of the initial values of a meta-device model.
        outputs: what `model(...)` returns: local tensors, or DTensors.
        bucket_bytes: about how much one collective carries.
    """

    micro_batches: int | None
    device: torch.device
    device_mesh: DeviceMesh | None
    init_fn: InitFunction | None
    seed: int
    outputs: Outputs
    bucket_bytes: int


@dataclass(frozen=True)
class Fixed:
    """Where parameters lie since the first program.

    Attributes:
        parameters: how each lies on the mesh of its stage.
        pipeline, recompute: of the first program.
        users: parameter name -> the stages that use it.
    """

    parameters: Mapping[str, ParameterPlan]
    pipeline: Pipeline | None
    recompute: Recompute
    users: Users


@dataclass
class _Ready:
    """A program with what the model was like when it was captured, see `CompiledModule._state`."""

    bound: BoundProgram | BoundPipeline
    state: tuple[bool, ...]


def _release(ready: dict[bool, list[_Ready]]) -> None:
    """Lets go of bound programs before the interpreter ends, and of what they hold of process groups:
    groups that outlive Python abort the process when their threads are torn down.
    """
    for programs in ready.values():
        programs.clear()
    gc.collect()


class CompiledModule(nn.Module):
    """What `autopar.compile` returns.

    `step(*batch)` runs forward and backward of a global batch and leaves gradients; `model(*inputs)` runs
    the forward alone. Everything else is as in the model that was compiled: parameters, buffers,
    `state_dict` and attributes have their original names.
    """

    def __init__(self, model: nn.Module, planner: Planner, settings: Settings) -> None:
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
        self._part = Part()
        self._shared: SharedParameters | None = None
        self._ready: dict[bool, list[_Ready]] = {True: [], False: []}  # of steps, of forwards
        self._seeds = torch.Generator()  # of random ops; the same on every rank
        self._steps = 0
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
                shape of that part.
            kwargs: keyword arguments of the model.

        Returns:
            The loss of the whole batch, the mean over micro-batches; the same on every rank.

        Raises StepError for a batch of another shape, PeerError if another rank died or hangs.
        """
        arguments = Arguments.of(batch, kwargs)
        bound = self._program(arguments, is_step=True)
        parts = cut_inputs(bound.program, arguments, self._count(is_step=True), bound.world)
        self._steps += 1
        try:
            return bound.step(parts)
        except PeerError as error:
            raise bound.world.explain(error, f"Step {self._steps}") from error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, in the layout of the plan: local tensors, or DTensors if asked for.

        Inputs are as in `step`. A shape seen for the first time is taken as the global one.
        """
        arguments = Arguments.of(args, kwargs)
        bound = self._program(arguments, is_step=False)
        if isinstance(bound, BoundPipeline) and torch.is_grad_enabled():
            raise StepError(
                "model(...) was called with autograd on, and its graph ends where a pipeline stage sends "
                "to the next. Call it under torch.no_grad(), or train with model.step(*batch)."
            )
        inputs = cut_inputs(bound.program, arguments, 1, bound.world)[0]
        try:
            outputs = bound.forward(inputs)
        except PeerError as error:
            raise bound.world.explain(error, "The forward") from error
        if self._settings.outputs == "dtensor":
            specs = bound.program.outputs
            outputs = [as_dtensor(x, s, bound.world) for x, s in zip(outputs, specs, strict=True)]
        return unflatten_outputs(bound.program, outputs)

    def prepare(self, *batch: Any, **kwargs: Any) -> None:
        """Captures and plans for a batch of this global shape, which `step` then also takes."""
        self._add(Arguments.of(batch, kwargs), is_step=True)

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

    def _program(self, arguments: Arguments, *, is_step: bool) -> BoundProgram | BoundPipeline:
        fitting = [r for r in self._ready[is_step] if arguments.fits(r.bound.program)]
        count = self._count(is_step=is_step)
        accepting = [
            r for r in fitting if accepts(r.bound.program, arguments, count, r.bound.world)
        ]
        state = self._state()
        for each in accepting:
            if each.state == state:
                return each.bound
        for each in fitting:
            if each.state == state and is_step:
                return each.bound  # which says what is wrong with the shape
        if accepting:  # the shape is known, and may be that of this rank's part
            arguments = as_whole(arguments, accepting[0].bound.program, count)
        return self._add(arguments, is_step=is_step)

    def _add(self, arguments: Arguments, *, is_step: bool) -> BoundProgram | BoundPipeline:
        model = self._original
        if is_step and self._micro_batches is None:
            with self._stand_ins(arguments, 1) as (args, kwargs):
                self._micro_batches = self._planner.micro_batches(model, args, kwargs)
        count = self._count(is_step=is_step)
        with self._stand_ins(arguments, count) as (args, kwargs):
            programs = self._planner.program(
                model, args, kwargs, micro_batches=count, is_step=is_step, fixed=self._fixed
            )
        if self._store is None:
            warn_of_hooks(list(dict.fromkeys([*self._hooked, *backward_hooks(model)])))
            self._place(programs)
        bound = self._bind(programs)
        self._ready[is_step].append(_Ready(bound, self._state()))
        return bound

    def _count(self, *, is_step: bool) -> int:
        """Micro-batches of a program; no step has been planned before they are known."""
        return (self._micro_batches or 1) if is_step else 1

    @contextlib.contextmanager
    def _stand_ins(
        self, arguments: Arguments, count: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Inside it the model is fit to be captured, with these arguments of one micro-batch."""
        examples, device = first_micro_batch(arguments, count), self._settings.device
        with stand_ins(self._original, examples, device, self._part.absent) as fakes:
            yield arguments.rebuild(fakes)

    def _bind(self, programs: Programs) -> BoundProgram | BoundPipeline:
        assert self._store is not None
        bucket_bytes = self._settings.bucket_bytes
        if programs.pipeline is None:
            return BoundProgram(
                programs.whole, self._store, self._original, seeds=self._seeds,
                bucket_bytes=bucket_bytes,
            )  # fmt: skip
        assert self._shared is not None, "there was a first program, with stages"
        return BoundPipeline(
            programs.whole, programs.stages, self._store, self._original, seeds=self._seeds,
            bucket_bytes=bucket_bytes, micro_batches=self._count(is_step=programs.whole.is_step),
            shared=self._shared,
        )  # fmt: skip

    def _state(self) -> tuple[bool, ...]:
        """What is built into a program: every submodule's mode, and which parameters take gradients."""
        modes = [module.training for module in self._original.modules()]
        return (*modes, *(p.requires_grad for p in self._original.parameters()))

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
        """What was chosen and why, in the model's own words; prints as tables."""
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
