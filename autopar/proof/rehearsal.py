"""Simulates one step of all ranks in one process, in the order of the plan's schedule.

Every stage runs on all ranks of its mesh in lockstep (`autopar.proof.lockstep`), and micro-batches run in the order of
the schedule. A tensor that one stage sends to the next is detached from autograd, as on real ranks. If the stage then
does not send the gradient back, the gradient is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar._torch import own_gradients
from autopar.ir import Plan
from autopar.ops.sharding import shard
from autopar.pipeline.schedules import Action, actions
from autopar.program.program import Program, TensorSpec
from autopar.proof import lockstep
from autopar.proof.lockstep import Ranks
from autopar.proof.streams import MicroBatchStreams
from autopar.runtime.pipeline.split_backward import SplitBackward, WholeBackward

Draws = Callable[[int], MicroBatchStreams]  # micro-batch -> noise from which its ops draw
Inputs = Callable[[int], Mapping[str, Tensor]]  # micro-batch -> global inputs by name


def actions_of(plan: Plan) -> Sequence[Action]:
    """The actions of all pipeline ranks, in an order in which each comes after the actions that it needs."""
    if plan.pipeline is not None:
        return actions(plan.pipeline, plan.micro_batches).in_order
    return [Action(kind, 0, i) for i in range(plan.micro_batches) for kind in ("F", "B")]


Halves = SplitBackward | WholeBackward


@dataclass
class _Flight:
    """A micro-batch between the forward and the backward of one stage."""

    received: list[Ranks]
    results: list[Ranks]
    halves: Halves | None = None
    has_landed: bool = False

    def land(self) -> None:
        """Computes the gradients of the parameters that the first half of a split backward left out."""
        assert self.halves is not None, "a backward's second half before its first"
        self.halves.run_weights()
        self.results, self.has_landed = [], True


class Rehearsal:
    """All stages of a plan with their parameters on all ranks; `run` runs a step.

    Args:
        whole: the program before it was cut.
        stages: the programs of its stages.
        parameters, buffers: global values by name.
        micro_batches: number of micro-batches.
        shares: weight of each micro-batch's loss in the loss of the step; by default they are equal.
        draws: noise of every micro-batch; by default ops draw from the default generator.

    Attributes:
        stored: parameter name -> the stored shard of every rank; gradients are left in `.grad`.
        losses: loss of every micro-batch, on the ranks of the last stage.
        extras: extra results of every micro-batch, on the ranks of the last stage.
        buffers: buffer name -> its value on every rank.
        updates: buffer name -> its new value on every rank, for buffers that the program updates.
    """

    def __init__(
        self,
        whole: Program,
        stages: Sequence[Program],
        *,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        micro_batches: int,
        shares: Sequence[float] = (),
        draws: Draws | None = None,
    ) -> None:
        self.stages, self.mesh = stages, whole.plan.mesh
        self.shares = shares or [1 / micro_batches] * micro_batches
        self._draws = draws
        self.stored: dict[str, Ranks] = {}
        self.losses: dict[int, Ranks] = {}
        self.extras: dict[int, list[Ranks]] = {}
        self.updates: dict[str, Ranks] = {}
        # Every rank gets a copy: an op may write to it although its schema does not say so.
        self.buffers = {s.name: [buffers[s.name].clone() for _ in range(self.mesh.size)] for s in whole.buffers}
        self._residents: dict[str, Ranks] = {}
        self._leaves: dict[str, Ranks] = {}
        self._flights: dict[tuple[int, int], _Flight] = {}
        for spec in whole.parameters:
            self._place(spec, parameters[spec.name].detach(), whole)

    def _place(self, spec: TensorSpec, value: Tensor, whole: Program) -> None:
        storage, mesh = whole.storage(spec.name).storage, self.mesh
        shards = [shard(value, spec.dims, storage, mesh, r).clone() for r in range(mesh.size)]
        self._place_shards(spec, shards, whole)

    def _place_shards(self, spec: TensorSpec, shards: Ranks, whole: Program) -> None:
        """Stores the shards of a parameter on all ranks, and makes leaves of its resident copies."""
        how, mesh = whole.storage(spec.name), self.mesh
        needs_grad = spec.name not in whole.frozen
        self.stored[spec.name] = [x.requires_grad_(needs_grad) for x in shards]
        self._residents[spec.name] = lockstep.convert(
            self.stored[spec.name], spec.dims, how.storage, how.resident, mesh, back_by_rows=how.by_rows
        )
        self._leaves[spec.name] = [_leaf(x, spec, needs_grad) for x in self._residents[spec.name]]

    def run(self, order: Iterable[Action], inputs: Inputs) -> None:
        """Runs a step: the actions of all ranks, each after the actions that it needs (`actions_of`)."""
        for action in order:
            key = (action.stage, action.micro_batch)
            if action.kind == "F":
                self._flights[key] = self._forward(*key, inputs(action.micro_batch))
            elif action.kind in "BI":
                program = self.stages[action.stage].of(action.micro_batch)
                is_whole = action.kind == "B" or bool(program.recomputed) or program.has_lone_calls
                self._backward(*key, WholeBackward if is_whole else SplitBackward)
            if action.kind in "BW":
                self._flights[key].land()
                self._own_gradients(*key)
            if action.kind == "U":
                self._update(*key)
        aloft = [key for key, flight in self._flights.items() if not flight.has_landed]
        assert not aloft, f"(stage, micro-batch) without a backward: {aloft}"
        for name, residents in self._residents.items():
            self._return_gradient(residents, self._leaves[name])

    # --- forward

    def _forward(self, stage: int, micro_batch: int, inputs: Mapping[str, Tensor]) -> _Flight:
        program = self.stages[stage].of(micro_batch)
        received = self._receive(stage, micro_batch)
        leaves = self._leaves_of(stage, micro_batch)
        arguments = [leaves[spec.name] for spec in program.parameters]
        arguments += [self.buffers[spec.name] for spec in program.buffers]
        arguments += [[constant] * self.mesh.size for constant in program.constants]
        fed = (*program.inputs, *program.shares)
        arguments += [self._cut(spec, inputs[spec.name]) for spec in fed]
        streams = None if self._draws is None else self._draws(micro_batch)
        results = lockstep.run(program, [*arguments, *received], streams)
        for position, name in program.mutated.items():
            self.buffers[name] = self.updates[name] = [x.detach() for x in results[position]]
        results = results[len(program.mutated) :]
        if program.is_step:
            *extras, loss = results
            self.losses[micro_batch] = [x.detach() for x in loss]
            self.extras[micro_batch] = extras
            results = [loss]
        return _Flight(received, results)

    def _leaves_of(self, stage: int, micro_batch: int) -> Mapping[str, Ranks]:
        """Parameter name -> the tensors on all ranks that a micro-batch's forward uses on a stage."""
        return self._leaves

    def _receive(self, stage: int, micro_batch: int) -> list[Ranks]:
        """The tensors that the previous stage sent, as leaves of this stage's autograd."""
        wires = self.stages[stage].of(micro_batch).received
        if not wires:
            return []
        sent = self._flights[stage - 1, micro_batch].results
        return [
            [x.detach().clone().requires_grad_(wire.needs_grad) for x in ranks]
            for wire, ranks in zip(wires, sent, strict=True)
        ]

    def _cut(self, spec: TensorSpec, x: Tensor) -> Ranks:
        return [shard(x, spec.dims, spec.layout, self.mesh, rank) for rank in range(self.mesh.size)]

    # --- backward

    def _backward(self, stage: int, micro_batch: int, kind: type[Halves]) -> None:
        """Runs a backward, or its first half, of a micro-batch on a stage."""
        flight = self._flights[stage, micro_batch]
        pairs = [
            (x, g)
            for ranks, gradients in zip(flight.results, self._arrived(stage, micro_batch), strict=True)
            if gradients is not None
            for x, g in zip(ranks, gradients, strict=True)
        ]
        inputs = [x for ranks in flight.received for x in ranks]
        flight.halves = kind([x for x, _ in pairs], [g for _, g in pairs], inputs)
        for x, gradient in zip(inputs, flight.halves.input_gradients, strict=True):
            x.grad = gradient

    def _own_gradients(self, stage: int, micro_batch: int) -> None:
        ranks = self._leaves_of(stage, micro_batch).values()
        own_gradients(itertools.chain.from_iterable(ranks))

    def _arrived(self, stage: int, micro_batch: int) -> list[Ranks | None]:
        """The gradients of a stage's results: of the loss on the last stage, else those that the next stage sent."""
        program = self.stages[stage].of(micro_batch)
        if program.is_step:
            share = self.shares[micro_batch]
            return [[torch.full_like(x, share) for x in self.losses[micro_batch]]]
        if not program.sent:
            return []
        behind = self._flights[stage + 1, micro_batch].received
        return [_gradients_of(ranks) for ranks in behind]

    def _update(self, stage: int, micro_batch: int) -> None:
        """Updates a stage's parameters inside of a step; only schedules with versions of parameters do so."""
        raise AssertionError("parameters without versions are updated after a step")

    @staticmethod
    def _return_gradient(residents: Ranks, leaves: Ranks) -> None:
        pairs = [(r, x.grad) for r, x in zip(residents, leaves, strict=True) if x.requires_grad]
        if any(grad is not None for _, grad in pairs):
            gradients = [torch.zeros_like(r) if g is None else g.to(r.dtype) for r, g in pairs]
            torch.autograd.backward([r for r, _ in pairs], gradients)


def _leaf(x: Tensor, spec: TensorSpec, needs_grad: bool) -> Tensor:
    """A leaf in the dtype that the program uses, whose gradient is accumulated in `spec.gradient_dtype`."""
    leaf = x.detach().to(spec.dtype).requires_grad_(needs_grad)
    if leaf.dtype != spec.gradient_dtype:
        leaf.grad_dtype = spec.gradient_dtype
    return leaf


def _gradients_of(ranks: Ranks) -> Ranks | None:
    """The gradients of received tensors, with zeros on ranks without one; None if no rank has one."""
    if all(x.grad is None for x in ranks):
        return None
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in ranks]
