"""NCCL's rules, checked on the traces of all ranks: what it would refuse, mix up or wait for without end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest

from tests.support.nccl.launches import Communicator, Launch, Launches, Mode, launches_of
from tests.support.nccl.traces import Call, NewGroup, Traces, calls_of
from tests.support.nccl.waiting import endless, longest_seconds

_DTYPES = frozenset(
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int8",
        "uint8",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
)


def violations(traces: Traces, mode: Mode) -> list[str]:
    """What NCCL does not take of these ranks' operations, in words; none where all is legal."""
    launches, found = _matched(traces, mode)
    return found or endless(traces, launches, mode)


def seconds(traces: Traces, mode: Mode, message_seconds: Callable[[Call], float]) -> float:
    """The time of a legal run in which nothing but messages and `Compute` takes time."""
    launches, found = _matched(traces, mode)
    assert not found, found
    return longest_seconds(traces, launches, mode, message_seconds)


def _matched(traces: Traces, mode: Mode) -> tuple[Launches, list[str]]:
    """The operations with their mates on other ranks, and what is wrong whatever the order in time."""
    launches = launches_of(traces, mode)
    every = [each for own in launches.values() for each in own.values()]
    found = [*_groups(traces), *_operands(every), *_collectives(every, traces), *_messages(every, traces)]
    return launches, found


def _groups(traces: Traces) -> Iterator[str]:
    """All ranks make the same groups in the same order."""
    made = {r: [e.ranks for e in trace if isinstance(e, NewGroup)] for r, trace in traces.items()}
    first = min(made)
    for rank, own in made.items():
        if own != made[first]:
            yield f"new_group: rank {rank} makes the groups {own}, and rank {first} makes {made[first]}"


def _operands(launches: Sequence[Launch]) -> Iterator[str]:
    """Tensors are contiguous and of NCCL's dtypes, and nobody sends to itself or to a stranger."""
    for launch in launches:
        for call in launch.calls:
            if call.elements and call.dtype not in _DTYPES:
                yield f"dtype: {call.dtype} is none of NCCL's: {launch}"
            if not call.is_contiguous:
                yield f"strides: a tensor is not contiguous: {launch}"
            if call.is_message and call.peer not in {*call.members} - {launch.rank}:
                yield f"peer: {call.peer} is no other member of {call.members}: {launch}"


def _collectives(launches: Sequence[Launch], traces: Traces) -> Iterator[str]:
    """The members of a communicator run the same collectives in the same order; sets the mates of each."""
    by_communicator: dict[Communicator, dict[int, list[Launch]]] = defaultdict(lambda: defaultdict(list))
    for each in launches:
        if not each.calls[0].is_message:
            by_communicator[each.communicator][each.rank].append(each)
    for communicator, by_rank in by_communicator.items():
        members = [rank for rank in communicator.members if rank in traces]
        for number, line in enumerate(zip_longest(*(by_rank[rank] for rank in members))):
            words = _unlike(members, line)
            if words:
                yield f"collective {number} of group {communicator.group}: {words}"
                break
            for each in line:
                each.mates += [other for other in line if other is not each]


def _unlike(members: Sequence[int], line: Sequence[Launch | None]) -> str:
    """How the members' collectives differ; "" where they are one."""
    there = [each for each in line if each is not None]
    if len(there) < len(line):
        absent = [rank for rank, each in zip(members, line, strict=True) if each is None]
        return f"{there[0]}, and ranks {absent} run none"
    other = next((each for each in there if _shared(each.calls[0]) != _shared(there[0].calls[0])), None)
    if other is not None:
        return f"{there[0]} ({there[0].calls[0].detail}), but {other} ({other.calls[0].detail})"
    return _uneven(there) if there[0].calls[0].kind == "all_to_all" else ""


def _shared(call: Call) -> Hashable:
    """What all members of a collective have to ask alike."""
    uneven = call.kind == "all_to_all" and call.detail
    return call.kind, call.dtype, None if uneven else (call.elements, call.detail)


def _uneven(line: Sequence[Launch]) -> str:
    """How the rows that members send to each other differ from those that are expected; "" where they agree."""
    tables = [each.calls[0].detail for each in line]
    for i, (own, mine) in enumerate(zip(line, tables, strict=True)):
        for j, other in enumerate(tables):
            if mine and other and len(mine[0]) == len(line) and mine[0][j] != other[1][i]:
                return f"{own} sends {mine[0][j]} rows to place {j}, which expects {other[1][i]}"
    return ""


def _messages(launches: Sequence[Launch], traces: Traces) -> Iterator[str]:
    """Every send has a receive on the same communicator, alike in size; sets the mates of both."""
    ends: dict[tuple[Communicator, int, int], tuple[list, list]] = defaultdict(lambda: ([], []))
    for launch in launches:
        for call in launch.calls:
            if call.peer in traces and call.kind == "send":
                ends[launch.communicator, launch.rank, call.peer][0].append((launch, call))
            elif call.peer in traces and call.is_message:
                ends[launch.communicator, call.peer, launch.rank][1].append((launch, call))
    for (communicator, source, target), (sends, receives) in ends.items():
        if len(sends) != len(receives):
            yield (
                f"messages on {communicator.group}: rank {source} sends {len(sends)} to rank {target}, which receives "
                f"{len(receives)}, for example {(sends or receives)[-1][0]}"
            )
        for (one, sent), (other, received) in zip(sends, receives, strict=False):
            if (sent.elements, sent.dtype) != (received.elements, received.dtype):
                yield f"message: {one}, but {other}"
                break
            one.mates.append(other)
            other.mates.append(one)


def unlike_orders(traces: Traces) -> str:
    """The first operation that ranks of one stage ask in another order over all communicators; "" where none is.

    NCCL asks for one order where several communicators are busy at once (NCCL_LAUNCH_ORDER_IMPLICIT). Sizes have to be
    equal within a communicator, as `violations` judges; where parts are uneven, other lines may have other sizes.
    """
    orders = {rank: [_place(call) for e in trace for call in calls_of(e)] for rank, trace in traces.items()}
    first = min(orders)
    for rank, own in orders.items():
        for number, (mine, other) in enumerate(zip_longest(orders[first], own)):
            if mine != other:
                return f"operation {number}: {mine} on rank {first}, {other} on rank {rank}"
    return ""


def _place(call: Call) -> Hashable:
    """An operation with its group as others see it: the size, and the step from member to member."""
    step = call.members[1] - call.members[0] if len(call.members) > 1 else 0
    return call.kind, call.dtype, len(call.members), step
