"""A step of the stages that this rank has: the actions of its schedule, one after the other.

The list (`autopar.pipeline.schedules`) says what is computed, sent and received, and in which order. A receive is
started where it stands in the list, and waited for by the forward or backward that needs it. What has been sent is
kept until it has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.ir import Pipeline
from autopar.pipeline.schedules import Action, Kind
from autopar.runtime.pipeline.split_backward import SplitBackward, WholeBackward
from autopar.runtime.ranks.world import Pipe

# A send -> the receive at its other end, and the step from its stage to the receiving one.
_ENDS: Mapping[Kind, tuple[Kind, int]] = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
# A receive -> the step from its stage to the sending one.
_SOURCES: Mapping[Kind, int] = {"RECV_F": -1, "RECV_B": 1}
_TRANSFERS = (*_ENDS, *_SOURCES)
_FORWARD = ("F", "SEND_F", "RECV_F")


class StageRun(Protocol):
    """The computations of one stage.

    Attributes:
        first_half: class of a backward, whose construction runs it, or its first half.
    """

    first_half: type[SplitBackward] | type[WholeBackward]

    def received(self, micro_batch: int) -> Sequence[Tensor]:
        """Examples of received tensors on the meta device, which need a gradient where one is sent back."""

    def sent(self, micro_batch: int) -> Sequence[Tensor]:
        """Examples of sent tensors on the meta device, which need a gradient where one comes back."""

    def forward(self, micro_batch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors to send; on the last stage the micro-batch's term of the loss alone."""

    def begin_backward(self, micro_batch: int, *, last: bool) -> None:
        """Is called before gradients of parameters accumulate; `last` for the last micro-batch of the step."""

    def end_backward(self, micro_batch: int) -> None:
        """Is called when the micro-batch's gradients of parameters have accumulated."""

    def update(self, micro_batch: int) -> None:
        """Updates the stage's parameters, after the backward of this micro-batch."""


@dataclass
class _StageFlight:
    """A micro-batch between the forward and the backward of one stage."""

    received: Sequence[Tensor]
    results: Sequence[Tensor]
    halves: SplitBackward | WholeBackward | None = None


class _Arrival(NamedTuple):
    """The work that a receive waits for, its tensors, and all tensors of its batch, which live as long."""

    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]
    batch: Mapping[Action, Sequence[Tensor]]


