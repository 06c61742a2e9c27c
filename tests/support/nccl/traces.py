"""What one rank asks of NCCL, in the order in which its host asks it: the events of a trace.

`recording` writes traces of a run, `rules` judges them, and `parse` reads short ones that a test writes by hand.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """One operation of a process group.

    Attributes:
        group: name of the group.
        members: the ranks of the group, in order.
        kind: "all_reduce", "send", "recv" and so on.
        elements: number of elements of its tensors.
        dtype: their dtype, such as "float32".
        bytes: bytes of its tensors.
        peer: the rank at the other end of a send or receive.
        detail: what all members have to give alike: a root, a reduction. For an all-to-all: rows sent, rows received.
        is_contiguous: whether all of its tensors are.
        where: lines of autopar that asked for it.
    """

    group: str
    members: tuple[int, ...]
    kind: str
    elements: int
    dtype: str = "float32"
    bytes: int = 0
    peer: int | None = None
    detail: Hashable = None
    is_contiguous: bool = True
    where: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer is not None

    def __str__(self) -> str:
        other = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} {self.peer}"
        return f"{self.kind}{other} of {self.elements} {self.dtype} on group {self.group}"


class Batch(NamedTuple):
    """Sends and receives that start and end as one operation."""

    calls: tuple[Call, ...]


class Wait(NamedTuple):
    """The rank's computation waits for an operation, the event of this number in the trace."""

    event: int


class Compute(NamedTuple):
    """The rank computes for so long."""

    seconds: float


class Sync(NamedTuple):
    """The host waits until the device has done all that it was given so far."""

    what: str
    where: str = ""


class NewGroup(NamedTuple):
    """A call of `new_group`."""

    ranks: tuple[int, ...]


class Mark(NamedTuple):
    """A place in the program that a test names."""

    name: str


Event = Call | Batch | Wait | Compute | Sync | NewGroup | Mark
Trace = Sequence[Event]
Traces = Mapping[int, Trace]  # by rank; ranks whose traces are missing are taken to do their part


def calls_of(event: Event) -> tuple[Call, ...]:
    """The operations of an event."""
    return (event,) if isinstance(event, Call) else event.calls if isinstance(event, Batch) else ()


def between(trace: Trace, begin: str, end: str) -> Trace:
    """The events between two marks."""
    return trace[trace.index(Mark(begin)) + 1 : trace.index(Mark(end))]


_WORD = re.compile(
    r"(?P<kind>[a-z_]+)(?:(?P<arrow>[<>])(?P<peer>\d+))?(?:@(?P<group>\w+))?(?:\*(?P<elements>\d+))?"
    r"(?::(?P<dtype>\w+))?(?:=(?P<detail>\S+))?"
)


def parse(text: str, members: Sequence[int]) -> list[Event]:
    """The trace that a line says, such as `send>1*8 wait sync all_reduce@b:bfloat16=SUM`.

    A word is an operation with its peer, group, elements, dtype and detail; `wait` for the operation before it, `sync`,
    `new_group=01` with the ranks as digits, or `[` and `]` around a batch. `strided_send>1` sends a tensor that is not
    contiguous, and `all_to_all=1,2/3,4` sends 1 and 2 rows and expects 3 and 4.
    """
    trace: list[Event] = []
    batch: list[Call] | None = None
    for word in text.split():
        if word == "[":
            batch = []
        elif word == "]":
            trace.append(Batch(tuple(batch or ())))
            batch = None
        elif batch is not None:
            batch.append(_call(word, members))
        elif word == "wait":
            trace.append(Wait(len(trace) - 1))
        elif word == "sync":
            trace.append(Sync("item"))
        elif word.startswith("new_group="):
            trace.append(NewGroup(tuple(map(int, word.partition("=")[2]))))
        else:
            trace.append(_call(word, members))
    return trace


def _call(word: str, members: Sequence[int]) -> Call:
    found = _WORD.fullmatch(word)
    assert found is not None, f"no operation is written as {word!r}"
    kind, peer, detail = found["kind"], found["peer"], found["detail"]
    if kind == "all_to_all" and detail:
        sent, received = (tuple(map(int, part.split(","))) for part in detail.split("/"))
        detail = sent, received
    return Call(
        found["group"] or "world",
        tuple(members),
        kind.removeprefix("strided_"),
        int(found["elements"] or 8),
        dtype=found["dtype"] or "float32",
        peer=None if peer is None else int(peer),
        detail=detail,
        is_contiguous=not kind.startswith("strided_"),
    )
