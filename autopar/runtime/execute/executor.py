"""Programs bound to this rank's devices and process groups, and the run of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar._torch import pytree
from autopar.ops.nodes import copied
from autopar.program.program import Program
from autopar.runtime.collectives.hops import Hop, signature
from autopar.runtime.collectives.transfer import Transfer
from autopar.runtime.execute.compiled import Executor
from autopar.runtime.execute.lowering import Binding, lower
from autopar.runtime.execute.muted import muted
from autopar.runtime.execute.results import StepResults, joined
from autopar.runtime.execute.saved import SlicedSaves, converter
from autopar.runtime.execute.shares import refuse_divided_by_none
from autopar.runtime.failures.failing_op import naming_line, naming_op
from autopar.runtime.parameters.gather import Gathers
from autopar.runtime.parameters.parameters import ParameterStore, Residents
from autopar.runtime.parameters.reducer import Reducer
from autopar.runtime.parameters.weight_stashing import StageVersions
from autopar.runtime.ranks.world import World


class Runner:
    """A program, of a whole model or of one stage, on this rank's devices and process groups.

    Args:
        program: the portable program.
        store: the parameters at rest.
        model: module whose buffers the program reads and updates.
        seeds: generator that gives each run its seed, in the same state on every rank of the mesh; see
            [Note: keys of random ops] in autopar/rules/random.py.
        bucket_bytes: approximate bytes of one collective.
        executor: runs the ops, eagerly or compiled.
        at_a_time: number of micro-batches of one run, whose ops take turns (`autopar.passes.overlap_batches`).

    Attributes:
        runs_backward_whole: whether the same nodes of autograd's graph compute gradients of inputs and of weights, so
            that a backward cannot be split in two.
        loss_axes: axes over which the loss still has to be summed, see autopar.passes.overlap_sums.
    """

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        model: nn.Module,
        *,
        seeds: torch.Generator,
        bucket_bytes: int,
        executor: Executor,
        at_a_time: int = 1,
    ) -> None:
        self.program, self.world, self._model = program, store.world, model
        self.runs_backward_whole = executor.compiles or bool(
            program.recomputed or program.slices or program.plan.decomposed or program.has_lone_calls
        )
        self._seeds = seeds
        # Those without dims may be numbers that Python changes: they are moved before every run.
        self._constants = [x.to(self.world.device) if x.ndim else x for x in program.constants]
        self._residents = Residents(program, store, bucket_bytes=bucket_bytes)
        self._gathers = Gathers(self._residents, self.world)
        mesh, groups = self.world.mesh, self.world.group_names
        self._saves = SlicedSaves(program.slices, mesh, converter(mesh, groups, self.world.rank), self.world.tiers)
        binding = Binding(
            copied(program.module),
            self.world,
            executor,
            self._gathers,
            bucket_bytes,
            state=self._state,
            saves=self._saves,
            at_a_time=at_a_time,
            program=program,
        )
        lower(binding)
        self.loss_axes = binding.loss_axes
        self._graph = executor.ready(binding.graph, joins=self._joins_blocks)
        self._reducer = Reducer(
            self._residents,
            every_micro_batch=[program.storage(s.name).reduce == "micro_batch" for s in program.parameters],
            late=self._gathers.late,
            order=binding.order,
            bucket_bytes=bucket_bytes,
        )

    @property
    def _joins_blocks(self) -> bool:
        """Whether nobody waits for the gradients of a block: [Note: joined blocks] of `compiled`."""
        plan = self.program.plan
        is_whole = plan.pipeline is None and (plan.micro_batches == 1 or not self.program.is_step)
        stay = not any(map(signature, self._residents.returns))
        return is_whole and stay and not self._gathers.groups and not self.program.slices

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters in which gradients accumulate; valid inside a step."""
        return self._residents.leaves

    def begin(self) -> None:
        """Before a step: brings the parameters up to date."""
        self._reducer.forget()
        self._gathers.forget()
        if self._residents.refresh():
            self._reducer.attach()

    def end(self) -> None:
        """After a step: frees the memory that lives for one step."""
        self._residents.release()

    def versions(self, seen: Sequence[int]) -> StageVersions:
        """The versions of the parameters in a step that has begun, given which of them each micro-batch sees."""
        return StageVersions(self._residents, self._reducer, seen)

    def run(self, inputs: Sequence[Tensor], *, mutes: bool = False) -> list[Tensor]:
        """The forward of one micro-batch in a step; returns outputs and the tensors to send.

        With `mutes`, the gradients of parameters and inputs are zeros, see `autopar.runtime.execute.muted`.
        """
        self._gathers.in_step, self._gathers.mutes = torch.is_grad_enabled(), mutes
        leaves = self._residents.leaves
        if mutes:
            leaves, inputs = muted(leaves), muted(list(inputs))
        with self._gathers.watching(), self._saves.watching():
            return self._results(self._run(leaves, inputs))

    def begin_backward(self, *, last: bool) -> None:
        """Before the backward of a micro-batch; `last` is the step's last one."""
        self._reducer.begin(last=last)

    def end_backward(self) -> None:
        """After the backward of a micro-batch: waits for the gradients that are sent."""
        self._gathers.finish()
        self._reducer.finish()

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """A forward outside a step, differentiable in the parameters at rest if autograd is on."""
        if torch.is_grad_enabled():
            parameters = self._residents.differentiable()
        else:
            self._residents.refresh()
            parameters = self._residents.leaves
        self._gathers.in_step = False
        with self._gathers.watching(), self._saves.watching():
            results = self._results(self._run(parameters, inputs))
        self._residents.release()
        if not torch.is_grad_enabled():  # no backward will need the gathered parameters
            self._gathers.forget()
        return results

    def _run(self, parameters: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        arguments = (*parameters, *self._state(), *inputs)
        with naming_line():
            return self._run_graph(arguments)

    def _run_graph(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        if not self.program.is_random:
            return list(self._graph(*arguments))
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        with _torch.forked_random_state([self.world.device], seed):
            return list(self._graph(*arguments))

    def _results(self, outputs: list[Tensor]) -> list[Tensor]:
        """Writes the new values of buffers, and returns the results that follow them."""
        count = len(self.program.mutated)
        if count:
            self._write_back(outputs[:count])
        return outputs[count:]

    # --- buffers

    def _state(self) -> list[Tensor]:
        """Buffers and constants. A buffer that will be updated is passed as a copy: backward may need it."""
        mutated = set(self.program.mutated.values())
        buffers = [self._buffer(spec.name) for spec in self.program.buffers]
        names = [spec.name for spec in self.program.buffers]
        copies = [b.clone() if n in mutated else b for n, b in zip(names, buffers, strict=True)]
        return copies + [x.to(self.world.device, non_blocking=True) for x in self._constants]

    def _buffer(self, name: str) -> Tensor:
        return self._model.get_buffer(name)

    @torch.no_grad()
    def _write_back(self, updates: Sequence[Tensor]) -> None:
        for position, name in self.program.mutated.items():
            self._buffer(name).copy_(updates[position])


class BoundProgram:
    """A program of a whole model that runs on this rank; see `Runner` for the arguments."""

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        model: nn.Module,
        *,
        seeds: torch.Generator,
        bucket_bytes: int,
        executor: Executor,
    ) -> None:
        self.program, self.world = program, store.world
        # Compiled ops are not split from their collectives.
        takes_turns = program.is_step and not executor.compiles
        self._at_a_time = program.plan.overlap_batches if takes_turns else 1
        self._runner = Runner(
            program, store, model, seeds=seeds, bucket_bytes=bucket_bytes, executor=executor, at_a_time=self._at_a_time
        )

    def step(self, batch: Sequence[list[Tensor]], shares: Sequence[Sequence[float]], scale: float = 1.0) -> StepResults:
        """Runs forward and backward of every micro-batch. Gradients are left as `backward()` leaves them.

        Returns the loss of the whole batch, and this rank's part of the extra results. With autograd off there is no
        backward. Raises StepError on all ranks if elements count in a micro-batch of weight 0.

        Args:
            batch: this rank's inputs, for every micro-batch.
            shares: weight of each micro-batch in each result, the loss last; empty for a result that is not a weighted
                sum over micro-batches, such as one with a row for every sample. Without an element that counts, as
                with masked targets alone, the weight is 0, and neither loss nor gradients come from the micro-batch.
            scale: gradient of the loss with which backward begins; all gradients are multiplied by it.
        """
        self._runner.begin()
        loss: Tensor | None = None
        pieces = list[Sequence[Tensor]]()
        groups = [range(first, first + self._at_a_time) for first in range(0, len(batch), self._at_a_time)]
        (*_, last) = (group for group in groups if any(shares[-1][number] for number in group))
        for numbers in groups:
            weights = [shares[-1][number] for number in numbers]
            if not any(weights):
                pieces += self._left_out([batch[number] for number in numbers])
                continue
            parts = list[Tensor]()
            together = self._together([batch[number] for number in numbers])
            for weight, (*extras, part) in zip(weights, together, strict=True):
                own = part.detach()
                pieces.append([*extras, own])
                if weight:
                    own = own if weight == 1 else own * weight
                    loss = own if loss is None else loss + own
                    parts.append(part)
            is_last = numbers == last
            if torch.is_grad_enabled():
                self._runner.begin_backward(last=is_last)
                counting = zip(parts, filter(None, weights), strict=True)
                torch.autograd.backward(parts, [_first(x, w * scale) for x, w in counting])
            assert loss is not None, "there is a micro-batch"
            axes = self._runner.loss_axes
            total = sum_over(loss, axes, self.world) if is_last and axes else None
            if torch.is_grad_enabled():
                self._runner.end_backward()
            if total is not None:
                with naming_op("the loss"):
                    (loss,) = total.wait()
        self._runner.end()
        refuse_divided_by_none(pieces, shares, self.world.covering, self.world.device)
        assert loss is not None
        return StepResults(loss, joined(self.program, pieces, shares))

    @torch.no_grad()
    def _left_out(self, batches: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """The results of micro-batches that have no weight in the loss."""
        return self._together(batches)

    def _together(self, batches: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """The results of micro-batches that run together, for each of them."""
        results = self._runner.run([x for inputs in batches for x in inputs])
        count = len(results) // len(batches)
        return [results[i : i + count] for i in range(0, len(results), count)]

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """The local outputs, differentiable in the parameters at rest if autograd is on."""
        return self._runner.forward(inputs)


def _first(loss: Tensor, gradient: float) -> Tensor | None:
    """The gradient with which the backward of a loss begins; None for the 1 of which torch makes a tensor itself."""
    return None if gradient == 1 else torch.full_like(loss, gradient)


def sum_over(x: Tensor, axes: Sequence[str], world: World) -> Transfer:
    """Starts to sum a small tensor, such as the loss, over ranks."""
    mesh, shape = world.mesh, tuple(x.shape)
    hops = tuple(
        Hop("all_reduce", "vary", (), mesh.index(axis), dict(mesh.axes)[axis], shape, shape, shape, shape)
        for axis in axes
    )
    return Transfer([hops], [x], world)


def unflatten_outputs(program: Program, outputs: Sequence[Any]) -> Any:
    """The model's result with its tensors in place."""
    remaining = iter(outputs)
    count = len(outputs) + len(program.out_literals)
    literals = program.out_literals
    leaves = [literals[i] if i in literals else next(remaining) for i in range(count)]
    return pytree.tree_unflatten(leaves, program.out_spec)
