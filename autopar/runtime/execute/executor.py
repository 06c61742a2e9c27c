"""Programs bound to this rank's devices and process groups, and the run of a step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar._torch import pytree
from autopar.ir import CollectiveCall
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


class BoundGraph:
    """The graph of a program, for micro-batches of its size, on this rank's devices and process groups.

    Args:
        program: the portable program.
        residents: the parameters that it takes.
        model, bucket_bytes, executor, at_a_time: see `Runner`.

    Attributes:
        module: the graph, as the executor runs it.
        gathers: parameters that are collected at their uses.
        loss_axes: axes over which the loss still has to be summed, see autopar.passes.overlap_sums.
        order: positions of the parameters in the order in which backward completes their gradients.
    """

    def __init__(
        self,
        program: Program,
        residents: Residents,
        model: nn.Module,
        *,
        bucket_bytes: int,
        executor: Executor,
        at_a_time: int,
    ) -> None:
        self._program, self._model, self._residents = program, model, residents
        self._world = world = residents.world
        # Those without dims may be numbers that Python changes: they are moved before every run.
        self._constants = [x.to(world.device) if x.ndim else x for x in program.constants]
        self.gathers = Gathers(residents, world)
        self._saves = SlicedSaves(
            program.slices, world.mesh, converter(world.mesh, world.group_names, world.rank), world.tiers
        )
        binding = Binding(
            copied(program.module),
            world,
            executor,
            self.gathers,
            bucket_bytes,
            state=self._state,
            saves=self._saves,
            at_a_time=at_a_time,
            program=program,
        )
        lower(binding)
        self.loss_axes, self.order = binding.loss_axes, binding.order
        self.module = executor.ready(binding.graph, joins=self._joins_blocks)

    @property
    def _joins_blocks(self) -> bool:
        """Whether nobody waits for the gradients of a block: [Note: joined blocks] of `compiled`."""
        plan = self._program.plan
        is_whole = plan.pipeline is None and (plan.micro_batches == 1 or not self._program.is_step)
        stay = not any(map(signature, self._residents.returns))
        return is_whole and stay and not self.gathers.groups and not self._program.slices

    def run(self, parameters: list[Tensor], inputs: Sequence[Tensor], seeds: torch.Generator) -> list[Tensor]:
        """Writes the new values of buffers, and returns the results that follow them."""
        with self.gathers.watching(), self._saves.watching():
            with naming_line():
                outputs = self._run_graph((*parameters, *self._state(), *inputs), seeds)
            count = len(self._program.mutated)
            if count:
                self._write_back(outputs[:count])
            return outputs[count:]

    def _run_graph(self, arguments: Sequence[Tensor], seeds: torch.Generator) -> list[Tensor]:
        if not self._program.is_random:
            return list(self.module(*arguments))
        seed = int(torch.randint(2**62, (), generator=seeds))
        with _torch.forked_random_state([self._world.device], seed):
            return list(self.module(*arguments))

    # --- buffers

    def _state(self) -> list[Tensor]:
        """Buffers and constants. A buffer that will be updated is passed as a copy: backward may need it."""
        mutated = set(self._program.mutated.values())
        buffers = [self._buffer(spec.name) for spec in self._program.buffers]
        names = [spec.name for spec in self._program.buffers]
        copies = [b.clone() if n in mutated else b for n, b in zip(names, buffers, strict=True)]
        return copies + [x.to(self._world.device, non_blocking=True) for x in self._constants]

    def _buffer(self, name: str) -> Tensor:
        return self._model.get_buffer(name)

    @torch.no_grad()
    def _write_back(self, updates: Sequence[Tensor]) -> None:
        for position, name in self._program.mutated.items():
            self._buffer(name).copy_(updates[position])


class Runner:
    """A program, of a whole model or of one stage, on this rank's devices and process groups.

    Where the last micro-batches of a step are smaller, they have a graph of their own, and all have the parameters and
    their gradients in common.

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
        graphs: the graph of the first micro-batches, and that of the last where these are smaller.
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
        self.program, self.world = program, store.world
        sizes = [program] if program.smaller is None else [program, program.smaller]
        self.runs_backward_whole = executor.compiles or any(
            each.recomputed or each.slices or each.plan.decomposed or each.has_lone_calls for each in sizes
        )
        self._seeds = seeds
        self._residents = Residents(program, store, bucket_bytes=bucket_bytes)
        self.graphs = [
            BoundGraph(each, self._residents, model, bucket_bytes=bucket_bytes, executor=executor, at_a_time=at_a_time)
            for each in sizes
        ]
        self._reducer = Reducer(
            self._residents,
            every_micro_batch=[program.storage(s.name).reduce == "micro_batch" for s in program.parameters],
            late=frozenset[int]().union(*(graph.gathers.late for graph in self.graphs)),
            order=self.graphs[0].order,
            bucket_bytes=bucket_bytes,
        )

    def is_smaller(self, micro_batch: int) -> bool:
        """Whether a micro-batch is one of the last, and these are smaller than the first."""
        return self.program.of(micro_batch) is not self.program

    def _graph(self, micro_batch: int) -> BoundGraph:
        return self.graphs[self.is_smaller(micro_batch)]

    def loss_axes(self, micro_batch: int) -> tuple[str, ...]:
        """Axes over which the loss of a micro-batch still has to be summed, see autopar.passes.overlap_sums."""
        return self._graph(micro_batch).loss_axes

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters in which gradients accumulate; valid inside a step."""
        return self._residents.leaves

    def begin(self) -> None:
        """Before a step: brings the parameters up to date."""
        self._reducer.forget()
        for graph in self.graphs:
            graph.gathers.forget()
        if self._residents.refresh():
            self._reducer.attach()

    def end(self) -> None:
        """After a step: frees the memory that lives for one step."""
        self._residents.release()

    def versions(self, seen: Sequence[int]) -> StageVersions:
        """The versions of the parameters in a step that has begun, given which of them each micro-batch sees."""
        return StageVersions(self._residents, self._reducer, seen)

    def run(self, inputs: Sequence[Tensor], micro_batch: int = 0, *, mutes: bool = False) -> list[Tensor]:
        """The forward of a micro-batch in a step; returns outputs and the tensors to send.

        With `mutes`, the gradients of parameters and inputs are zeros, see `autopar.runtime.execute.muted`.
        """
        graph = self._graph(micro_batch)
        graph.gathers.in_step, graph.gathers.mutes = torch.is_grad_enabled(), mutes
        leaves = self._residents.leaves
        if mutes:
            leaves, inputs = muted(leaves), muted(list(inputs))
        return graph.run(leaves, inputs, self._seeds)

    def begin_backward(self, *, last: bool) -> None:
        """Before the backward of a micro-batch; `last` is the step's last one."""
        self._reducer.begin(last=last)

    def end_backward(self) -> None:
        """After the backward of a micro-batch: waits for the gradients that are sent."""
        for graph in self.graphs:
            graph.gathers.finish()
        self._reducer.finish()

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """A forward outside a step, differentiable in the parameters at rest if autograd is on."""
        (graph,) = self.graphs
        if torch.is_grad_enabled():
            parameters = self._residents.differentiable()
        else:
            self._residents.refresh()
            parameters = self._residents.leaves
        graph.gathers.in_step = False
        results = graph.run(parameters, inputs, self._seeds)
        self._residents.release()
        if not torch.is_grad_enabled():  # no backward will need the gathered parameters
            graph.gathers.forget()
        return results


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
        losses = dict[tuple[str, ...], Tensor]()  # by the axes over which they still have to be summed
        pieces = list[Sequence[Tensor]]()
        groups = [range(first, first + self._at_a_time) for first in range(0, len(batch), self._at_a_time)]
        (*_, last) = (group for group in groups if any(shares[-1][number] for number in group))
        for numbers in groups:
            weights = [shares[-1][number] for number in numbers]
            if not any(weights):
                pieces += self._left_out(batch, numbers)
                continue
            parts, axes = list[Tensor](), self._runner.loss_axes(numbers[0])
            for weight, (*extras, part) in zip(weights, self._together(batch, numbers), strict=True):
                own = part.detach()
                pieces.append([*extras, own])
                if weight:
                    own = own if weight == 1 else own * weight
                    losses[axes] = losses[axes] + own if axes in losses else own
                    parts.append(part)
            is_last = numbers == last
            if torch.is_grad_enabled():
                self._runner.begin_backward(last=is_last)
                counting = zip(parts, filter(None, weights), strict=True)
                torch.autograd.backward(parts, [_first(x, w * scale) for x, w in counting])
            sums = [sum_over(x, over, self.world) for over, x in losses.items() if over and is_last]
            if torch.is_grad_enabled():
                self._runner.end_backward()
            for total, over in zip(sums, filter(None, losses), strict=False):
                with naming_op("the loss"):
                    (losses[over],) = total.wait()
        self._runner.end()
        refuse_divided_by_none(pieces, shares, self.world.covering, self.world.device)
        loss = functools.reduce(operator.add, losses.values())
        return StepResults(loss, joined(self.program, pieces, shares, self.world))

    @torch.no_grad()
    def _left_out(self, batch: Sequence[list[Tensor]], numbers: Sequence[int]) -> list[list[Tensor]]:
        """The results of micro-batches that have no weight in the loss."""
        return self._together(batch, numbers)

    def _together(self, batch: Sequence[list[Tensor]], numbers: Sequence[int]) -> list[list[Tensor]]:
        """The results of micro-batches that run together, for each of them."""
        results = self._runner.run([x for number in numbers for x in batch[number]], numbers[0])
        count = len(results) // len(numbers)
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
    calls = [CollectiveCall("all_reduce", "vary", (), mesh.index(axis)) for axis in axes]
    return Transfer([tuple(Hop.of(call, shape, mesh) for call in calls)], [x], world)


def unflatten_outputs(program: Program, outputs: Sequence[Any]) -> Any:
    """The model's result with its tensors in place."""
    remaining = iter(outputs)
    count = len(outputs) + len(program.out_literals)
    literals = program.out_literals
    leaves = [literals[i] if i in literals else next(remaining) for i in range(count)]
    return pytree.tree_unflatten(leaves, program.out_spec)
