"""Pipeline schedules: for every rank the list of its actions, in order, as torch's schedules run them.

An action is written as in torch, with stage, kind and micro-batch: `2F0` is the forward of
micro-batch 0 on stage 2. The kinds are

    F, B              forward, backward
    I, W              the two halves of a backward: gradients of the inputs, gradients of the weights
    SEND_F, RECV_F send the stage's output to the next stage, receive its input from the previous one
    SEND_B, RECV_B send the gradient of its input to the previous stage, receive that of its output
    U              an update of the stage's parameters, after the backward of this micro-batch

Neighbouring stages on one rank send nothing. The simulation and the run use the same lists. `building_blocks` says what
a rank computes, for schedules of torch.distributed.pipelining the same as its classes; sends and receives are added
here. Schedules without a flush are 1F1B with updates between backwards (`autopar.pipeline.weight_stashing`).
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple, cast

from autopar.errors import PlanError
from autopar.ir.pipeline import PLACEMENTS, SPLIT, Pipeline
from autopar.pipeline.building_blocks import (
    Computation,
    RankPlace,
    dual_pipe_v,
    in_a_v,
    in_phases,
    in_rounds,
    v_half,
    v_min,
    zbv,
)

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "U"]


class Action(NamedTuple):
    """One action of a rank, such as the forward of a micro-batch on a stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = Sequence[Sequence[Action]]  # for every pipeline rank its actions, in order


class Timed(NamedTuple):
    """An action that takes time, and the arrival of a tensor that it waits for or causes.

    Attributes:
        action: the action.
        rank: rank that runs it.
        arrival: number of the arrival for which a computation waits, or which a send causes; 0 for none.
        link: ranks at both ends of a send's link; None for a computation.
    """

    action: Action
    rank: int
    arrival: int
    link: tuple[int, int] | None


# Direction of a send, and the step from its stage to the receiving one; direction that a computation waits for.
_SENDS: Mapping[Kind, tuple[str, int]] = {"SEND_F": ("forward", 1), "SEND_B": ("backward", -1)}
_COMPUTES: Mapping[Kind, str] = {"F": "forward", "B": "backward", "I": "backward", "W": "", "U": ""}


