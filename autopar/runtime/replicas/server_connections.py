"""The connections between an asynchronous server and the replicas on other ranks.

[Note: why sockets] A server waits for whoever comes first, without a limit while a replica computes; it has to notice
at once that one died, and to stop where its own process ends. A receive of Gloo ends only when the message comes or the
whole group is given up by a timeout, so that a waiting thread could not be ended. Hence each replica has a TCP
connection to the owner, over which only bytes of tensors and numbers go (`autopar.runtime.replicas.server_handshake`
makes it).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple, TypeVar

from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer

Buffer = TypeVar("Buffer", bound=bytearray | memoryview)
_HEAD = struct.Struct("!cqQ")  # kind, number, bytes of a text that follows
LATER_SECONDS = 10.0  # that an answer may take beyond the time for which the server waits for others


class ServerMessage(NamedTuple):
    """A message that came over a connection.

    Attributes:
        kind: one byte, such as b"p".
        number: a number that goes with it.
        text: a text that goes with it.
    """

    kind: bytes
    number: int
    text: str


class Connection:
    """One connection, used by one thread at each end.

    Raises ConnectionError where the other end is gone, and TimeoutError where it takes too long.

    Args:
        connection: the connected socket.
        parcel: buffer that holds the tensors of messages that have some.

    Attributes:
        sent_bytes: number of bytes sent so far.
        is_closed: whether this end has closed it.
    """

    def __init__(self, connection: socket.socket, parcel: ExchangeBuffer) -> None:
        self._socket, self.parcel = connection, parcel
        self.sent_bytes, self.is_closed = 0, False

    def send(self, kind: bytes, number: int = 0, text: str | None = None) -> None:
        """Sends a message with a text, or else with the tensors of the exchange buffer."""
        said = b"" if text is None else text.encode()
        self._write(_HEAD.pack(kind, number, len(said)) + said)
        for piece in self.parcel.pieces() if text is None else ():
            self._write(piece)

    def receive(self, with_tensors: bytes, *, most_text_bytes: int = 0) -> ServerMessage:
        """The next message; the tensors of those whose kind is in `with_tensors` are put into the parcel.

        Raises ConnectionError for a message that the other end cannot have meant, such as one with a longer text.
        """
        kind, number, size = _HEAD.unpack(read(self._socket, bytearray(_HEAD.size)))
        if size > most_text_bytes or number < 0:
            raise ConnectionAbortedError(
                f"the other end did not send a message of a server: number {number}, and a text of {size} bytes where "
                f"{most_text_bytes} are the most"
            )
        text = read(self._socket, bytearray(size)).decode(errors="replace")
        if kind in with_tensors:
            self.parcel.fill(lambda into: read(self._socket, into))
        return ServerMessage(kind, number, text)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent_bytes += len(data)  # before, so that who got the data finds them counted
        self._socket.sendall(data)

    def close(self) -> None:
        """Ends the connection; a thread that waits for it gets a ConnectionError."""
        self.is_closed = True
        with contextlib.suppress(OSError):  # it was not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read(connection: socket.socket, into: Buffer) -> Buffer:
    """Fills a buffer with received bytes; raises ConnectionError if the other end is gone."""
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed by its other end")
        view = view[count:]
    return into


def prepare(connection: socket.socket, seconds: float | None) -> None:
    """Sets the time that a message may take, and lets small messages go at once."""
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
