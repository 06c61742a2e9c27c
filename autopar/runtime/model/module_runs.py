"""Runs of a compiled module's programs: a step with its loss scale, messages and norms of gradients, or a forward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.capture.results import loss_first
from autopar.errors import PeerError
from autopar.ops.trail import begin_step
from autopar.runtime.execute.executor import BoundProgram, unflatten_outputs
from autopar.runtime.execute.inputs import Arguments, cut_inputs, parts_given
from autopar.runtime.execute.local_batches import whole_or_own
from autopar.runtime.execute.outputs import as_asked, words_of_split
from autopar.runtime.execute.results import delivered
from autopar.runtime.execute.settings import Outputs, Settings
from autopar.runtime.execute.shares import refuse_lost_terms, step_shares
from autopar.runtime.failures.failing_op import naming_plan
from autopar.runtime.failures.finite import FiniteLoss, about_loss
from autopar.runtime.model.deferred import LossAlone, with_deferred_gradients
from autopar.runtime.model.drift import DriftCheck
from autopar.runtime.model.module_programs import ModulePrograms
from autopar.runtime.model.program_builder import ProgramBuilder
from autopar.runtime.model.program_cache import ReadyProgram
from autopar.runtime.parameters.clipping import clip_grad_norm_, gradient_norm
from autopar.runtime.parameters.loss_scale import LossScaler
from autopar.runtime.parameters.weight_stashing import refuse_gradients
from autopar.runtime.pipeline.pipeline import BoundPipeline
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.clock import StepClock
from autopar.runtime.ranks.world import World

log = logging.getLogger("autopar")


class ModuleRuns:
    """Runs programs of a compiled module on this rank, and counts its steps.

    Args:
        model: the user's model.
        planner: maker of the programs, which also predicts their seconds.
        programs: the programs of the module, with the seeds and the placement of parameters.
        settings: options of the compiled module.

    Attributes:
        steps: number of steps so far.
        scaler: scale of the loss for backward.
        finite: check of the losses of steps.
        drift: check of what ranks hold alike.
    """

    def __init__(self, model: nn.Module, planner: ProgramBuilder, programs: ModulePrograms, settings: Settings) -> None:
        self._model, self._planner = model, planner
        self._programs, self._settings = programs, settings
        self._clock = StepClock()
        self.steps = 0
        self.scaler = LossScaler(settings.loss_scaling)
        self.finite = FiniteLoss()
        self.drift = DriftCheck(model, programs.placement, programs.comparison, settings.drift)
        self._has_said_split = False

    def step(self, ready: ReadyProgram, arguments: Arguments) -> list[Tensor]:
        """Runs a step of a program; returns its results, with the loss as the last.

        With autograd off it evaluates a batch, and is not counted as a step.
        """
        bound = ready.bound
        arguments = self._as_cut(ready, arguments)
        parts = cut_inputs(bound.program, arguments, ready.count, bound.world)
        trains = torch.is_grad_enabled()
        if trains:
            self._count(bound.world)
        try:
            with _torch.without_autocast(self._settings.device), naming_plan(lambda: self._predicted()):
                self._programs.seeds.draw(bound.program, bound.world)
                shares = step_shares(bound.program, parts, self._model, bound.world)
                batch = [[*part, *own] for part, own in zip(parts, shares.terms, strict=True)]
                found = self.scaler.step(
                    partial(bound.step, batch, shares.results), self.trained, lambda: self.gradient_norm(torch.inf)
                )
                refuse_lost_terms(found.loss, shares)
                # Rows of several micro-batches alone come in another order than ranks gave them.
                is_cut = ready.count > 1
                results = delivered(
                    bound.program,
                    found,
                    bound.world,
                    micro_batches=ready.count,
                    as_dtensors=self._settings.outputs == "dtensor",
                    input_parts=parts_given(bound.program, arguments, ready.shapes) if is_cut else 1,
                )
        except PeerError as error:
            waiting = self._programs.comparison.waiting()
            doing = f"Step {self.steps}" if trains else "The evaluation"
            raise bound.world.explain(error, doing, waiting) from error
        ready.finish()
        if trains:
            self.drift.count(f"step {self.steps}")
            self._warn_of_loss(bound, found.loss, arguments)
        return results

    def _count(self, world: World) -> None:
        """Counts a step, and says once how long steps take against what was predicted."""
        self.steps += 1
        begin_step(self.steps)
        if self._clock.tick() and world.rank == 0 and log.isEnabledFor(logging.INFO):
            log.info("%s", self._clock.against(self._predicted(), self._settings.device))

    def _warn_of_loss(self, bound: BoundProgram | BoundPipeline, loss: Tensor, arguments: Arguments) -> None:
        """Warns once of a loss that is not finite; ranks with different losses each check their own."""
        step = self.finite.found(loss, self.steps)
        if step is None:
            return
        names = [spec.name for spec in bound.program.inputs]
        inputs = zip(names, arguments.tensors, strict=True) if step == self.steps else None
        message = about_loss(step, inputs, self._own())
        if self._settings.batch == "local" or self._settings.replicas is not None:
            warnings.warn(message, stacklevel=4)
        else:
            warn_together(message, stacklevel=4)

    def _predicted(self) -> Any:
        """The planner's prediction for a step of the first plan."""
        assert self._programs.plan is not None, "a program runs"
        return self._planner.predicted(self._programs.plan)

    def forward(self, ready: ReadyProgram, arguments: Arguments, outputs: Outputs) -> Any:
        """The results of a program's forward, as `outputs` asks."""
        bound = ready.bound
        if outputs == "local":
            arguments = arguments.with_gradients_of_own_loss(ready.shapes)
        arguments = self._as_cut(ready, arguments)
        inputs = cut_inputs(bound.program, arguments, ready.count, bound.world)[0]
        self.scaler.warn_of_forward()
        if torch.is_grad_enabled() and bound.program.communicates:
            self.drift.count("a forward with autograd")  # before autograd keeps parameters, which may be mended
        try:
            with _torch.without_autocast(self._settings.device):
                self._programs.seeds.draw(bound.program, bound.world)
                results = bound.forward(inputs)
        except PeerError as error:
            waiting = self._programs.comparison.waiting()
            raise bound.world.explain(error, "The forward", waiting) from error
        ready.finish()
        specs = bound.program.outputs
        if outputs == "local":
            self._warn_of_split(results, bound)
        written = self._written_since(bound)
        results = [as_asked(x, spec, bound.world, outputs, written) for x, spec in zip(results, specs, strict=True)]
        return unflatten_outputs(bound.program, results)

    def _written_since(self, bound: BoundProgram | BoundPipeline) -> Callable[[], str]:
        """A function that names a parameter of a program that was written since now, "" where there is none."""
        if not torch.is_grad_enabled() or bound.world.ranks == 1:
            return lambda: ""
        used = {spec.name for spec in bound.program.parameters}
        before = [(name, p, p._version) for name, p in self._own() if name in used and not p.is_inference()]
        return lambda: next((name for name, p, version in before if p._version != version), "")

    def _warn_of_split(self, results: Sequence[Tensor], bound: BoundProgram | BoundPipeline) -> None:
        """Warns once that ranks have parts of the results: a script that evaluates them may expect them whole."""
        words = words_of_split(results, bound.program.outputs, bound.world, self._settings.batch)
        if words is not None and not self._has_said_split:
            self._has_said_split = True
            warn_together(words, stacklevel=4)

    def differentiable_step(self, ready: ReadyProgram, arguments: Arguments) -> Any:
        """The results of a step whose gradients get into `.grad` when the caller runs backward of the loss."""
        refuse_gradients(ready.bound.program.plan.pipeline, "model(...) with autograd on")
        results = with_deferred_gradients(lambda: self.step(ready, arguments), self.trained())
        return self._with_loss(ready, results)

    def evaluation(self, ready: ReadyProgram, arguments: Arguments) -> Any:
        """The results of a step's forward in its micro-batches, with autograd off."""
        return self._with_loss(ready, self.step(ready, arguments))

    def _with_loss(self, ready: ReadyProgram, results: list[Tensor]) -> Any:
        """The results of a step as the model returns them; its loss alone if a step leaves others out."""
        if ready.bound.program.has_more:
            return LossAlone(results[-1])
        return loss_first(unflatten_outputs(ready.bound.program, results))

    def trained(self) -> list[nn.Parameter]:
        """The trained parameters, with those of other stages."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def _own(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by name."""
        return [(name, p) for name, p in self._model.named_parameters() if not _torch.is_elsewhere(p)]

    def _as_cut(self, ready: ReadyProgram, arguments: Arguments) -> Arguments:
        """The arguments as the program cuts them; with batch="local" parts are gathered if it cuts in another way."""
        if self._settings.batch != "local":
            return arguments
        return whole_or_own(ready.bound.program, arguments, ready.count, ready.bound.world)

    def gradient_norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients, the same on every rank."""
        world = self._planner.world()
        try:
            return gradient_norm(self._own(), world, norm_type, **self._counted(world))
        except PeerError as error:
            raise world.explain(error, f"Looking at the gradients of step {self.steps}") from error

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Scales all gradients; returns their norm before that, see `CompiledModule.clip_grad_norm_`."""
        world = self._planner.world()
        return clip_grad_norm_(self._own(), world, max_norm, norm_type, **self._counted(world))

    def _counted(self, world: World) -> dict[str, Any]:
        """Arguments of a norm over all stages: the group of the stages, and the gradients that another rank counts."""
        stages = None if world.pipe is None else world.pipe.group
        return {"stages": stages, "counted_elsewhere": self._programs.placement.counted_elsewhere}