class ActionLists(tuple[tuple[Action, ...], ...]):
    """The actions of every pipeline rank, in order. Properties that are computed from them are cached."""

    @classmethod
    def of(cls, actions: Actions) -> ActionLists:
        """The actions as `ActionLists`; if they are `ActionLists` already, the same object, with its caches."""
        return actions if isinstance(actions, cls) else cls(map(tuple, actions))

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of every stage."""
        return {action.stage: rank for rank, each in enumerate(self) for action in each}

    @cached_property
    def in_order(self) -> tuple[Action, ...]:
        """All actions of all ranks, in an order in which each comes after all actions that it needs.

        A receive comes after its send, and a stage's forward after its receive (or after the forward of
        the previous stage, if it is on the same rank). Raises AssertionError with the actions that would wait forever.
        """
        rest = [deque(each) for each in self]
        order: list[Action] = []
        done: set[Action] = set()
        waiting: dict[Action, list[int]] = {}
        ready = deque(range(len(rest)))
        while ready:
            rank = ready.popleft()
            while rest[rank]:
                action = rest[rank][0]
                needs = _needs(action, self.rank_of)
                missing = next((each for each in needs if each not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                order.append(rest[rank].popleft())
                for result in _results(action):
                    done.add(result)
                    ready.extend(waiting.pop(result, ()))
        assert not waiting, _deadlock(waiting, rest)
        return tuple(order)

    @cached_property
    def timed(self) -> tuple[Timed, ...]:
        """The computations and sends of `in_order`. A receive takes no time; the action that needs it waits."""
        rank_of, found = self.rank_of, []
        numbers: dict[tuple[str, int, int], int] = {}  # what arrives -> number from 1 on
        for action in self.in_order:
            kind, stage, micro_batch = action
            if kind in _SENDS:
                direction, offset = _SENDS[kind]
                number = numbers[direction, stage + offset, micro_batch] = len(numbers) + 1
                link = rank_of[stage], rank_of[stage + offset]
                found.append(Timed(action, rank_of[stage], number, link))
            elif kind in _COMPUTES:
                number = numbers.get((_COMPUTES[kind], stage, micro_batch), 0)
                found.append(Timed(action, rank_of[stage], number, None))
        return tuple(found)


def _any_number(pipeline: Pipeline, micro_batches: int) -> str:
    return ""


def _as_many_as_stages(pipeline: Pipeline, micro_batches: int) -> str:
    if micro_batches >= pipeline.stages:
        return ""
    return (
        f"takes at least as many micro-batches as there are stages, but there are {micro_batches} "
        f"for {pipeline.stages} stages"
    )


def _equal_rounds(pipeline: Pipeline, micro_batches: int) -> str:
    rounds = max(1, micro_batches // pipeline.ranks)
    if micro_batches % rounds == 0:
        return ""
    return (
        f"runs {micro_batches} micro-batches on {pipeline.ranks} pipeline ranks in {rounds} rounds "
        f"({micro_batches} // {pipeline.ranks}), but {rounds} does not divide {micro_batches}"
    )


def _whole_groups(pipeline: Pipeline, micro_batches: int) -> str:
    if micro_batches % pipeline.stages == 0:
        return ""
    return (
        f"updates after every {pipeline.stages} micro-batches, as many as there are stages, but there are "
        f"{micro_batches}"
    )


class _Row(NamedTuple):
    """A schedule.

    Attributes:
        broken: function that names the rule which a number of micro-batches breaks, or "".
        computed: function from a rank to its computations, in order.
        exchanges: whether a rank sends a tensor and receives a gradient at once, see `waits_for_sends`.
    """

    broken: Callable[[Pipeline, int], str]
    computed: Callable[[RankPlace], Iterable[Computation]]
    exchanges: bool = False


def _all_forwards_first(place: RankPlace, *, last_first: bool = False) -> Iterator[Computation]:
    return in_rounds(place, ahead=place.chunks * place.micro_batches, last_first=last_first)


def _one_forward_one_backward(place: RankPlace) -> Iterator[Computation]:
    return in_rounds(place, ahead=place.to_last)


def _interleaved(place: RankPlace) -> Iterator[Computation]:
    size = _round_size(place)
    return in_rounds(place, ahead=(place.chunks - 1) * size + 2 * place.to_last, round_size=size)


def _zero_bubble(place: RankPlace) -> Iterator[Computation]:
    size = _round_size(place)
    return in_rounds(place, ahead=(place.chunks - 1) * size + place.to_last, round_size=size, behind=place.rank)


def _round_size(place: RankPlace) -> int:
    """Number of micro-batches that a chunk runs before the next one, where `_equal_rounds` holds."""
    return place.micro_batches // max(1, place.micro_batches // place.ranks)


def _zbv(place: RankPlace) -> Iterator[Computation]:
    enough = place._replace(micro_batches=max(place.micro_batches, 2 * place.ranks - 1))
    return in_phases(zbv(enough), place.micro_batches)


_1F1B = _Row(_as_many_as_stages, _one_forward_one_backward, exchanges=True)
_ROWS = {
    "gpipe": _Row(_any_number, _all_forwards_first),
    "1f1b": _1F1B,
    "interleaved": _Row(_equal_rounds, _interleaved),
    "looped-bfs": _Row(_any_number, functools.partial(_all_forwards_first, last_first=True)),
    "zb": _Row(_equal_rounds, _zero_bubble),
    "zbv": _Row(_any_number, _zbv),
    "dualpipev": _Row(_as_many_as_stages, lambda place: in_phases(dual_pipe_v(place), place.micro_batches)),
    "v-half": _Row(_any_number, lambda place: in_a_v(place, v_half(place))),
    "v-min": _Row(_any_number, lambda place: in_a_v(place, v_min(place))),
    "pipedream": _1F1B,
    "pipedream-sync": _1F1B,
    "2bw": _1F1B._replace(broken=_whole_groups),
}


def splits_backward(pipeline: Pipeline) -> bool:
    """Whether the schedule runs the two halves of a backward as separate actions."""
    return pipeline.schedule in SPLIT


def waits_for_sends(schedule: str) -> bool:
    """Whether a rank waits until a tensor that it sends has arrived: 1F1B exchanges a tensor and a gradient at once.

    Of two neighbours each sends while the other one does. NCCL would wait for ever in two sends one after the other.
    """
    return _ROWS[schedule].exchanges


def check_micro_batches(pipeline: Pipeline, micro_batches: int) -> None:
    """Raises PlanError if the pipeline's schedule cannot run this number of micro-batches."""
    if micro_batches < 1:
        raise PlanError(f"A pipeline runs at least one micro-batch, but {micro_batches} were asked for.")
    broken = _ROWS[pipeline.schedule].broken
    words = broken(pipeline, micro_batches)
    if words:
        below = (n for n in range(micro_batches - 1, 0, -1) if not broken(pipeline, n))
        above = (n for n in itertools.count(micro_batches + 1) if not broken(pipeline, n))
        numbers = " or ".join(str(n) for n in (next(below, None), next(above)) if n is not None)
        another = f", or the schedule {_unbounded(pipeline.schedule)}, which takes any number"
        raise PlanError(
            f"The schedule {pipeline.schedule} {words}. Take {numbers} micro-batches"
            f"{'' if pipeline.update_every else another}."
        )


