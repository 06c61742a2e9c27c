"""A plan with pipeline stages on this rank: its stages, run by a schedule of torch.distributed.pipelining.

torch's schedule decides what runs when, and sends and receives; a stage is a `PipelineStage` around the
`Runner` of its program. What torch cuts into micro-batches are their numbers alone: every stage looks up
its own part of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import PeerError
from autopar.ir import Pipeline, local_shape
from autopar.pipeline.schedules import schedule_class
from autopar.pipeline.versions import WeightVersions
from autopar.program.program import Program, TensorSpec, Wire
from autopar.program.staying import staying_outputs
from autopar.runtime.compiled import Executor
from autopar.runtime.executor import Runner, sum_over
from autopar.runtime.loss_scale import scaled
from autopar.runtime.muted import share_of
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.results import StepResults, joined, spec_of_batch
from autopar.runtime.shared import SharedParameters
from autopar.runtime.shares import refuse_divided_by_none
from autopar.runtime.split_backward import SplitBackward, WholeBackward
from autopar.runtime.versions import HeldOptimizer, StageVersions
from autopar.runtime.world import Pipe

_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples of it lie far apart


class BoundPipeline:
    """A program of a whole model that runs on this rank, through stages.

    Args:
        program: program of the whole model.
        stages: the programs it was cut into.
        store, model, bucket_bytes, executor: see `Runner`.
        shared: the parameters that several ranks of the pipeline hold.
        optimizer: what updates parameters inside of a step, under a schedule that does.
        seeds: generator of seeds, in the same state on every rank.
        micro_batches: number of micro-batches in a step.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[Program],
        store: ParameterStore,
        model: nn.Module,
        *,
        seeds: torch.Generator,
        bucket_bytes: int,
        executor: Executor,
        micro_batches: int,
        shared: SharedParameters,
        optimizer: HeldOptimizer,
    ) -> None:
        assert program.plan.pipeline is not None and store.world.pipe is not None
        self.program, self.world = program, store.world
        self._pipe: Pipe = store.world.pipe
        self._pipeline: Pipeline = program.plan.pipeline
        self._count = micro_batches
        self._positions = {spec.name: i for i, spec in enumerate(program.inputs)}
        self._seeds, self._staying = seeds, staying_outputs(program)
        numbers = self._pipeline.stages_of(self._pipe.rank)
        self._stage_seeds = {number: torch.Generator() for number in numbers}
        self._runners = {
            number: Runner(
                stages[number], store, model, bucket_bytes=bucket_bytes,
                seeds=self._stage_seeds[number], executor=executor,
            )
            for number in numbers
        }  # fmt: skip
        self._shared, self._used = shared, {spec.name for spec in program.parameters}
        self._optimizer, self._stage_versions = optimizer, dict[int, StageVersions]()
        self._versions: WeightVersions | None = None
        if self._pipeline.update_every:
            self._versions = WeightVersions(self._pipeline, micro_batches)
        self._shares: Sequence[float] = ()
        self._scale = 1.0
        self._pieces: dict[
            int, list[Tensor]
        ] = {}  # results of micro-batches, on the last stage's rank
        self._schedules: dict[bool, Any] = {}  # with a backward, and without: their buffers differ

    def _begin(self, batch: Sequence[list[Tensor]]) -> None:
        """Takes the batch, and seeds for the stages: with equal ones they would draw equal masks."""
        self._batch = batch
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        for number, seeds in self._stage_seeds.items():
            seeds.manual_seed((seed + number * _SEED_STEP) % 2**62)

    # --- a step

    def step(
        self,
        batch: Sequence[list[Tensor]],
        shares: Sequence[Sequence[float]],
        scale: float = 1.0,
    ) -> StepResults:
        """Runs forward and backward of all micro-batches. Gradients are left as `backward()` leaves them.

        Returns the loss and the extra results of the whole batch. With autograd off there is no backward. Raises
        StepError on all ranks if elements count in a micro-batch of weight 0.

        Args:
            batch: this rank's inputs, for every micro-batch.
            shares: weight of each micro-batch in each result, the loss last. Where it is 0, neither loss nor gradients
                come from the micro-batch.
            scale: number that backward begins with; gradients are left multiplied by it.
        """
        self._begin(batch)
        own: Sequence[float] = shares[-1]
        if self._versions is not None:
            every = self._pipeline.update_every
            own = self.program.objective.shares_of_groups(own, every)
        self._shares, self._scale, self._pieces = own, scale, {}
        for runner in self._runners.values():
            runner.begin()
        with self._versions_of_step():
            losses = self._run_schedule(batch)
        for runner in self._runners.values():
            runner.end()
        if self._versions is not None:
            losses = [x * (y / z) for x, y, z in zip(losses, shares[-1], own, strict=False)]
        loss, groups = self._loss(losses), (*self.world.covering, self._pipe.group)
        pieces = [self._pieces[i] for i in range(len(batch)) if self._pieces]
        refuse_divided_by_none(pieces, shares, groups, self.world.device)
        results, self._pieces = self._joined(len(batch), shares), {}
        return StepResults(loss, results)

    @contextlib.contextmanager
    def _versions_of_step(self) -> Iterator[None]:
        """Context in which every stage stores the parameter versions that its micro-batches need."""
        if self._versions is not None and torch.is_grad_enabled():
            seen, runners = self._versions.seen, self._runners.items()
            self._stage_versions = {number: run.versions(seen[number]) for number, run in runners}
        try:
            yield
        finally:
            for each in self._stage_versions.values():
                each.end()
            self._stage_versions = {}

    def _run_schedule(self, batch: Sequence[list[Tensor]]) -> list[Tensor]:
        trains = torch.is_grad_enabled()
        if trains not in self._schedules:
            self._schedules[trains] = self._make_schedule()
        schedule = self._schedules[trains]
        numbers, losses = torch.arange(len(batch)), list[Tensor]()
        with self._naming_failures():
            if trains:
                with self._shared.summed(self._used):
                    schedule.step(
                        number=numbers, target=numbers, losses=losses, return_outputs=False
                    )
            else:
                schedule.eval(number=numbers, target=numbers, losses=losses, return_outputs=False)
        self._batch = []
        return [loss.detach() for loss in losses]

    def _make_schedule(self) -> Any:
        stages = [
            _torch.pipeline_stage(
                _StageModule(self, runner, number), number, self._pipeline.stages,
                device=self.world.device, group=self._pipe.group,
                received=self._examples(runner.program.received),
                sent=self._examples(runner.program.sent) or _loss_example(runner.program),
                split_backward=WholeBackward if runner.runs_backward_whole else SplitBackward,
                before_backward=partial(self._begin_backward, number),
                after_backward=partial(self._end_backward, number),
            )
            for number, runner in self._runners.items()
        ]  # fmt: skip
        made = schedule_class(self._pipeline.schedule)
        return made(
            stages[0] if self._pipeline.chunks == 1 and _torch.runs_one_stage(made) else stages,
            self._count, loss_fn=self._share_of_loss, scale_grads=False,
        )  # fmt: skip

    def _examples(self, wires: Sequence[Wire]) -> tuple[Tensor, ...]:
        shapes = map(self._shape, wires)
        return tuple(
            torch.empty(shape, dtype=wire.dtype, device="meta").requires_grad_(wire.needs_grad)
            for shape, wire in zip(shapes, wires, strict=True)
        )

    # --- what happens at a stage around the forward and the backward of a micro-batch

    def run(self, stage: int, micro_batch: int, received: Sequence[Tensor]) -> list[Tensor]:
        """The forward."""
        self._use_version(stage, micro_batch)
        runner, mutes = self._runners[stage], not self._shares[micro_batch]
        return runner.run([*self.inputs(runner, micro_batch), *received], mutes=mutes)

    def _begin_backward(self, stage: int, micro_batch: int, *, last: bool) -> None:
        self._use_version(stage, micro_batch)
        last = last or (self._versions is not None and self._versions.is_update(micro_batch))
        self._runners[stage].begin_backward(last=last)

    def _end_backward(self, stage: int, micro_batch: int) -> None:
        self._runners[stage].end_backward()
        if self._versions is not None and self._versions.is_update(micro_batch):
            self._stage_versions[stage].update(micro_batch, self._optimizer)

    def _use_version(self, stage: int, micro_batch: int) -> None:
        if stage in self._stage_versions:
            self._stage_versions[stage].use(micro_batch)

    def _share_of_loss(self, loss: Tensor, number: Tensor) -> Tensor:
        """The term that a micro-batch contributes to the loss of the batch."""
        return scaled(share_of(loss, self._shares[int(number)]), self._scale)

    def _loss(self, shares: Sequence[Tensor]) -> Tensor:
        """The loss of the batch, computed on the ranks of the last stage and broadcast to all pipeline ranks."""
        last = self._pipeline.rank_of(self._pipeline.stages - 1)
        spec = self.program.outputs[-1]
        loss = torch.zeros(spec.shape, dtype=spec.dtype, device=self.world.device)
        if self._pipe.rank == last:
            loss = torch.stack(list(shares)).sum(0)
            axes = self._runners[self._pipeline.stages - 1].loss_axes
            (loss,) = sum_over(loss, axes, self.world).wait()
        with self._naming_failures():
            dist.broadcast(loss, src=self._pipe.peer(last), group=self._pipe.group)
        return loss

    def _joined(self, count: int, shares: Sequence[Sequence[float]]) -> list[Tensor]:
        """The extra results on every rank of the pipeline, of what the last stage's ranks have."""
        if not self.program.extras:
            return []
        results: list[Tensor] = []
        if self._pipe.rank == self._pipeline.rank_of(self._pipeline.stages - 1):
            results = joined(self.program, [self._pieces[i] for i in range(count)], shares)
        specs = [
            spec_of_batch(spec, extra.rows, count)
            for spec, extra in zip(self.program.outputs, self.program.extras, strict=False)
        ]
        with self._naming_failures():
            return self._deliver(results, specs)

    def inputs(self, runner: Runner, number: int) -> list[Tensor]:
        """The inputs of a micro-batch that a stage takes."""
        parts = self._batch[number]
        return [parts[self._positions[spec.name]] for spec in runner.program.inputs]

    def keep(self, number: int, results: Sequence[Tensor]) -> None:
        """Keeps the results of a micro-batch, the loss last, to the end of the step."""
        self._pieces[number] = [x.detach() for x in results]

    # --- a forward

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The local outputs, on every rank of the pipeline; autograd must be off.

        One stage after the other, without micro-batches. Outputs that stay have values on the ranks of their own stage.
        """
        assert not torch.is_grad_enabled(), "autograd ends where a stage sends"
        self._begin([inputs])
        sent: list[Tensor] = []
        own: dict[int, Tensor] = {}
        with self._naming_failures():
            for number in range(self._pipeline.stages):
                sent = self._pass(number, sent, own)
            return self._everywhere(own)

    def _pass(self, number: int, results: list[Tensor], own: dict[int, Tensor]) -> list[Tensor]:
        """Runs a stage where it lies, adds its outputs to `own`, and hands the rest to the rank of the next stage."""
        runner = self._runners.get(number)
        if runner is None:
            return results
        source = self._pipeline.rank_of(number - 1) if number else self._pipe.rank
        if source != self._pipe.rank:
            results = [self._receive(wire, source) for wire in runner.program.received]
        made = runner.forward([*self.inputs(runner, 0), *results])
        places = runner.program.places
        own.update(zip(places, made, strict=False))
        results = made[len(places) :]
        ends = number == self._pipeline.stages - 1
        target = self._pipe.rank if ends else self._pipeline.rank_of(number + 1)
        if target != self._pipe.rank:
            for x in results:
                dist.send(x.contiguous(), self._pipe.peer(target), group=self._pipe.group)
        return results

    def _everywhere(self, own: dict[int, Tensor]) -> list[Tensor]:
        """All outputs: those that stay as this rank has them, the others from the last stage."""
        specs = self.program.outputs
        shared = [i for i in range(len(specs)) if i not in self._staying]
        last = self._pipe.rank == self._pipeline.rank_of(self._pipeline.stages - 1)
        found = self._deliver([own[i] for i in shared] if last else [], [specs[i] for i in shared])
        every = {**own, **dict(zip(shared, found, strict=True))}
        return [every[i] if i in every else self._absent(spec) for i, spec in enumerate(specs)]

    def _absent(self, spec: TensorSpec) -> Tensor:
        """An output of another rank's stage: its shape, in the memory of one element."""
        shape = local_shape(spec.dims, spec.layout, self.world.mesh)
        return torch.zeros((), dtype=spec.dtype, device=self.world.device).expand(shape)

    def _shape(self, wire: Wire) -> tuple[int, ...]:
        return wire.shape_on(self.world.rank, self.world.mesh)

    def _receive(self, wire: Wire, source: int) -> Tensor:
        x = torch.empty(self._shape(wire), dtype=wire.dtype, device=self.world.device)
        dist.recv(x, self._pipe.peer(source), group=self._pipe.group)
        return x

    def _deliver(self, results: list[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Gives the last stage's results, of these specs, to all ranks of the pipeline."""
        last = self._pipeline.rank_of(self._pipeline.stages - 1)
        if self._pipe.rank != last:
            shapes = [local_shape(spec.dims, spec.layout, self.world.mesh) for spec in specs]
            results = [
                torch.empty(shape, dtype=spec.dtype, device=self.world.device)
                for shape, spec in zip(shapes, specs, strict=True)
            ]
        results = [x.contiguous() for x in results]
        for x in results:
            dist.broadcast(x, src=self._pipe.peer(last), group=self._pipe.group)
        return results

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Raises what a stage raised, without torch's wrapping, and PeerError for a lost neighbour."""
        try:
            yield
        except RuntimeError as error:
            cause = _root(error)
            if isinstance(cause, PeerError) or not _torch.broke_in_communication(cause):
                raise cause from None
            raise PeerError(
                str(cause).strip().partition("\n")[0], collective="send or receive",
                group=self._pipe.group_name, op=f"stage {', '.join(map(str, self._runners))}",
            ) from error  # fmt: skip


class _StageModule(nn.Module):
    """A stage as torch.distributed.pipelining wants it: a module that is called with a micro-batch's number."""

    def __init__(self, owner: BoundPipeline, runner: Runner, stage: int) -> None:
        super().__init__()
        self._owner, self._runner, self._stage = owner, runner, stage

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The leaves in which gradients accumulate."""
        return (x for x in self._runner.leaves if x.requires_grad)  # type: ignore[misc]

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        results = self._owner.run(self._stage, int(number), received)
        if self._runner.program.is_step:
            self._owner.keep(int(number), results)
            return _torch.handed_on(results[-1])
        return tuple(_torch.handed_on(x) for x in results)


def _loss_example(program: Program) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(s.shape, dtype=s.dtype, device="meta", requires_grad=True)
        for s in program.outputs[-1:]
    )


def _root(error: BaseException) -> BaseException:
    """The error that torch has wrapped in others."""
    while error.__cause__ is not None and not isinstance(error, PeerError):
        error = error.__cause__
    return error
