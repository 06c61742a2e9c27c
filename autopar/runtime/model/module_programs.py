"""The programs of a compiled module: found for the arguments of a call, or captured, planned and bound."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar import _torch
from autopar.capture.guards.refusals import backward_hooks, refuse_hooks
from autopar.capture.guards.structure import Structure
from autopar.capture.rows import rows_of_replica
from autopar.cost_model.buckets import usual_bucket_bytes
from autopar.errors import AutoparError, CaptureError, StepError
from autopar.ir import Plan
from autopar.program.captures import Captures
from autopar.runtime.execute.executor import BoundProgram
from autopar.runtime.execute.inputs import Arguments, micro_batch, rows_of_micro_batches, shape_words, shapes_of
from autopar.runtime.execute.local_batches import shapes_of_whole
from autopar.runtime.execute.settings import Settings
from autopar.runtime.model.batch_shapes import BatchShapes, micro_batches_near
from autopar.runtime.model.placement import Placement
from autopar.runtime.model.program_builder import ProgramBuilder, ProgramRequest, Programs
from autopar.runtime.model.program_cache import ProgramCache, ReadyProgram
from autopar.runtime.model.recaptures import Recaptures
from autopar.runtime.parameters.weight_stashing import HeldOptimizer
from autopar.runtime.pipeline.pipeline import BoundPipeline
from autopar.runtime.ranks.comparison import Comparison
from autopar.runtime.ranks.seeds import Seeds
from autopar.runtime.replicas.meetings import Meetings
from autopar.runtime.replicas.served import meetings_between


class ModulePrograms:
    """Finds the program for the arguments of a call; captures, plans and binds one where there is none.

    Args:
        model: the user's model, whose parameters are replaced in place.
        planner: maker of programs.
        settings: options of the compiled module.

    Attributes:
        placement: the location of parameters on this rank.
        kept: the programs that can run now.
        comparison: what ranks compare before they wait for each other.
        seeds: seeds of the random ops of each run.
        optimizer: the optimizer of schedules that update parameters inside a step.
        plan: the plan of the first program; None before there is one.
        micro_batches: number of micro-batches of the first step; None if the search is to decide it.
        meetings: meetings between replicas; None before there is a plan, and without replicas.
    """

    def __init__(self, model: nn.Module, planner: ProgramBuilder, settings: Settings) -> None:
        self._hooked = backward_hooks(model)  # DTensors replace parameters without their hooks
        self._model, self._planner, self._settings = model, planner, settings
        self.placement = Placement(model, settings)
        self.kept = ProgramCache()
        replicas = settings.replicas
        self.comparison = Comparison(settings.timeout_seconds, replicas.ranks if replicas else None)
        self._shapes = BatchShapes(
            settings.batch, self.comparison, settings.batch_ranks, gathers=settings.outputs == "whole"
        )
        self.seeds = Seeds()
        self.optimizer = HeldOptimizer()
        self.plan: Plan | None = None
        self.micro_batches = settings.micro_batches
        self.meetings: Meetings | None = None
        self._recaptures = Recaptures(self.comparison)

    def find(self, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """The program for arguments of these shapes; captured and planned now if there is none."""
        known = self.kept.fitting(arguments, is_step=is_step)
        shapes, state = self._shapes.whole(arguments, known, is_step=is_step), self._state()
        alike = [r for r in reversed(known) if r.state == state and r.shapes == shapes]
        for each in alike:
            if each.holds():
                self._recaptures.take(each.numbers, is_step=is_step)
                # Every rank runs the same number of steps; a single rank may run a forward by itself.
                if is_step:
                    self.kept.used(each)
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
                'as parts. (Results of model(...) with outputs="dtensor" count as whole, and may be passed in.)'
            ) from error

    def _add(self, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """Captures, plans and binds a program for arguments of global shapes."""
        start = time.perf_counter()
        model = self._model
        refuse_hooks(self._hooked or backward_hooks(model))
        replaced = self._forget_replaced()
        with _lasting(), _torch.code_when_called():  # of a graph that several passes change
            captures = self.kept.captures(arguments, self._state(), is_step=is_step)
            runs = captures.count
            asked = self._request(arguments, captures, is_step=is_step)
            programs = self._planner.program(model, partial(self._stand_ins, arguments), asked)
            self._recaptures.settle(programs.guards)
            count = 1
            if is_step:
                count = programs.whole.plan.micro_batches
                self.micro_batches = self.micro_batches or count
            if self.placement.store is None:
                self._place(programs)
            elif replaced:
                self.placement.place_replaced(programs, replaced)
            ready = ReadyProgram(
                self._bind(programs, count),
                self._state(),
                count,
                programs.guards,
                Structure(model),
                captures,
                programs.writes,
                programs.numbers,
            )
        self._shapes.learn(arguments, ready.bound.program, ready.bound.world)
        seconds, was_captured = time.perf_counter() - start, captures.count > runs
        self.kept.add(ready, arguments, seconds, was_captured=was_captured)
        return ready

    def _forget_replaced(self) -> list[str]:
        """Names of the parameters that the user has replaced; drops all programs, which hold the old ones."""
        replaced = self.placement.forget_replaced()
        if replaced and self.meetings is not None:
            raise StepError(
                f"The parameter {replaced[0]} was replaced by another, which the synchronisation of replicas does "
                "not follow. Copy the values into it (with torch.no_grad(): parameter.copy_(...)), or compile again."
            )
        if replaced:
            self.kept.clear()
        return replaced

    def _request(self, arguments: Arguments, captures: Captures, *, is_step: bool) -> ProgramRequest:
        return ProgramRequest(
            is_step=is_step,
            micro_batches=self._count(arguments) if is_step else 1,
            fixed=self.placement.fixed,
            rows=lambda count: rows_of_micro_batches(arguments, count),
            shapes=lambda count, number: shapes_of(micro_batch(arguments, count, number)),
            captures=captures,
            numbers=self._recaptures.numbers,
            differentiable=frozenset() if is_step else arguments.differentiable,
        )

    def prepare(self, arguments: Arguments, *, is_step: bool) -> None:
        """Makes a program for arguments of these shapes if there is none; values do not matter."""
        self._shapes.compare(arguments, "")
        if self._settings.batch == "local":
            arguments = arguments.of_shapes(shapes_of_whole(arguments, self._settings.batch_ranks))
        if is_step:
            arguments = self.rows_of_step(arguments)
        if self.kept.fit_for(arguments, self._state(), is_step=is_step) is None:
            self._add(arguments, is_step=is_step)

    def rows_of_step(self, arguments: Arguments) -> Arguments:
        """The arguments with the rows that this rank's replica trains on; all rows where there are no replicas."""
        replicas = self._settings.replicas
        if replicas is None or self._settings.batch == "local":
            return arguments
        count = replicas.meeting.replicas
        own = rows_of_replica(arguments.tensors, replicas.number, count)
        return replace(arguments, tensors=tuple(own))

    def _add_again(self, earlier: ReadyProgram, arguments: Arguments, *, is_step: bool) -> ReadyProgram:
        """Captures the model again after a Python value that it reads has changed; warns which one, and how often."""
        difference = earlier.broken()
        assert difference is not None, "its guards do not hold"
        self._recaptures.learn(earlier.guards)
        # A rank on which the value did not change does not get here: the others find that out within the timeout.
        why = f"{difference}, for which the model is captured again."
        self._recaptures.compare(self._recaptures.numbers, why)
        start = time.perf_counter()
        ready = self._add(arguments, is_step=is_step)
        self._recaptures.count(difference, time.perf_counter() - start)
        return ready

    def _count(self, arguments: Arguments) -> int | None:
        """Number of micro-batches of a step: that of the first if each has a row; None if the search decides."""
        fixed = self.placement.fixed
        if not self.kept.has_stepped:
            return self.micro_batches
        assert fixed is not None, "there was a first program"
        assert self.micro_batches is not None, "the first step had some number"
        return micro_batches_near(self.micro_batches, arguments.shapes, fixed.pipeline)

    @contextlib.contextmanager
    def _stand_ins(
        self, arguments: Arguments, count: int, number: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Context in which the model can be captured, and arguments of one micro-batch to capture it with."""
        examples, device = micro_batch(arguments, count, number), self._settings.device
        with _torch.stand_ins(self._model, examples, device) as fakes:
            yield arguments.rebuild(fakes)

    def _bind(self, programs: Programs, micro_batches: int) -> BoundProgram | BoundPipeline:
        store, shared = self.placement.store, self.placement.shared
        assert store is not None
        self.placement.refuse_other_factors(programs.whole)
        executor = self._settings.executor
        plan = programs.whole.plan
        bucket_bytes = plan.bucket_bytes or int(usual_bucket_bytes(store.whole_bytes, plan.mesh.sizes))
        if programs.pipeline is None:
            return BoundProgram(
                programs.whole,
                store,
                self._model,
                seeds=self.seeds.generator,
                bucket_bytes=bucket_bytes,
                executor=executor,
            )
        assert shared is not None, "there was a first program, with stages"
        return BoundPipeline(
            programs.whole,
            programs.stages,
            store,
            self._model,
            seeds=self.seeds.generator,
            bucket_bytes=bucket_bytes,
            micro_batches=micro_batches,
            shared=shared,
            executor=executor,
            optimizer=self.optimizer,
        )

    def _place(self, programs: Programs) -> None:
        """Puts the parameters into the layouts between steps that the first plan gives them."""
        self.placement.place(programs, self._planner.world())
        self.plan = programs.whole.plan
        store, replicas = self.placement.store, self._settings.replicas
        if replicas is not None and store is not None:
            self.meetings = meetings_between(
                replicas, store, self._model, statistics=list(programs.whole.mutated.values()), settings=self._settings
            )

    def _state(self) -> tuple[object, ...]:
        """Modes that a program depends on. The `training` flags of submodules have guards."""
        return _torch.autocast_dtype(self._settings.device), torch.get_default_dtype(), self._model.training


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """Context without inference mode, because tensors made in inference mode could not be trained later."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield
