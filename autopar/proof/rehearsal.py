"""One step with all ranks simulated in one process, in the order of the plan's own schedule.

Every stage runs on all ranks of its mesh in lockstep (`autopar.proof.lockstep`), every micro-batch at its place
in the schedule; what stages send to each other is detached and given on, as on real ranks, so that a
gradient that is not sent is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir import Plan
from autopar.ops.sharding import shard
from autopar.pipeline.schedules import Action, actions
from autopar.program.program import Program, TensorSpec
from autopar.proof import lockstep
from autopar.proof.lockstep import Ranks
from autopar.runtime.split_backward import SplitBackward, WholeBackward

Inputs = Callable[[int], Mapping[str, Tensor]]  # micro-batch -> global inputs by name


def actions_of(plan: Plan) -> Sequence[Action]:
    """The actions of all ranks along the pipeline, in an order in which each has what it needs."""
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
        """Gives the parameters what is left to give."""
        assert self.halves is not None, "a backward's second half before its first"
        self.halves.run_weights()
        self.results, self.has_landed = [], True


class Rehearsal:
    """All stages of a plan with their parameters.

    Args:
        whole: the program before it was cut.
        stages: the programs of its stages.
        parameters, buffers: global values by name.
        micro_batches: number of micro-batches.
        shares: share of each micro-batch's loss in the loss of the step; by default they are equal.

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
    ) -> None:
        self.stages, self.mesh = stages, whole.plan.mesh
        self.shares = shares or [1 / micro_batches] * micro_batches
        self.stored: dict[str, Ranks] = {}
        self.losses: dict[int, Ranks] = {}
        self.extras: dict[int, list[Ranks]] = {}
        self.updates: dict[str, Ranks] = {}
        # Every rank has its own: an op may write to one without saying so.
        self.buffers = {
            s.name: [buffers[s.name].clone() for _ in range(self.mesh.size)] for s in whole.buffers
        }
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
        """Takes the shards of all ranks for a parameter's, and makes leaves of them."""
        how, mesh = whole.storage(spec.name), self.mesh
        needs_grad = spec.name not in whole.frozen
        self.stored[spec.name] = [x.requires_grad_(needs_grad) for x in shards]
        self._residents[spec.name] = lockstep.convert(
            self.stored[spec.name], spec.dims, how.storage, how.resident, mesh
        )
        self._leaves[spec.name] = [_leaf(x, spec, needs_grad) for x in self._residents[spec.name]]

    def run(self, order: Iterable[Action], inputs: Inputs) -> None:
        """Runs a step: actions of all ranks, in an order in which each has what it needs."""
        for action in order:
            key = (action.stage, action.micro_batch)
            if action.kind == "F":
                self._flights[key] = self._forward(*key, inputs(action.micro_batch))
            elif action.kind in "BI":
                self._backward(*key, WholeBackward if action.kind == "B" else SplitBackward)
            if action.kind in "BW":
                self._flights[key].land()
            if action.kind == "U":
                self._update(*key)
        aloft = [key for key, flight in self._flights.items() if not flight.has_landed]
        assert not aloft, f"(stage, micro-batch) without a backward: {aloft}"
        for name, residents in self._residents.items():
            self._return_gradient(residents, self._leaves[name])

    # --- forward

    def _forward(self, stage: int, micro_batch: int, inputs: Mapping[str, Tensor]) -> _Flight:
        program = self.stages[stage]
        received = self._receive(stage, micro_batch)
        leaves = self._leaves_of(stage, micro_batch)
        arguments = [leaves[spec.name] for spec in program.parameters]
        arguments += [self.buffers[spec.name] for spec in program.buffers]
        arguments += [[constant] * self.mesh.size for constant in program.constants]
        arguments += [self._cut(spec, inputs[spec.name]) for spec in program.inputs]
        results = lockstep.run(program, [*arguments, *received])
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
        """Parameter name -> what a micro-batch's forward takes on a stage, on every rank."""
        return self._leaves

    def _receive(self, stage: int, micro_batch: int) -> list[Ranks]:
        """The tensors that the previous stage sent, as leaves of this stage's autograd."""
        wires = self.stages[stage].received
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
        """The gradients of what a stage received, and of its parameters or what is left to do for them."""
        flight = self._flights[stage, micro_batch]
        pairs = [
            (x, g)
            for ranks, gradients in zip(
                flight.results, self._arrived(stage, micro_batch), strict=True
            )
            if gradients is not None
            for x, g in zip(ranks, gradients, strict=True)
        ]
        inputs = [x for ranks in flight.received for x in ranks]
        flight.halves = kind([x for x, _ in pairs], [g for _, g in pairs], inputs)
        for x, gradient in zip(inputs, flight.halves.input_gradients, strict=True):
            x.grad = gradient

    def _arrived(self, stage: int, micro_batch: int) -> list[Ranks | None]:
        """The gradients of a stage's results: of the loss, or from the stage behind."""
        program = self.stages[stage]
        if program.is_step:
            share = self.shares[micro_batch]
            return [[torch.full_like(x, share) for x in self.losses[micro_batch]]]
        if not program.sent:
            return []
        behind = self._flights[stage + 1, micro_batch].received
        return [_gradients_of(ranks) for ranks in behind]

    def _update(self, stage: int, micro_batch: int) -> None:
        """Updates a stage's parameters after a micro-batch's backward, where the schedule says so."""
        raise AssertionError("parameters without versions are updated after a step")

    @staticmethod
    def _return_gradient(residents: Ranks, leaves: Ranks) -> None:
        pairs = [(r, x.grad) for r, x in zip(residents, leaves, strict=True) if x.requires_grad]
        if any(grad is not None for _, grad in pairs):
            gradients = [torch.zeros_like(r) if g is None else g.to(r.dtype) for r, g in pairs]
            torch.autograd.backward([r for r, _ in pairs], gradients)


def _leaf(x: Tensor, spec: TensorSpec, needs_grad: bool) -> Tensor:
    """A leaf in the element type that the program takes, whose gradient is summed in its own."""
    leaf = x.detach().to(spec.dtype).requires_grad_(needs_grad)
    if leaf.dtype != spec.gradient_dtype:
        leaf.grad_dtype = spec.gradient_dtype
    return leaf


def _gradients_of(ranks: Ranks) -> Ranks | None:
    """The gradients of received tensors; zeros on ranks that got none."""
    if all(x.grad is None for x in ranks):
        return None
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in ranks]
