"""An asynchronous server: replicas push to common parameters and pull them, from threads of their owner's process.

A pull waits for the slowest replica as the bound on staleness says (`autopar.ir.meeting`), and never longer than a
given time. A meeting waits for all replicas that are left.

[Note: pulls that wait] The push for which a pull waits also answers it, before any further push. So replicas that all
wait for the slowest get the same parameters, and under staleness 0 the server is synchronous. If each waiting thread
pulled when it wakes up, another might have pushed again by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from autopar.ir.order import Order
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.server_table import ServerTable


class Server:
    """The common parameters, for one caller at a time.

    Args:
        table: the common parameters and the clocks of the replicas.
        wait_seconds: time that a replica waits for the others; an attribute as well.
    """

    def __init__(self, table: ServerTable, wait_seconds: float) -> None:
        self._table, self.wait_seconds = table, wait_seconds
        self._changed = threading.Condition()
        # Replicas that wait for a pull, and for a meeting, each with what takes the parameters.
        self._pulls: dict[int, ExchangeBuffer] = {}
        self._meeting: dict[int, ExchangeBuffer] = {}
        self._new: ExchangeBuffer | None = None  # what the next meeting takes as the common parameters
        self._failure = ""  # why nobody gets an answer any more
        self._under_way: set[int] = set()  # replicas of other processes whose answer was not sent yet
        # Nobody can come to a meeting before it has the order of the last one.
        self._meetings, self._order = 0, Order(table.meeting.replicas, ())

    @property
    def nbytes(self) -> int:
        """Bytes of the common parameters."""
        return self._table.nbytes

    def exchange(self, replica: int, steps: int, parcel: ExchangeBuffer) -> None:
        """A push of a replica, and its pull as soon as the bound allows.

        Raises TimeoutError naming who is awaited; after one wait in vain every call raises the same.

        Args:
            replica: number of the replica.
            steps: number of its steps since its last pull.
            parcel: its difference over these steps; afterwards the common parameters.
        """
        with self._changed:
            self._check(replica)
            self._table.push(replica, steps, parcel)
            self._pulls[replica] = parcel
            self._answer()
            self._wait(replica, lambda: replica not in self._pulls, "A pull")

    def meet(self, replica: int, steps: int, parcel: ExchangeBuffer) -> Order:
        """A replica's last push, if it has steps since its pull, and a pull of all replicas at once.

        Returns the events since the last meeting. Raises TimeoutError naming who did not come.
        """
        with self._changed:
            self._check(replica)
            if steps:
                self._table.push(replica, steps, parcel)
            return self._meet(replica, parcel)

    def begin(self, replica: int, parcel: ExchangeBuffer) -> None:
        """Synchronises all replicas on the parameters in the owner's buffer; raises as `meet`.

        They are so from the meeting on: until then others may still push differences to the old ones.
        """
        with self._changed:
            self._check(replica)
            if replica == self._table.meeting.owner:
                self._new = parcel
            self._meet(replica, parcel)

    def end(self, replica: int) -> None:
        """Goes on without a replica."""
        with self._changed:
            self._meeting.pop(replica, None)
            self._pulls.pop(replica, None)
            self._under_way.discard(replica)
            self._table.end(replica)
            self._answer()
            self._changed.notify_all()

    def has_sent(self, replica: int) -> None:
        """Notes that a replica of another process has its answer."""
        with self._changed:
            self._under_way.discard(replica)
            self._changed.notify_all()

    def let_answers_go(self, seconds: float) -> None:
        """Waits until every answer that was given is also sent, for at most this many seconds.

        A replica with its answer may ask again at once. Nobody waits here for the answer to that.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, seconds)

    def _check(self, replica: int) -> None:
        """Raises TimeoutError if a wait was in vain; called with the lock."""
        if self._failure:
            self._send_to([replica])
            raise TimeoutError(self._failure)

    def _meet(self, replica: int, parcel: ExchangeBuffer) -> Order:
        """Waits for a meeting and takes part in it; called with the lock."""
        number = self._meetings
        self._meeting[replica] = parcel
        self._table.meeting_of.add(replica)
        self._answer()
        self._wait(replica, lambda: self._meetings > number, "A meeting")
        return self._order

    def _answer(self) -> None:
        """Answers all that need not wait any more, see [Note: pulls that wait]; called with the lock."""
        if self._failure:
            return
        for replica in [i for i in self._pulls if self._table.may_pull(i)]:
            self._table.pull(replica, self._pulls.pop(replica))
            self._send_to([replica])
        if self._table.left and self._table.meeting_of == self._table.left:
            if self._new is not None:
                self._table.begin(self._new)
                self._new = None
            self._order = self._table.meet(self._meeting)
            self._meetings += 1
            self._send_to(self._meeting)
            self._meeting.clear()
        self._changed.notify_all()

    def _send_to(self, replicas: Iterable[int]) -> None:
        """Notes answers that threads of other replicas now have to send; called with the lock."""
        self._under_way.update(i for i in replicas if i != self._table.meeting.owner)

    def _wait(self, replica: int, is_done: Callable[[], bool], what: str) -> None:
        """Waits for an answer; called with the lock. A wait that is in vain fails all others too, with one cause."""
        if not self._changed.wait_for(lambda: is_done() or self._failure, self.wait_seconds):
            self._failure = self._in_vain(replica, what)
            self._send_to({*self._pulls, *self._meeting})
            self._changed.notify_all()
        if not is_done():
            self._pulls.pop(replica, None)
            self._meeting.pop(replica, None)
            self._table.meeting_of.discard(replica)
            raise TimeoutError(self._failure)

    def _in_vain(self, replica: int, what: str) -> str:
        table, staleness = self._table, self._table.meeting.staleness
        slowest = table.slowest
        assert slowest is not None, "somebody is awaited"
        return (
            f"{what} of replica {replica}, which has pushed {table.clock(replica)} times since the last meeting, "
            f"waited {self.wait_seconds:g} s for replica {slowest}, which has pushed {table.clock(slowest)} times; a "
            f"replica may be {staleness} ahead"
        )
