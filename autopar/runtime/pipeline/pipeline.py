"""A plan with pipeline stages on this rank: its stages, run in the order of the plan's schedule.

A stage is the `Runner` of its program. What passes through the schedule is the numbers of micro-batches: every stage
looks up its own part of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import PeerError, StepError
from autopar.ir import Pipeline, part_shape
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.weight_stashing import WeightVersions
from autopar.program.program import Program, TensorSpec, Wire
from autopar.program.stages import staying_outputs
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.execute.executor import Runner, sum_over
from autopar.runtime.execute.muted import share_of
from autopar.runtime.execute.results import StepResults, joined, spec_of_batch
from autopar.runtime.execute.shares import refuse_divided_by_none
from autopar.runtime.parameters.loss_scale import scaled
from autopar.runtime.parameters.parameters import ParameterStore
from autopar.runtime.parameters.shared import ChangedBuffers, SharedParameters
from autopar.runtime.parameters.weight_stashing import HeldOptimizer, StageVersions
from autopar.runtime.pipeline.split_backward import SplitBackward, WholeBackward
from autopar.runtime.pipeline.stage_actions import StageActions, StageRun, greet
from autopar.runtime.pipeline.stage_forward import Boundary, delivered_from, entered, first_token, received, sent
from autopar.runtime.ranks.world import Pipe

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
        self._count, self._store = micro_batches, store
        self._seeds, self._staying = seeds, staying_outputs(program)
        numbers = self._pipeline.stages_of(self._pipe.rank)
        self._stage_seeds = {number: torch.Generator() for number in numbers}
        self.runners = {
            number: Runner(
                stages[number],
                store,
                model,
                bucket_bytes=bucket_bytes,
                seeds=self._stage_seeds[number],
                executor=executor,
            )
            for number in numbers
        }
        self._changed = ChangedBuffers(stages, self._pipeline, self._pipe, model)
        self._shared, self._used = shared, {spec.name for spec in program.parameters}
        self._elsewhere = [p for n, p in model.named_parameters() if n in program.graded and _torch.is_elsewhere(p)]
        # What is written to such a gradient is not kept, so that one serves all steps.
        self._gradients_elsewhere = [p.detach() for p in self._elsewhere]
        self.optimizer, self.stage_versions = optimizer, dict[int, StageVersions]()
        self.versions: WeightVersions | None = None
        if self._pipeline.update_every:
            self.versions = WeightVersions(self._pipeline, micro_batches)
        self.shares: Sequence[float] = ()
        self.scale = 1.0
        self.pieces: dict[int, list[Tensor]] = {}  # results of micro-batches, on the last stage's rank
        self.losses: list[Tensor] = []  # terms of the loss, on the last stage's rank
        # The stages and their order, made for the first step.
        self._stages: Mapping[int, StageRun] = {}

    def _begin(self, batch: Sequence[list[Tensor]]) -> None:
        """Takes the batch, and seeds for the stages: with equal ones they would draw equal masks."""
        self._batch = batch
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        for number, seeds in self._stage_seeds.items():
            seeds.manual_seed((seed + number * _SEED_STEP) % 2**62)

    # --- a step

    def step(self, batch: Sequence[list[Tensor]], shares: Sequence[Sequence[float]], scale: float = 1.0) -> StepResults:
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
        if self.versions is not None:
            every = self._pipeline.update_every
            own = self.program.objective.shares_of_groups(own, every)
        self.shares, self.scale, self.pieces = own, scale, {}
        for runner in self.runners.values():
            runner.begin()
        with self._versions_of_step():
            losses = self._run_schedule()
        for runner in self.runners.values():
            runner.end()
        with self._naming_failures():
            self._changed.share()
        if self.versions is not None:
            losses = [x * (y / z) for x, y, z in zip(losses, shares[-1], own, strict=False)]
        loss, groups = self._loss(losses), (*self.world.covering, self._pipe.group)
        pieces = [self.pieces[i] for i in range(len(batch)) if self.pieces]
        refuse_divided_by_none(pieces, shares, groups, self.world.device)
        results, self.pieces = self._joined(len(batch), shares), {}
        return StepResults(loss, results)

    @contextlib.contextmanager
    def _versions_of_step(self) -> Iterator[None]:
        """Context in which every stage stores the parameter versions that its micro-batches need."""
        if self.versions is not None and torch.is_grad_enabled():
            seen, runners = self.versions.seen, self.runners.items()
            self.stage_versions = {number: run.versions(seen[number]) for number, run in runners}
        try:
            yield
        finally:
            for each in self.stage_versions.values():
                each.end()
            self.stage_versions = {}

    def _run_schedule(self) -> list[Tensor]:
        """Runs the schedule; returns every micro-batch's term of the loss, on the last stage's rank."""
        trains, self.losses = torch.is_grad_enabled(), []
        with self._naming_failures():
            if not self._stages:
                greet(self._pipeline, self._pipe, self.world.device)
                self._stages = {number: BoundStage(self, number) for number in self.runners}
            run = StageActions(self._stages, self._pipeline, self._pipe, self.world.device, trains=trains)
            own = actions(self._pipeline, self._count)[self._pipe.rank]
            with self._shared.summed(self._used) if trains else contextlib.nullcontext():
                run.run(own, exchanges=waits_for_sends(self._pipeline.schedule))
        if trains and self.versions is None:
            self._leave_gradients_of_others()
        self._batch = []
        return self.losses

    def _leave_gradients_of_others(self) -> None:
        """Gives the parameters of other stages gradients where these have some, so that a script finds them alike."""
        for parameter, gradient in zip(self._elsewhere, self._gradients_elsewhere, strict=True):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = gradient

    def _loss(self, shares: Sequence[Tensor]) -> Tensor:
        """The loss of the batch, computed on the ranks of the last stage and broadcast to all pipeline ranks."""
        last = self._pipeline.rank_of(self._pipeline.stages - 1)
        spec = self.program.outputs[-1]
        loss = torch.zeros(spec.shape, dtype=spec.dtype, device=self.world.device)
        if self._pipe.rank == last:
            runner, losses = self.runners[self._pipeline.stages - 1], dict[tuple[str, ...], list[Tensor]]()
            for number, own in enumerate(shares):
                losses.setdefault(runner.loss_axes(number), []).append(own)
            parts = [sum_over(torch.stack(own).sum(0), axes, self.world).wait()[0] for axes, own in losses.items()]
            loss = torch.stack(parts).sum(0)
        with self._naming_failures():
            dist.broadcast(loss, src=self._pipe.peer(last), group=self._pipe.group)
        return loss

    def _joined(self, count: int, shares: Sequence[Sequence[float]]) -> list[Tensor]:
        """The extra results on every rank of the pipeline, of what the last stage's ranks have."""
        if not self.program.extras:
            return []
        results: list[Tensor] = []
        if self._pipe.rank == self._pipeline.rank_of(self._pipeline.stages - 1):
            results = joined(self.program, [self.pieces[i] for i in range(count)], shares, self.world)
        specs = [spec_of_batch(self.program, number, count) for number in range(len(self.program.extras))]
        with self._naming_failures():
            return self._deliver(results, specs)

    def inputs(self, runner: Runner, number: int) -> list[Tensor]:
        """The inputs of a micro-batch that a stage takes."""
        whole, own = self.program.of(number), runner.program.of(number)
        fed = (*whole.inputs, *whole.shares)
        parts = dict(zip((spec.name for spec in fed), self._batch[number], strict=True))
        return [parts[spec.name] for spec in (*own.inputs, *own.shares)]

    # --- a forward

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The local outputs, on every rank of the pipeline, differentiable if autograd is on.

        One stage after the other, without micro-batches. Outputs that stay have values on the ranks of their own stage.
        Raises StepError with autograd on if stages of several ranks use one parameter, and inside of a checkpoint of
        torch: ranks would run the forward again at different times, or not at all.
        """
        if torch.is_grad_enabled():
            self._shared.refuse_backward(self._used)
        if _torch.is_checkpointed():
            raise StepError(
                "model(...) was called inside of torch.utils.checkpoint.checkpoint, which would run its pipeline "
                "stages again in backward, at another time on every rank. Call it without the checkpoint: the plan "
                "recomputes blocks where memory asks for it (docs/memory.md)."
            )
        results: list[Tensor] = []
        own: dict[int, Tensor] = {}
        with self._naming_failures():
            token, entering = entered(first_token(self._trained(), self.world.device), inputs, self._pipe)
            self._begin([entering])
            for number in range(self._pipeline.stages):
                token, results = self._pass(number, token, results, own)
            found = self._everywhere(token, own)
            self._changed.share()
            return found

    def _trained(self) -> list[Tensor]:
        """The trained parameters that stages use."""
        every = (spec.name for run in self.runners.values() for spec in run.program.parameters)
        parameters = [self._store.kept[name].parameter for name in dict.fromkeys(every)]
        return [x for x in (*parameters, *self._elsewhere) if x.requires_grad]

    def _pass(
        self, number: int, token: Tensor, results: list[Tensor], own: dict[int, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs a stage where it lies, adds its outputs to `own`, and hands the rest to the rank of the next stage."""
        runner = self.runners.get(number)
        if runner is None:
            return token, results
        program, here = runner.program, self._pipe.rank
        source = self._pipeline.rank_of(number - 1) if number else here
        if source != here:
            token, results = received(self._boundary(program.received, source), token)
        made = runner.forward([*self.inputs(runner, 0), *results])
        own.update(zip(program.places, made, strict=False))
        results = made[len(program.places) :]
        ends = number == self._pipeline.stages - 1
        target = here if ends else self._pipeline.rank_of(number + 1)
        if target != here:
            token = sent(self._boundary(program.sent, target), token, results)
        return token, results

    def _boundary(self, wires: Sequence[Wire], peer: int) -> Boundary:
        return Boundary(wires, peer, self.world, self._naming_failures)

    def _everywhere(self, token: Tensor, own: dict[int, Tensor]) -> list[Tensor]:
        """All outputs: those that stay as this rank has them, the others from the last stage."""
        last = self._pipeline.rank_of(self._pipeline.stages - 1)
        found = []
        for i, spec in enumerate(self.program.outputs):
            if i in self._staying:
                found.append(own[i] if i in own else self._absent(spec))
                continue
            x = own[i] if self._pipe.rank == last else self._empty(spec)
            found.append(delivered_from(last, token, x, self._pipe))
        return found

    def _absent(self, spec: TensorSpec) -> Tensor:
        """An output of another rank's stage: its shape, in the memory of one element."""
        shape = part_shape(spec.dims, spec.layout, self.world.mesh, self.world.rank)
        return torch.zeros((), dtype=spec.dtype, device=self.world.device).expand(shape)

    def _empty(self, spec: TensorSpec) -> Tensor:
        """Memory for this rank's part of an output."""
        shape = part_shape(spec.dims, spec.layout, self.world.mesh, self.world.rank)
        return torch.empty(shape, dtype=spec.dtype, device=self.world.device)

    def _deliver(self, results: list[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Gives the last stage's results, of these specs, to all ranks of the pipeline."""
        last = self._pipeline.rank_of(self._pipeline.stages - 1)
        if self._pipe.rank != last:
            results = [self._empty(spec) for spec in specs]
        results = [x.contiguous() for x in results]
        for x in results:
            dist.broadcast(x, src=self._pipe.peer(last), group=self._pipe.group)
        return results

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Raises PeerError for a lost neighbour."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerError) or not _torch.broke_in_communication(error):
                raise
            raise PeerError(
                str(error).strip().partition("\n")[0],
                collective="send or receive",
                group=self._pipe.group_name,
                op=f"stage {', '.join(map(str, self.runners))}",
            ) from error


class BoundStage:
    """A stage of this rank, as a run of actions wants it; see `StageRun` for the attributes."""

    def __init__(self, owner: BoundPipeline, number: int) -> None:
        self._owner, self._number, self._runner = owner, number, owner.runners[number]
        program = self._runner.program
        sizes = [program, program.smaller or program]
        # Of the first micro-batches, and of the last, which may be smaller.
        self._received = [self._examples(each.received) for each in sizes]
        self._sent = [self._examples(each.sent) for each in sizes]
        self.first_half: type[SplitBackward] | type[WholeBackward] = SplitBackward
        if self._runner.runs_backward_whole:
            self.first_half = WholeBackward

    def received(self, micro_batch: int) -> Sequence[Tensor]:
        """Examples of what a micro-batch receives."""
        return self._received[self._runner.is_smaller(micro_batch)]

    def sent(self, micro_batch: int) -> Sequence[Tensor]:
        """Examples of what a micro-batch sends."""
        return self._sent[self._runner.is_smaller(micro_batch)]

    def _examples(self, wires: Sequence[Wire]) -> tuple[Tensor, ...]:
        world = self._owner.world
        return tuple(
            torch.empty(
                wire.shape_on(world.rank, world.mesh), dtype=wire.dtype, device="meta", requires_grad=wire.needs_grad
            )
            for wire in wires
        )

    def forward(self, micro_batch: int, received: Sequence[Tensor]) -> list[Tensor]:
        self._use_version(micro_batch)
        owner, runner = self._owner, self._runner
        share = owner.shares[micro_batch]
        results = runner.run([*owner.inputs(runner, micro_batch), *received], micro_batch, mutes=not share)
        if not runner.program.is_step:
            return [_torch.handed_on(x) for x in results]
        owner.pieces[micro_batch] = [x.detach() for x in results]
        term = scaled(share_of(_torch.handed_on(results[-1]), share), owner.scale)
        owner.losses.append(term.detach())
        return [term]

    def begin_backward(self, micro_batch: int, *, last: bool) -> None:
        self._use_version(micro_batch)
        versions = self._owner.versions
        self._runner.begin_backward(last=last or (versions is not None and versions.is_update(micro_batch)))

    def end_backward(self, micro_batch: int) -> None:
        self._runner.end_backward()

    def update(self, micro_batch: int) -> None:
        self._owner.stage_versions[self._number].update(micro_batch, self._owner.optimizer)

    def _use_version(self, micro_batch: int) -> None:
        if self._number in self._owner.stage_versions:
            self._owner.stage_versions[self._number].use(micro_batch)