@dataclass
class StageActions:
    """One step of the stages of this rank; `run` runs it.

    Args:
        stages: computations of every stage of this rank, by its number.
        pipeline: all stages, and which rank has them.
        pipe: this rank's place among the ranks of the pipeline.
        device: device of all tensors.
        trains: whether there is a backward; without one only forwards run.
    """

    stages: Mapping[int, StageRun]
    pipeline: Pipeline
    pipe: Pipe
    device: torch.device
    trains: bool
    _flights: dict[tuple[int, int], _StageFlight] = field(default_factory=dict)
    _arriving: dict[Action, _Arrival] = field(default_factory=dict)  # by the receive
    # A send that is still to be started -> its tensors.
    _leaving: dict[Action, list[Tensor]] = field(default_factory=dict)
    # A send that is on its way -> the work that says when it has arrived, and its tensors.
    _left: dict[Action, tuple[list[dist.Work], list[Tensor]]] = field(default_factory=dict)

    def run(self, actions: Sequence[Action], *, exchanges: bool) -> None:
        """Runs the actions of this rank in order.

        Args:
            actions: the actions.
            exchanges: whether a send and the receive that follows it from the same neighbour are one batch.
        """
        if not self.trains:
            actions = [each for each in actions if each.kind in _FORWARD]
        last = {each.stage: each for each in actions if each.kind in ("B", "W")}
        for group in _groups(actions, exchanges):
            if group[0].kind in _TRANSFERS:
                self._transfer(group)
                continue
            (action,) = group
            with torch.profiler.record_function(str(action)):
                self._compute(action, is_last=action in last.values())
        for works, _ in self._left.values():
            _torch.wait_for_all(works)
        missed = [*self._arriving, *self._leaving]
        assert not missed, f"the schedule leaves {missed} without an end"

    # --- forwards and backwards

    def _compute(self, action: Action, *, is_last: bool) -> None:
        kind, stage, micro_batch = action
        run = self.stages[stage]
        if kind == "F":
            self._forward(stage, micro_batch)
        elif kind == "U":
            run.update(micro_batch)
        elif kind == "I":
            self._first_half(stage, micro_batch, run.first_half)
        else:
            run.begin_backward(micro_batch, last=is_last)
            if kind == "B":
                self._first_half(stage, micro_batch, WholeBackward)
            self._second_half(stage, micro_batch)
            run.end_backward(micro_batch)

    def _forward(self, stage: int, micro_batch: int) -> None:
        run = self.stages[stage]
        received = self._arrived(Action("RECV_F", stage, micro_batch)) if stage else []
        if self.trains:
            for x, example in zip(received, run.received(micro_batch), strict=True):
                x.requires_grad_(example.requires_grad)
        results = run.forward(micro_batch, received)
        if self.trains:
            self._flights[stage, micro_batch] = _StageFlight(received, results)
        if stage + 1 < self.pipeline.stages:
            self._hand_on(Action("SEND_F", stage, micro_batch), results)

    def _first_half(self, stage: int, micro_batch: int, kind: type[SplitBackward] | type[WholeBackward]) -> None:
        """Runs a backward, or its first half, and hands the gradients of what was received to the stage before."""
        flight, run = self._flights[stage, micro_batch], self.stages[stage]
        flight.halves = kind(*self._roots(stage, micro_batch), flight.received)
        if stage:
            found = zip(flight.received, flight.halves.input_gradients, run.received(micro_batch), strict=True)
            gradients = [
                torch.zeros_like(x) if gradient is None else gradient
                for x, gradient, example in found
                if example.requires_grad
            ]
            self._hand_on(Action("SEND_B", stage, micro_batch), gradients)
        # The graph goes before anybody hears of the end of the backward.
        flight.received, flight.results = (), ()

    def _second_half(self, stage: int, micro_batch: int) -> None:
        halves = self._flights.pop((stage, micro_batch)).halves
        assert halves is not None, "a backward's second half before its first"
        halves.run_weights()

    def _roots(self, stage: int, micro_batch: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The results whose gradients are known, and these gradients; None for the 1 of a term of the loss."""
        results = self._flights[stage, micro_batch].results
        if stage + 1 == self.pipeline.stages:
            return [*results], [None] * len(results)
        examples = self.stages[stage].sent(micro_batch)
        roots = [x for x, example in zip(results, examples, strict=True) if example.requires_grad]
        gradients = self._arrived(Action("RECV_B", stage, micro_batch))
        sent = self._left.pop(Action("SEND_F", stage, micro_batch), None) if gradients else None
        if sent is not None:  # and it has arrived, since its gradient has come back
            _torch.wait_for_all(sent[0])
        return roots, [*gradients]

    # --- what passes from stage to stage

    def _hand_on(self, send: Action, tensors: Sequence[Tensor]) -> None:
        """Gives tensors to a neighbouring stage of this rank, or has them ready for their send."""
        kind, offset = _ENDS[send.kind]
        passed = [x.detach() for x in tensors]
        if send.stage + offset in self.stages:
            receive = Action(kind, send.stage + offset, send.micro_batch)
            self._arriving[receive] = _Arrival([], passed, {})
        else:
            self._leaving[send] = [x.contiguous() for x in passed]

    def _arrived(self, receive: Action) -> Sequence[Tensor]:
        arrival = self._arriving.pop(receive)
        _torch.wait_for_all(arrival.works)
        return arrival.tensors

    def _transfer(self, group: Sequence[Action]) -> None:
        """Starts the sends and receives of a group."""
        moved = {each: self._tensors(each) for each in group}
        works = _started([op for each in group for op in self._operations(each, moved[each])])
        for action, tensors in moved.items():
            if action.kind in _SOURCES:
                self._arriving[action] = _Arrival(works, tensors, moved)
            elif len(group) == 1:  # else the receive beside it waits for both
                self._left[action] = works, tensors

    def _tensors(self, action: Action) -> list[Tensor]:
        """The tensors of a send, or buffers for those of a receive."""
        if action.kind in _ENDS:
            return self._leaving.pop(action)
        run = self.stages[action.stage]
        if action.kind == "RECV_F":
            examples = run.received(action.micro_batch)
        else:
            examples = [x for x in run.sent(action.micro_batch) if x.requires_grad]
        return [torch.empty_like(x, device=self.device, requires_grad=False) for x in examples]

    def _operations(self, action: Action, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        is_send = action.kind in _ENDS
        offset = _ENDS[action.kind][1] if is_send else _SOURCES[action.kind]
        peer = self.pipe.peer(self.pipeline.rank_of(action.stage + offset))
        call = dist.isend if is_send else dist.irecv
        return [dist.P2POp(call, x, peer, self.pipe.group) for x in tensors]


def greet(pipeline: Pipeline, pipe: Pipe, device: torch.device) -> None:
    """Lets every rank meet its neighbours once, before the first step.

    NCCL makes a communicator for a group, or for two ranks, when it is first used, and every rank of it waits there.
    Here they come in one order on all ranks; in a step they would come as the schedule has them.
    """
    word = torch.zeros(1, device=device)
    dist.all_reduce(word, group=pipe.group)
    for stage in range(1, pipeline.stages):
        source, target = pipeline.rank_of(stage - 1), pipeline.rank_of(stage)
        if source == target:
            continue
        if pipe.rank == source:
            dist.send(word, pipe.peer(target), group=pipe.group)
        elif pipe.rank == target:
            dist.recv(word, pipe.peer(source), group=pipe.group)


def _groups(actions: Sequence[Action], exchanges: bool) -> Iterator[Sequence[Action]]:
    """The actions one by one, but an exchange of two neighbours as two: both wait for each other's tensors."""
    i = 0
    while i < len(actions):
        size = 1 + (exchanges and _is_exchange(actions[i : i + 2]))
        yield actions[i : i + size]
        i += size


def _is_exchange(actions: Sequence[Action]) -> bool:
    kinds = [each.kind for each in actions]
    is_both = kinds in (["SEND_F", "RECV_B"], ["SEND_B", "RECV_F"])
    return is_both and actions[0].stage == actions[1].stage


def _started(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Starts sends and receives: those of an exchange as one batch, others each by itself."""
    if len({each.op for each in operations}) > 1:
        return dist.batch_isend_irecv([*operations])
    return [each.op(each.tensor, each.peer, group=each.group) for each in operations]
