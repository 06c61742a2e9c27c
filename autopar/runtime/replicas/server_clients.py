"""Clients of an asynchronous server: of one in the same process, or of one on another rank over a connection.

Messages over a connection; their tensors are in its exchange buffer:

    push n     the difference of n steps; answered by `values`
    meet n     the same before a meeting, n may be 0; answered by `values`, then by `order` with its text
    begin      the replica's parameters; answered by `values`
    end        the replica's program is over; not answered
    error      in place of an answer, with its text
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from autopar.errors import PeerError
from autopar.ir.order import Order
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.server import Server
from autopar.runtime.replicas.server_connections import LATER_SECONDS, Connection, ServerMessage

log = logging.getLogger("autopar")

_MOST_TEXT_BYTES = 64 * 2**20  # of an order, which names the replica of every push since the last meeting
_PUSH, _MEET, _BEGIN, _END, _VALUES, _ORDER, _ERROR = b"p", b"m", b"b", b"q", b"v", b"o", b"e"


class ServerClient(Protocol):
    """A replica's access to the server.

    Every method sends the tensors in the replica's exchange buffer, and leaves the common parameters there. Each raises
    PeerError where another rank died or hangs.

    Attributes:
        parcel: buffer of the tensors that the replica sends and receives.
        sent_bytes: number of bytes that this rank has sent to others.
    """

    parcel: ExchangeBuffer

    @property
    def sent_bytes(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps for the server and for messages."""

    def exchange(self, steps: int) -> None:
        """Pushes the difference of this number of steps, and pulls the common parameters."""

    def meet(self, steps: int) -> Order:
        """Pushes as `exchange` does, then pulls at the same time as all other replicas."""

    def begin(self) -> None:
        """Synchronises all replicas; from then on the owner's parameters are the common ones."""

    def close(self) -> None:
        """Tells the server that this replica takes no more steps."""


class LocalClient:
    """The client on the server's own rank, which also serves the other replicas: a thread for each, until it ends.

    Args:
        server: the common parameters.
        replica: number of the owner's replica.
        parcel: what this replica exchanges.
        lines: replica -> connection of the others.
    """

    def __init__(self, server: Server, replica: int, parcel: ExchangeBuffer, lines: Mapping[int, Connection]) -> None:
        self._server, self._replica, self._lines = server, replica, lines
        self.parcel = parcel
        for number, line in lines.items():
            threading.Thread(
                target=_serve, args=(server, number, line), daemon=True, name=f"autopar server {number}"
            ).start()

    @property
    def sent_bytes(self) -> int:
        return sum(line.sent_bytes for line in self._lines.values())

    def exchange(self, steps: int) -> None:
        with self._naming_failures():
            self._server.exchange(self._replica, steps, self.parcel)

    def meet(self, steps: int) -> Order:
        with self._naming_failures():
            order = self._server.meet(self._replica, steps, self.parcel)
        # This process may end after its last meeting, and large parameters take their time to go.
        self._server.let_answers_go(max(self._server.wait_seconds, LATER_SECONDS))
        return order

    def begin(self) -> None:
        with self._naming_failures():
            self._server.begin(self._replica, self.parcel)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Raises PeerError for a wait in vain, once the others, which wait in vain too, have been told so."""
        try:
            yield
        except TimeoutError as error:
            self._server.let_answers_go(LATER_SECONDS)
            raise lost(str(error)) from error

    @property
    def nbytes(self) -> int:
        parcels = [self.parcel, *(line.parcel for line in self._lines.values())]
        return self._server.nbytes + sum(each.nbytes for each in parcels)

    def close(self) -> None:
        """Lets the others have the answers that are under way, and ends the server."""
        try:
            self._server.end(self._replica)
            self._server.let_answers_go(LATER_SECONDS)
        finally:
            for line in self._lines.values():
                line.close()


class RemoteClient:
    """The client of a replica on another rank than the owner's.

    Args:
        line: the connection to the owner.
        owner: words for the owner, such as "rank 0".
        replicas: number of replicas.
    """

    def __init__(self, line: Connection, owner: str, replicas: int) -> None:
        self._line, self._owner, self._replicas = line, owner, replicas
        self.parcel = line.parcel

    @property
    def sent_bytes(self) -> int:
        return self._line.sent_bytes

    def exchange(self, steps: int) -> None:
        self._ask(_PUSH, steps, _VALUES)

    def meet(self, steps: int) -> Order:
        self._ask(_MEET, steps, _VALUES)
        return Order.parse(self._replicas, self._answer(_ORDER))

    def begin(self) -> None:
        self._ask(_BEGIN, 0, _VALUES)

    @property
    def nbytes(self) -> int:
        return self.parcel.nbytes

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the owner may be gone already
            self._line.send(_END, text="")
        self._line.close()

    def _ask(self, kind: bytes, number: int, answer: bytes) -> None:
        try:
            self._line.send(kind, number)
        except OSError as error:
            raise self._gone(error) from error
        self._answer(answer)

    def _answer(self, kind: bytes) -> str:
        try:
            found = self._line.receive(_VALUES, most_text_bytes=_MOST_TEXT_BYTES)
            if found.kind not in (kind, _ERROR):
                raise ConnectionAbortedError(f"it sent {found.kind!r} in place of {kind!r}")
        except OSError as error:
            raise self._gone(error) from error
        if found.kind == _ERROR:
            raise lost(found.text)
        return found.text

    def _gone(self, error: OSError) -> PeerError:
        return lost(
            f"{self._owner}, which has the common parameters, died, hangs or came to its end: {error}. Call "
            "model.meet() on every rank after the last step, so that the owner does not end before the others"
        )


def lost(text: str, *, collective: str = "exchange with the server") -> PeerError:
    """The error of a replica that the server, or another replica, does not answer."""
    return PeerError(f"{text}.", collective=collective, group="", reason=text)


def _serve(server: Server, replica: int, line: Connection) -> None:
    """Answers one replica until it ends; a thread runs this."""
    try:
        while _answered(server, replica, line):
            pass
    except OSError as error:
        if not line.is_closed:
            log.warning("Replica %d was lost; the others go on without it: %s", replica, error)
    finally:
        try:
            server.end(replica)
        finally:
            line.close()


def _answered(server: Server, replica: int, line: Connection) -> bool:
    """Answers a message; False for the last."""
    asked = line.receive(_PUSH + _MEET + _BEGIN)
    if asked.kind == _END:
        return False
    if asked.kind not in (_PUSH, _MEET, _BEGIN):
        raise ConnectionAbortedError(f"it asked for {asked.kind!r}, which does not exist")
    try:
        _answer(server, replica, asked, line)
    finally:
        server.has_sent(replica)
    return True


def _answer(server: Server, replica: int, asked: ServerMessage, line: Connection) -> None:
    order = None
    try:
        if asked.kind == _PUSH:
            server.exchange(replica, asked.number, line.parcel)
        elif asked.kind == _MEET:
            order = server.meet(replica, asked.number, line.parcel)
        else:
            server.begin(replica, line.parcel)
    except TimeoutError as error:
        line.send(_ERROR, text=str(error))
        return
    line.send(_VALUES)
    if order is not None:
        line.send(_ORDER, text=str(order))
