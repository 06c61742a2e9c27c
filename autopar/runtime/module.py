"""The compiled module: the user's model, which runs on all ranks by a plan.

It has the model's submodules, parameters and buffers under their original names, so that optimizers,
checkpoints, `train()` and `eval()` work as they did before.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.capture.results import loss_first
from autopar.capture.rows import rows_of_replica
from autopar.capture.structure import Structure
from autopar.errors import AutoparError, CaptureError, NoLossError, PeerError, PlanError, StepError
from autopar.ir import Pipeline, Plan
from autopar.ir.order import Order
from autopar.runtime.batch_shapes import BatchShapes, micro_batches_near
from autopar.runtime.clipping import clip_grad_norm_, gradient_norm
from autopar.runtime.clock import StepClock
from autopar.runtime.comparison import Comparison
from autopar.runtime.deferred import LossAlone, with_deferred_gradients
from autopar.runtime.executor import BoundProgram, unflatten_outputs
from autopar.runtime.failing_op import naming_plan
from autopar.runtime.finite import FiniteLoss, about_loss
from autopar.runtime.generation import generate
from autopar.runtime.hooks import backward_hooks, refuse_hooks
from autopar.runtime.inputs import (
    Arguments,
    cut_inputs,
    first_micro_batch,
    parts_given,
    shape_words,
    shapes_of,
)
from autopar.runtime.kept_programs import KeptPrograms, ReadyProgram, release
from autopar.runtime.loss_scale import LossScaler
from autopar.runtime.maker import ProgramMaker, ProgramRequest, Programs
from autopar.runtime.meetings import Meetings
from autopar.runtime.modes import lasting, modes, without_autocast
from autopar.runtime.outputs import as_dtensor
from autopar.runtime.part import as_stored
from autopar.runtime.parts import shapes_of_whole, whole_or_own
from autopar.runtime.pipeline import BoundPipeline
from autopar.runtime.placement import Placement
from autopar.runtime.recaptures import Recaptures
from autopar.runtime.results import delivered
from autopar.runtime.seeds import Seeds, draw_alike
from autopar.runtime.served import meetings_between
from autopar.runtime.settings import Settings
from autopar.runtime.shares import step_shares
from autopar.runtime.skipping import Skipping
from autopar.runtime.stand_ins import stand_ins
from autopar.runtime.together import warn_together
from autopar.runtime.versions import HeldOptimizer, refuse_gradients
from autopar.runtime.weights import PathLike, read_weights, write_weights
from autopar.runtime.world import World

log = logging.getLogger("autopar")


class CompiledModule(nn.Module):
    """A model that runs on all ranks; `autopar.compile` returns it.

    `step(*batch)` runs forward and backward of a global batch and leaves gradients in `.grad`. `model(*inputs)` runs
    only the forward. Parameters, buffers, the keys of `state_dict` and attributes have the names that they have in the
    original model.
    """

    def __init__(self, model: nn.Module, planner: ProgramMaker, settings: Settings) -> None:
        super().__init__()
        self._hooked = backward_hooks(model)  # DTensors replace parameters without their hooks
        self._placement = Placement(model, settings)
        self._planner, self._settings = planner, settings
        self._plan: Plan | None = None
        self._micro_batches = settings.micro_batches
        self._returns_loss = settings.returns_loss  # until a capture shows otherwise
        self._kept = KeptPrograms()
        replicas = settings.replicas
        self._comparison = Comparison(
            settings.timeout_seconds, replicas.ranks if replicas else None
        )
        self._shapes = BatchShapes(settings.batch, self._comparison, settings.batch_ranks)
        self._meetings: Meetings | None = None  # between replicas, once there is a plan
        self._recaptures = Recaptures(self._comparison)
        self._seeds = Seeds()
        self._steps = 0
        self._clock = StepClock()
        self._finite = FiniteLoss()
        self._skipping = Skipping(model, settings.skip_nonfinite)
        self._scaler = LossScaler(settings.loss_scaling)
        self._optimizer = HeldOptimizer()
        self._unread = ""  # why parameters have no values
        # Both modules share these dicts, so that names need no prefix and a change to one changes the other.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, table, getattr(model, table))
        object.__setattr__(self, "_original", model)
        self.training = model.training
        weakref.finalize(self, release, self._kept)

    # --- running

    def step(self, *batch: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of one global batch and leaves the gradients in `.grad`.

        Under `torch.no_grad()` it computes only the loss and does not change gradients. Schedules that update
        parameters inside a step (docs/versions.md) call the attached optimizer, and leave no gradients.

        Args:
            batch: the model's inputs, and after them the arguments of the loss function that follow the model's
                result. In the first step every rank gives the whole batch, of which it computes its part; with
                batch="local" it gives only its own rows. Later each tensor may be given whole or as this
                part. For a new shape the model is captured and planned once more, and parameters keep their
                layouts (docs/shapes.md).
            kwargs: keyword arguments of the model.

        Returns:
            The loss of the whole batch, of shape `()`, the same on every rank. If the loss function or the model
            returns `(loss, extras)`, where `extras` is any tree of tensors, `step` returns such a tuple. Extra
            results belong to the whole batch and are whole on every rank; with outputs="dtensor" they are DTensors in
            the layout of the plan (docs/training.md). A loss that averages over unmasked tokens averages over
            those of the whole batch. A loss that is not a mean, a sum or a ratio of sums over rows is averaged
            over micro-batches, with a warning. Replicas that meet every K steps (docs/local_steps.md) each
            return the results of their own rows.

        Raises StepError if the ranks give different shapes or values, or one gives none, and for an extra result
        that cannot be put together from several micro-batches; PeerError if another rank died or hangs.
        """
        arguments = self._rows_of_step(Arguments.of(batch, kwargs))
        ready = self._program(arguments, is_step=True)
        if torch.is_grad_enabled():
            self._check_updates(ready.bound.program.plan.pipeline)
        if self._meetings is not None:
            self._meetings.hold_if_due()
        self._skipping.begin(ready.bound.program)
        results = self._step(ready, arguments)
        if self._meetings is not None and torch.is_grad_enabled():
            self._meetings.count_step(list(ready.bound.program.mutated.values()))
        self._skipping.end(results[-1], lambda: self._gradient_norm(torch.inf))
        return loss_first(unflatten_outputs(ready.bound.program, results))

    def _check_updates(self, pipeline: Pipeline | None) -> None:
        """Raises StepError if a step that updates parameters has no optimizer, or an option that it cannot take."""
        self._optimizer.check(pipeline)
        if self._settings.skip_nonfinite:
            refuse_gradients(pipeline, "skip_nonfinite=True")
        if self._settings.loss_scaling is not None:
            refuse_gradients(pipeline, "A loss scale")

    def _step(self, ready: ReadyProgram, arguments: Arguments) -> list[Tensor]:
        """Runs a step; returns its results, with the loss as the last."""
        bound = ready.bound
        arguments = self._as_cut(ready, arguments)
        parts = cut_inputs(bound.program, arguments, ready.count, bound.world)
        self._steps += 1
        if self._clock.tick() and bound.world.rank == 0 and log.isEnabledFor(logging.INFO):
            predicted = self._planner.predicted(self.plan)
            log.info("%s", self._clock.against(predicted, self._settings.device))
        try:
            with (
                without_autocast(self._settings.device),
                naming_plan(lambda: self._planner.predicted(self.plan)),
            ):
                self._seeds.draw(bound.program, bound.world)
                shares = step_shares(bound.program, parts, self._original, bound.world)
                found = self._scaler.step(
                    partial(bound.step, parts, shares), self._trained,
                    lambda: self._gradient_norm(torch.inf),
                )  # fmt: skip
                results = delivered(
                    bound.program, found, bound.world, micro_batches=ready.count,
                    as_dtensors=self._settings.outputs == "dtensor",
                    input_parts=parts_given(bound.program, arguments, ready.count),
                )  # fmt: skip
        except PeerError as error:
            waiting = self._comparison.waiting()
            raise bound.world.explain(error, f"Step {self._steps}", waiting) from error
        ready.finish()
        self._warn_of_loss(bound, found.loss, arguments)
        return results

    def _warn_of_loss(
        self, bound: BoundProgram | BoundPipeline, loss: Tensor, arguments: Arguments
    ) -> None:
        """Warns once of a loss that is not finite; ranks with different losses each check their own."""
        step = self._finite.found(loss, self._steps)
        if step is None:
            return
        names = [spec.name for spec in bound.program.inputs]
        inputs = zip(names, arguments.tensors, strict=True) if step == self._steps else None
        message = about_loss(step, inputs, self._original.named_parameters())
        if self._settings.batch == "local" or self._settings.replicas is not None:
            warnings.warn(message, stacklevel=4)
        else:
            warn_together(message, stacklevel=4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result in the layout of the plan: local tensors, or DTensors with outputs="dtensor".

        Inputs are as in `step`. With autograd on, the result is differentiable: if the model returns its loss,
        `model(x, y).backward()` leaves the gradients that `step(x, y)` leaves. With pipeline stages or several
        micro-batches the call then runs backward at once, as `step` does, and returns only the loss (and extra
        results).

        Raises StepError with autograd on where there are pipeline stages and the model does not return its loss.
        """
        arguments = Arguments.of(args, kwargs)
        if self._settings.replicas is not None and torch.is_grad_enabled():
            raise StepError(
                "model(...) was called with autograd on, and replicas that meet every so many steps count the calls of "
                "step. Call it under torch.no_grad(), or train with model.step(*batch)."
            )
        if self._trains_in_parts():
            try:
                return self._differentiable_step(arguments)
            except NoLossError:
                self._returns_loss = False
        return self._forward(arguments, as_dtensors=self._settings.outputs == "dtensor")

    def _forward(self, arguments: Arguments, *, as_dtensors: bool) -> Any:
        """The results of a forward, in the layouts of the plan."""
        ready = self._program(arguments, is_step=False)
        bound = ready.bound
        if isinstance(bound, BoundPipeline) and torch.is_grad_enabled():
            if self._returns_loss:
                return self._differentiable_step(arguments)
            raise StepError(
                "model(...) was called with autograd on, and its graph ends where a pipeline stage sends "
                "to the next. Call it under torch.no_grad(), or train with model.step(*batch); a model that "
                "returns its loss, compiled without loss_fn, may be called."
            )
        arguments = self._as_cut(ready, arguments)
        inputs = cut_inputs(bound.program, arguments, ready.count, bound.world)[0]
        self._scaler.warn_of_forward()
        try:
            with without_autocast(self._settings.device):
                self._seeds.draw(bound.program, bound.world)
                outputs = bound.forward(inputs)
        except PeerError as error:
            waiting = self._comparison.waiting()
            raise bound.world.explain(error, "The forward", waiting) from error
        ready.finish()
        if as_dtensors:
            specs = bound.program.outputs
            outputs = [as_dtensor(x, s, bound.world) for x, s in zip(outputs, specs, strict=True)]
        return unflatten_outputs(bound.program, outputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own `generate`, as models of transformers have it; its forwards run by the plan of training.

        Every rank calls it with the same whole prompts and gets the tokens that a single device gives. If tokens are
        sampled, all ranks use the first rank's state of torch's random generator. Keys and values are cached in the
        layouts of the plan (docs/checkpoints.md).

        Raises PlanError before there is a plan; StepError with batch="local", for a model that is not a causal
        language model, and for arguments that it does not support; PeerError if another rank died or hangs.
        """
        keeps = self.plan.pipeline is None
        if self._settings.batch == "local":
            raise StepError(
                'generate was called with batch="local", and all ranks have to generate from the same prompts. Compile '
                'with batch="global", or export the weights (model.export).'
            )
        draw_alike(self._settings.device)

        def run(given: Mapping[str, Any]) -> Any:
            return self._forward(Arguments.of((), given), as_dtensors=True)

        return generate(self._original, run, args, kwargs, keeps=keeps)

    def _trains_in_parts(self) -> bool:
        """Whether `model(...)` runs a whole step: with autograd, a returned loss, and stages or micro-batches."""
        in_parts = self.has_stages or (self._micro_batches or 1) > 1
        return in_parts and self._returns_loss and torch.is_grad_enabled()

    def _differentiable_step(self, arguments: Arguments) -> Any:
        """The results of a step whose gradients get into `.grad` when the caller runs backward of the loss."""
        ready = self._program(arguments, is_step=True)
        refuse_gradients(ready.bound.program.plan.pipeline, "model(...) with autograd on")
        results = with_deferred_gradients(lambda: self._step(ready, arguments), self._trained())
        if ready.bound.program.has_more:
            return LossAlone(results[-1])
        return loss_first(unflatten_outputs(ready.bound.program, results))

    def _trained(self) -> list[nn.Parameter]:
        """The trained parameters that this rank holds."""
        return [p for p in self._original.parameters() if p.requires_grad]

    def _as_cut(self, ready: ReadyProgram, arguments: Arguments) -> Arguments:
        """The arguments as the program cuts them; with batch="local" parts are gathered if it cuts in another way."""
        if self._settings.batch != "local":
            return arguments
        return whole_or_own(ready.bound.program, arguments, ready.count, ready.bound.world)

    def prepare(self, *batch: Any, **kwargs: Any) -> None:
        """Captures and plans in advance for a batch of this shape, which is given as to `step`; every rank calls it.

        Values do not matter, and tensors may be on the meta device. A shape that is known takes no time.
        """
        arguments = Arguments.of(batch, kwargs)
        self._shapes.compare(arguments, "")
        if self._settings.batch == "local":
            arguments = arguments.of_shapes(shapes_of_whole(arguments, self._settings.batch_ranks))
        arguments = self._rows_of_step(arguments)
        if self._kept.fit_for(arguments, self._state(), is_step=True) is None:
            self._add(arguments, is_step=True)

    def _rows_of_step(self, arguments: Arguments) -> Arguments:
        """The arguments with the rows that this rank's replica trains on; all rows where there are no replicas."""
        replicas = self._settings.replicas
        if replicas is None or self._settings.batch == "local":
            return arguments
        count = replicas.meeting.replicas
        own = rows_of_replica(arguments.tensors, replicas.number, count)
        return replace(arguments, tensors=tuple(own))

    def meet(self) -> Order | None:
        """Holds a meeting of the replicas now, before it is due: they exchange parameters, which are then equal.

        Every rank calls this (docs/local_steps.md). Without replicas it does nothing, nor where no step was run since
        the last meeting. Raises PeerError if another rank died or hangs.

        Returns:
            With an asynchronous server the order of its exchanges since the last meeting, for `autopar.replay`; else
            None.
        """
        return None if self._meetings is None else self._meetings.hold()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer that `step` calls under schedules that update inside a step (docs/versions.md).

        With `schedule="pipedream"` and the like, `step` updates parameters after every micro-batch or every few, and
        leaves no gradients. Every rank calls this once, before the first step, with an optimizer of its own parameters.
        A call of `optimizer.step()` in the training loop finds no gradients and changes nothing.
        """
        self._optimizer.hold(optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.

        It gives what torch.nn.utils.clip_grad_norm_ gives on a single device. Every rank calls this.

        Returns:
            The norm before clipping, of shape `()`, the same on every rank.

        Raises StepError for a `norm_type` that is not supported and where steps update parameters themselves, PeerError
        if another rank died or hangs.
        """
        if self._plan is not None:
            refuse_gradients(self._plan.pipeline, "clip_grad_norm_")
        world = self._planner.world()
        return clip_grad_norm_(
            self._original.named_parameters(), world, max_norm, norm_type, **self._counted(world)
        )

    def _gradient_norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients, the same on every rank."""
        world = self._planner.world()
        try:
            return gradient_norm(
                self._original.named_parameters(), world, norm_type, **self._counted(world)
            )
        except PeerError as error:
            raise world.explain(error, f"Looking at the gradients of step {self._steps}") from error

    def _counted(self, world: World) -> dict[str, Any]:
        """Arguments of a norm over all stages: the group of the stages, and the gradients that another rank counts."""
        stages = None if world.pipe is None else world.pipe.group
        return {"stages": stages, "counted_elsewhere": self._placement.part.counted_elsewhere}

    # --- programs

    def _program(self, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """The program for arguments of these shapes; captured and planned now if there is none."""
        if self._unread:
            raise StepError(f"{self._unread}. Call model.load_weights, or compile the model again.")
        known = self._kept.fitting(arguments, is_step=is_step)
        shapes, state = self._shapes.whole(arguments, known, is_step=is_step), self._state()
        alike = [r for r in reversed(known) if r.state == state and r.shapes == shapes]
        for each in alike:
            if each.holds():
                self._recaptures.take(each.numbers, is_step=is_step)
                # Every rank runs the same number of steps; a single rank may run a forward by itself.
                if is_step:
                    self._kept.used(each)
                return each
        try:
            if alike:
                return self._add_again(alike[0], arguments.of_shapes(shapes), is_step=is_step)
            return self._add(arguments.of_shapes(shapes), is_step=is_step)
        except Exception as error:
            # The model itself may have raised it, because the shapes were guessed wrongly.
            is_other = isinstance(error, AutoparError) and not isinstance(error, CaptureError)
            if shapes == arguments.shapes or is_other:
                raise
            raise CaptureError(
                f"{error}\n  shapes: {shape_words(arguments.shapes)} were taken for this rank's parts of "
                f"{shape_words(shapes)}, as the ranks gave different values. Give all of them whole or all "
                'as parts; what model(...) returns is whole with outputs="dtensor", and may be given back.'
            ) from error

    def _add(self, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """Captures, plans and binds a program for arguments of global shapes."""
        start = time.perf_counter()
        model = self._original
        refuse_hooks(self._hooked or backward_hooks(model))
        replaced = self._placement.forget_replaced()
        if replaced and self._meetings is not None:
            raise StepError(
                f"The parameter {replaced[0]} was replaced by another, which replicas that meet every so many steps do "
                "not follow. Copy the values into it (with torch.no_grad(): parameter.copy_(...)), or compile again."
            )
        if replaced:
            self._kept.clear()
        with lasting(), _torch.code_when_called():  # of a graph that several passes change
            captures = self._kept.captures(arguments, self._state(), is_step=is_step)
            runs = captures.count
            asked = ProgramRequest(
                is_step=is_step,
                micro_batches=self._count(arguments) if is_step else 1,
                fixed=self._placement.fixed,
                shapes=lambda count: shapes_of(first_micro_batch(arguments, count)),
                captures=captures,
                numbers=self._recaptures.numbers,
            )
            programs = self._planner.program(model, partial(self._stand_ins, arguments), asked)
            self._recaptures.settle(programs.guards)
            count = 1
            if is_step:
                count = programs.whole.plan.micro_batches
                self._micro_batches = self._micro_batches or count
            if self._placement.store is None:
                self._place(programs)
            elif replaced:
                self._placement.place_replaced(programs, replaced)
            ready = ReadyProgram(
                self._bind(programs, count), self._state(), count,
                programs.guards, Structure(model), captures, programs.writes, programs.numbers,
            )  # fmt: skip
        self._shapes.learn(arguments, ready.bound.program, ready.bound.world)
        seconds, was_captured = time.perf_counter() - start, captures.count > runs
        self._kept.add(ready, arguments, seconds, was_captured=was_captured)
        return ready

    def _add_again(
        self, earlier: ReadyProgram, arguments: Arguments, *, is_step: bool
    ) -> ReadyProgram:
        """Captures the model again after a Python value that it reads has changed; warns which one, and how often."""
        difference = earlier.broken()
        assert difference is not None, "its guards do not hold"
        if isinstance(earlier.bound, BoundPipeline) and not earlier.structure.has_flags():
            raise StepError(
                f"{difference}: parameters were frozen or unfrozen after the first step, which only the ranks of their "
                "own pipeline stage can see. Compile the model again, or plan it without stages."
            )
        self._recaptures.learn(earlier.guards)
        # A rank on which the value did not change does not get here: the others find that out within the timeout.
        why = f"{difference}, for which the model is captured again."
        self._recaptures.compare(self._recaptures.numbers, why)
        start = time.perf_counter()
        ready = self._add(arguments, is_step=is_step)
        self._recaptures.count(difference, time.perf_counter() - start)
        return ready

    def _count(self, arguments: Arguments) -> int | None:
        """Number of micro-batches of a step: that of the first if it divides the batch; None if the search decides."""
        first, fixed = self._kept.first_step, self._placement.fixed
        if first is None:
            return self._micro_batches
        assert fixed is not None, "there was a first program"
        assert self._micro_batches is not None, "the first step had some number"
        return micro_batches_near(
            self._micro_batches, arguments.shapes, first, fixed.pipeline, self._planner.world()
        )

    @contextlib.contextmanager
    def _stand_ins(
        self, arguments: Arguments, count: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Context in which the model can be captured, and arguments of one micro-batch to capture it with."""
        examples, device = first_micro_batch(arguments, count), self._settings.device
        with stand_ins(self._original, examples, device, self._placement.part.absent) as fakes:
            yield arguments.rebuild(fakes)

    def _bind(self, programs: Programs, micro_batches: int) -> BoundProgram | BoundPipeline:
        store, shared = self._placement.store, self._placement.shared
        assert store is not None
        self._placement.refuse_other_factors(programs.whole)
        bucket_bytes, executor = self._settings.bucket_bytes, self._settings.executor
        if programs.pipeline is None:
            return BoundProgram(
                programs.whole, store, self._original, seeds=self._seeds.generator,
                bucket_bytes=bucket_bytes, executor=executor,
            )  # fmt: skip
        assert shared is not None, "there was a first program, with stages"
        return BoundPipeline(
            programs.whole, programs.stages, store, self._original, seeds=self._seeds.generator,
            bucket_bytes=bucket_bytes, micro_batches=micro_batches, shared=shared,
            executor=executor, optimizer=self._optimizer,
        )  # fmt: skip

    def _state(self) -> tuple[object, ...]:
        """Modes that a program depends on. The `training` flags of submodules have guards."""
        return (*modes(self._settings.device), self._original.training)

    def _place(self, programs: Programs) -> None:
        """Puts the parameters into the layouts between steps that the first plan gives them, and reads weights."""
        self._placement.place(programs, self._planner.world())
        self._plan = programs.whole.plan
        store, replicas = self._placement.store, self._settings.replicas
        if replicas is not None and store is not None:
            self._meetings = meetings_between(
                replicas, store, self._original, statistics=list(programs.whole.mutated.values()),
                settings=self._settings,
            )  # fmt: skip
        if self._settings.weights is not None:
            self._unread = f"The weights at {self._settings.weights.path} were not read to the end"
            self.load_weights(self._settings.weights.path)

    # --- weights in files

    def load_weights(self, path: PathLike) -> None:
        """Copies weights from a folder or file of safetensors, such as `save_pretrained` of transformers writes.

        Every rank calls this and reads only its own shards. The files use the names of `state_dict()`; values are
        cast to the model's dtypes.

        Raises PlanError before there is a plan; AutoparError on every rank for files that are missing,
        damaged or of another model, which names the differences; PeerError if another rank died or hangs.
        """
        _ = self.plan
        read_weights(self, path)
        self._unread = ""
        if self._meetings is not None:
            self._meetings.begin_again()

    def export(self, folder: PathLike) -> None:
        """Writes whole weights, as a single device has them, to a folder that all ranks see.

        Every rank calls this. The folder gets safetensors files of about 5 GB with an index. If the model has a
        `config` of transformers, the folder gets it too, and `from_pretrained` can read the folder. A tied parameter
        is written once. No rank holds the whole model; the first one holds one tensor at a time.

        Raises PlanError before there is a plan; AutoparError on every rank for what cannot be written;
        PeerError if another rank died or hangs.
        """
        _ = self.plan
        if self._meetings is not None:
            self._meetings.require("Exporting weights")
        write_weights(self, folder, original=self._original)

    # --- the plan

    @property
    def plan(self) -> Plan:
        """The plan of the first program. Raises PlanError before there is one."""
        if self._plan is None:
            raise PlanError(
                "There is no plan yet: it is made at the first call. Pass example_inputs to "
                "autopar.compile to have it at once."
            )
        return self._plan

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps: those that overflowed under a loss scale and, with `skip_nonfinite=True`, those
        whose loss or gradients were not finite.
        """
        return self._skipping.count + self._scaler.skipped

    @property
    def loss_scale(self) -> float:
        """The factor by which the next step scales the loss for backward; 1.0 without loss scaling."""
        return self._scaler.scale

    @property
    def has_stages(self) -> bool:
        """Whether the plan has pipeline stages; before there is a plan, whether the requested mesh has."""
        fixed = self._placement.fixed
        return self._settings.has_stages if fixed is None else fixed.pipeline is not None

    def explain(self) -> object:
        """The plan and the reasons for it, with the names of the model's modules; it prints as tables."""
        return self._planner.explain(self.plan)

    # --- the original model

    @property
    def original(self) -> nn.Module:
        """The model that was compiled; the compiled module has the same parameters."""
        return self._original

    def train(self, mode: bool = True) -> CompiledModule:
        """Sets the mode of the model, as `nn.Module.train` does."""
        self.training = mode
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the model; with process groups its parameters are DTensors.

        With pipeline stages it has the parameters of the stages on this rank; torch.distributed.checkpoint joins the
        state dicts of all ranks. Raises StepError where replicas have run steps since their last meeting, because their
        parameters then differ.
        """
        if self._meetings is not None:
            self._meetings.refuse_differences("A state dict")
        state = self._original.state_dict(*args, **kwargs)
        return self._placement.part.only_own(state, kwargs.get("prefix", ""))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict as `nn.Module.load_state_dict` does. Raises StepError for `assign=True` after planning."""
        if kwargs.get("assign") and self._placement.store is not None:
            raise StepError(
                "load_state_dict(assign=True) would replace the parameters that the plan has placed; "
                "leave assign out, so that values are copied."
            )
        given, *rest = args or (kwargs.pop("state_dict"),)
        present = self._original.state_dict()
        own = self._placement.part.completed(as_stored(given, present), present)
        found = self._original.load_state_dict(own, *rest, **kwargs)
        if self._meetings is not None:
            self._meetings.begin_again()
        return found

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
