"""The common parameters of replicas that push and pull by turns, as their owner keeps them (`autopar.ir.meeting`).

Nothing here waits or communicates: `autopar.runtime.replicas.server` does, and `autopar.proof.served` runs a table in
one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.ir import Meeting
from autopar.ir.order import MEET, Order, ServerEvent
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer


class ServerTable:
    """Common parameters, and the clock of each replica: the number of its pushes since the last meeting.

    Args:
        meeting: the replicas and the bound on staleness.
        values: name -> tensor on the host; the table writes into it, but for formats of less than 32 bits, of which
            it keeps copies in float32: a difference divided by the number of replicas may be too small to change a
            number of 16 bits, and many of them would be lost one by one.

    Attributes:
        left: indices of the replicas that still take part.
        meeting_of: indices of the replicas that wait for a meeting of all that are left.
    """

    def __init__(self, meeting: Meeting, values: Mapping[str, Tensor]) -> None:
        self.meeting = meeting
        self._values = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in values.items()}
        self.left = set(range(meeting.replicas))
        self.meeting_of: set[int] = set()
        self._clocks = [0] * meeting.replicas
        self._events: list[ServerEvent] = []
        # Number of pushes when each row changed last, and when each replica pulled last.
        self._changed = {name: torch.zeros(len(x), dtype=torch.int64) for name, x in values.items() if x.ndim > 1}
        self._pushes, self._seen = 0, [0] * meeting.replicas

    @property
    def nbytes(self) -> int:
        """Bytes of the common parameters; 8 more for each row of one that has rows are not counted."""
        return sum(x.nbytes for x in self._values.values())

    @property
    def slowest(self) -> int | None:
        """Number of the replica with the fewest pushes among those that will push again; None for no such replica."""
        pushing = self.left - self.meeting_of
        return min(pushing, key=self.clock, default=None)

    def clock(self, replica: int) -> int:
        """Number of pushes of a replica since the last meeting."""
        return self._clocks[replica]

    @torch.no_grad()
    def push(self, replica: int, steps: int, changes: ExchangeBuffer) -> None:
        """Adds a replica's difference over this many steps, which is used up, divided by the number of replicas."""
        self._pushes += 1
        for name, x in self._values.items():
            rows, change = changes.rows.get(name), changes.tensors[name]
            if rows is None:
                x.add_(change.to(x.dtype).div_(self.meeting.replicas))
            else:
                x[rows] += change[rows].to(x.dtype).div_(self.meeting.replicas)
            if name in self._changed:
                self._changed[name][slice(None) if rows is None else rows] = self._pushes
        self._clocks[replica] += 1
        self._events.append(ServerEvent("push", replica, steps))

    def may_pull(self, replica: int) -> bool:
        """Whether no replica that will push again is further behind this one than the bound on staleness allows."""
        slowest = self.slowest
        assert slowest is not None, "who asks will push again"
        return self.clock(replica) - self.clock(slowest) <= self.meeting.staleness

    def pull(self, replica: int, into: ExchangeBuffer) -> None:
        """Copies the common parameters for a replica; of some, rows that changed since its last pull alone."""
        self._copy(replica, into)
        self._events.append(ServerEvent("pull", replica))

    def end(self, replica: int) -> None:
        """Continues without a replica that ended or was lost; the differences that it pushed are kept."""
        if replica in self.left:
            self._events.append(ServerEvent("end", replica))
        self.left.discard(replica)
        self.meeting_of.discard(replica)

    def meet(self, into: Mapping[int, ExchangeBuffer]) -> Order:
        """Copies the common parameters for all replicas that are left; returns the events since the last meeting."""
        for replica, each in into.items():
            self._copy(replica, each)
        order = Order(self.meeting.replicas, (*self._events, MEET))
        gone = set(range(self.meeting.replicas)) - self.left
        self._events = [ServerEvent("end", replica) for replica in sorted(gone)]
        self._clocks = [0] * self.meeting.replicas
        self.meeting_of.clear()
        return order

    @torch.no_grad()
    def begin(self, values: ExchangeBuffer) -> None:
        """Takes new common parameters."""
        self._pushes += 1
        for name, x in self._values.items():
            x.copy_(values.tensors[name])
        for each in self._changed.values():
            each.fill_(self._pushes)

    @torch.no_grad()
    def _copy(self, replica: int, into: ExchangeBuffer) -> None:
        into.rows.clear()
        for name, x in self._values.items():
            into.tensors[name].copy_(x)
            if name in self._changed:
                into.keep_rows(name, self._changed[name] > self._seen[replica])
        self._seen[replica] = self._pushes