def takes(pipeline: Pipeline, micro_batches: int) -> bool:
    """Whether the pipeline's schedule can run this number of micro-batches."""
    return micro_batches >= 1 and not _ROWS[pipeline.schedule].broken(pipeline, micro_batches)


def unbounded(pipeline: Pipeline) -> Pipeline:
    """The pipeline with the schedule of the same placement that takes any number of micro-batches."""
    return replace(pipeline, schedule=_unbounded(pipeline.schedule))


def fewest_micro_batches(pipeline: Pipeline) -> int:
    """The least number of micro-batches that the pipeline's schedule takes."""
    broken = _ROWS[pipeline.schedule].broken
    return next(n for n in itertools.count(1) if not broken(pipeline, n))


def _unbounded(schedule: str) -> str:
    """The schedule of the same placement that takes any number of micro-batches."""
    alike = (name for name in _ROWS if PLACEMENTS[name] == PLACEMENTS[schedule])
    return next(name for name in alike if _ROWS[name].broken is _any_number)


def actions(pipeline: Pipeline, micro_batches: int) -> ActionLists:
    """For every pipeline rank the actions of a step, in order.

    Raises PlanError if the schedule cannot run this number of micro-batches.
    """
    check_micro_batches(pipeline, micro_batches)
    return _actions(replace(pipeline, cuts=("",) * len(pipeline.cuts), position=0), micro_batches)


def computations(pipeline: Pipeline, micro_batches: int) -> Actions:
    """For every pipeline rank the forwards and backwards of `actions`, in order.

    Raises PlanError if the schedule cannot run this number of micro-batches.
    """
    check_micro_batches(pipeline, micro_batches)
    computed = _ROWS[pipeline.schedule].computed
    found = []
    for rank in range(pipeline.ranks):
        stages = pipeline.stages_of(rank)
        run = computed(RankPlace(rank, pipeline.ranks, pipeline.chunks, micro_batches))
        found.append([Action(cast(Kind, kind), stages[chunk], i) for kind, chunk, i in run])
    return found


# A search asks for the same lists many times. Lists of 200,000 actions, with their cached properties, take about 45 MB.
@functools.lru_cache(maxsize=12)
def _actions(pipeline: Pipeline, micro_batches: int) -> ActionLists:
    lists = computations(pipeline, micro_batches)
    rank_of = {stage: pipeline.rank_of(stage) for stage in range(pipeline.stages)}
    received = _received_when_used if PLACEMENTS[pipeline.schedule] == "one" else _received_when_sent
    return ActionLists(tuple(_with_updates(each, pipeline.update_every)) for each in received(lists, rank_of))


