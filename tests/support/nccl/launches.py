"""The operations of a trace on their communicators.

There are two modes, after how torch makes communicators:

    lazy   without a `device_id`: a send or receive outside of a batch has a communicator of its two ranks, all else
           that of its group. The first use makes it: every host stays there until those of all members have come.
    eager  with a `device_id`: all of a group has the group's communicator, which is there from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.support.nccl.traces import Batch, Call, Traces, calls_of

Mode = Literal["lazy", "eager"]
MODES: tuple[Mode, ...] = ("lazy", "eager")


class Communicator(NamedTuple):
    """A communicator: its group, and its members."""

    group: str
    members: tuple[int, ...]


@dataclass(eq=False)
class Launch:
    """An operation on a communicator: one call, or a batch of messages.

    Attributes:
        rank: the rank that asks for it.
        event: its place in the trace.
        communicator: where it runs.
        calls: what it does.
        mates: operations of other ranks that must have begun before it ends.
    """

    rank: int
    event: int
    communicator: Communicator
    calls: tuple[Call, ...]
    mates: list[Launch] = field(default_factory=list)

    def __str__(self) -> str:
        where = self.calls[0].where
        return f"rank {self.rank}: {' and '.join(map(str, self.calls))}{where and f' at {where}'}"


Launches = Mapping[int, Mapping[int, Launch]]  # rank -> number of the event -> operation


def launches_of(traces: Traces, mode: Mode) -> Launches:
    """The operations of every rank, with their communicators."""
    return {
        rank: {
            i: Launch(rank, i, _communicator(event, rank, mode), calls)
            for i, event in enumerate(trace)
            if (calls := calls_of(event))
        }
        for rank, trace in traces.items()
    }


def _communicator(event: object, rank: int, mode: Mode) -> Communicator:
    if isinstance(event, Batch):
        return Communicator(event.calls[0].group, event.calls[0].members)
    assert isinstance(event, Call), event
    if event.peer is None or mode == "eager":
        return Communicator(event.group, event.members)
    low, high = sorted((rank, event.peer))
    return Communicator(f"{event.group} for {low} and {high}", (low, high))