def _received_when_used(lists: Actions, rank_of: Mapping[int, int]) -> Iterator[Iterator[Action]]:
    """The lists with sends and receives, each receive before the computation that needs it."""
    return (_with_receives(own, rank_of) for own in lists)


def _with_receives(own: Iterable[Action], rank_of: Mapping[int, int]) -> Iterator[Action]:
    for action in own:
        yield from (each for each in _needs(action, rank_of) if each.kind in ("RECV_F", "RECV_B"))
        yield action
        yield from itertools.islice(_transfer(action, rank_of), 1)


def _received_when_sent(lists: Actions, rank_of: Mapping[int, int]) -> list[list[Action]]:
    """The lists with sends and receives, each receive where its rank stands when the other one sends.

    Ranks take turns, and run a computation a turn if they have what it needs.
    """
    rest, found = [deque(own) for own in lists], [list[Action]() for _ in lists]
    done = set[Action]()
    while any(rest):
        count = len(done)
        for rank, own in enumerate(rest):
            if own and all(each in done for each in _needs(own[0], rank_of)):
                action = own.popleft()
                run = [action, *_transfer(action, rank_of)]
                found[rank] += run[:2]
                for receive in run[2:]:
                    found[rank_of[receive.stage]].append(receive)
                done.update(*map(_results, run))
        assert len(done) > count, _deadlock({own[0]: [rank] for rank, own in enumerate(rest) if own}, rest)
    return found


def _transfer(action: Action, rank_of: Mapping[int, int]) -> Iterator[Action]:
    """The send of a computation's result, and its receive; nothing if the result stays on the rank."""
    kind, stage, micro_batch = action
    if kind == "W":
        return
    send, receive, target = ("SEND_F", "RECV_F", stage + 1) if kind == "F" else ("SEND_B", "RECV_B", stage - 1)
    if target in rank_of and rank_of[target] != rank_of[stage]:
        yield Action(cast(Kind, send), stage, micro_batch)
        yield Action(cast(Kind, receive), target, micro_batch)


def _with_updates(own: Iterable[Action], every: int) -> Iterator[Action]:
    """A rank's actions with an update after the last backward of every group of this many micro-batches."""
    for action in own:
        yield action
        if every and action.kind == "B" and (action.micro_batch + 1) % every == 0:
            yield action._replace(kind="U")


def _results(action: Action) -> tuple[Action, ...]:
    """The actions that are done after an action: a whole backward (B) also does its first half (I)."""
    kind, stage, micro_batch = action
    return (action, Action("I", stage, micro_batch)) if kind == "B" else (action,)


def _needs(action: Action, rank_of: Mapping[int, int]) -> Iterator[Action]:
    """The actions that must be done before an action, on its own rank or, for a receive, on another one."""
    kind, stage, number = action
    if kind == "F" and stage > 0:
        local = rank_of[stage - 1] == rank_of[stage]
        yield Action("F", stage - 1, number) if local else Action("RECV_F", stage, number)
    elif kind in ("B", "I"):
        yield Action("F", stage, number)
        if stage + 1 in rank_of:
            local = rank_of[stage + 1] == rank_of[stage]
            yield Action("I", stage + 1, number) if local else Action("RECV_B", stage, number)
    elif kind in ("W", "SEND_B", "U"):
        yield Action("I", stage, number)
    elif kind == "SEND_F":
        yield Action("F", stage, number)
    elif kind == "RECV_F":
        yield Action("SEND_F", stage - 1, number)
    elif kind == "RECV_B":
        yield Action("SEND_B", stage + 1, number)


def _deadlock(waiting: Mapping[Action, list[int]], rest: Sequence[Sequence[Action]]) -> str:
    stuck = (f"rank {rank} at {rest[rank][0]} for {missing}" for missing, ranks in waiting.items() for rank in ranks)
    return f"these actions wait for ever: {', '.join(stuck)}"
