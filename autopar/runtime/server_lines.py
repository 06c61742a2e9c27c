"""The connections between an asynchronous server and the replicas on other ranks.

[Note: why sockets] A server waits for whoever comes first, without a limit while a replica computes; it has to notice
at once that one died, and to stop where its own process ends. A receive of Gloo ends only when the message comes or the
whole group is given up by a timeout, so that a waiting thread could not be ended. Hence each replica has a TCP
connection to the owner, over which only bytes of tensors and numbers go. The process group tells the ranks the owner's
address, and a secret with which a connection has to begin.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from autopar.runtime.parcel import Parcel

Buffer = TypeVar("Buffer", bound=bytearray | memoryview)
_HEAD = struct.Struct("!cqQ")  # kind, number, bytes of a text that follows
_SECRET_BYTES = 16
_GREETING = struct.Struct(f"!{_SECRET_BYTES}sI")  # the secret, number of the replica
_TRY_SECONDS = 5.0  # for one of the names of the owner's machine
LATER_SECONDS = (
    10.0  # that an answer may take beyond the time for which the server waits for others
)


class ServerMessage(NamedTuple):
    """What came over a connection.

    Attributes:
        kind: one byte, such as b"p".
        number: a number that goes with it.
        text: a text that goes with it.
    """

    kind: bytes
    number: int
    text: str


class Line:
    """One connection, used by one thread at each end.

    Raises ConnectionError where the other end is gone, and TimeoutError where it takes too long.

    Args:
        connection: the connected socket.
        parcel: buffer that holds the tensors of messages that have some.

    Attributes:
        sent_bytes: number of bytes sent so far.
        is_closed: whether this end has closed it.
    """

    def __init__(self, connection: socket.socket, parcel: Parcel) -> None:
        self._socket, self.parcel = connection, parcel
        self.sent_bytes, self.is_closed = 0, False

    def send(self, kind: bytes, number: int = 0, text: str | None = None) -> None:
        """Sends a message with a text, or else with the tensors of the parcel."""
        said = b"" if text is None else text.encode()
        self._write(_HEAD.pack(kind, number, len(said)) + said)
        for piece in self.parcel.pieces() if text is None else ():
            self._write(piece)

    def receive(self, with_tensors: bytes) -> ServerMessage:
        """The next message; the tensors of those whose kind is in `with_tensors` are put into the parcel."""
        kind, number, size = _HEAD.unpack(_read(self._socket, bytearray(_HEAD.size)))
        text = _read(self._socket, bytearray(size)).decode()
        if kind in with_tensors:
            self.parcel.fill(lambda into: _read(self._socket, into))
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


class Address(NamedTuple):
    """Where the owner listens.

    Attributes:
        hosts: names and numbers of its machine, the most likely to work first.
        port: TCP port.
        secret: what a connection begins with.
    """

    hosts: tuple[str, ...]
    port: int
    secret: bytes


class Listener:
    """The owner's end, while the other replicas connect."""

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._socket = socket.create_server(("", 0))
        self.address = Address(
            _own_hosts(), self._socket.getsockname()[1], secrets.token_bytes(_SECRET_BYTES)
        )

    def accept(self, replicas: Sequence[int], seconds: float) -> dict[int, socket.socket]:
        """The connections of these replicas; raises TimeoutError where one does not come in time."""
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + seconds
        with self._socket:
            while missing := set(replicas) - set(found):
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    raise TimeoutError(
                        f"replicas {sorted(missing)} did not connect within {seconds:g} s"
                    ) from None
                left = max(end - time.monotonic(), 1e-3)
                replica = self._greeted(connection, min(left, _TRY_SECONDS))
                if replica not in replicas:
                    connection.close()
                    continue
                if replica in found:  # it has given up the earlier one, and tried another name
                    found[replica].close()
                found[replica] = connection
        return found

    def _greeted(self, connection: socket.socket, seconds: float) -> int:
        """The number that a connection begins with; -1 for one that is lost or does not know the secret."""
        connection.settimeout(seconds)
        try:
            secret, replica = _GREETING.unpack(_read(connection, bytearray(_GREETING.size)))
            if not hmac.compare_digest(secret, self.address.secret):
                return -1
            connection.sendall(secret)
            prepare(connection, None)
        except OSError:
            return -1
        return int(replica)


def connect(address: Address, replica: int, seconds: float) -> socket.socket:
    """A connection to the owner; raises ConnectionError naming what was tried.

    Args:
        address: where the owner listens.
        replica: number of this replica.
        seconds: time that a message may take, the owner's greeting too, which greets one replica after another.
    """
    tried = []
    for host in address.hosts:
        try:
            connection = socket.create_connection((host, address.port), timeout=_TRY_SECONDS)
        except OSError as error:
            tried.append(f"{host} ({error})")
            continue
        try:
            prepare(connection, seconds)
            connection.sendall(_GREETING.pack(address.secret, replica))
            if _read(connection, bytearray(_SECRET_BYTES)) == address.secret:
                return connection
            tried.append(f"{host} (another program)")
        except OSError as error:
            tried.append(f"{host} ({error})")
        connection.close()
    raise ConnectionError(
        f"no address of the owner's machine could be reached at port {address.port}: {', '.join(tried)}"
    )


def _read(connection: socket.socket, into: Buffer) -> Buffer:
    """Fills a buffer with what comes; raises ConnectionError where the other end is gone."""
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


def _own_hosts() -> tuple[str, ...]:
    """Names under which other ranks may reach this machine; the last works for ranks of the same machine."""
    name = socket.gethostname()
    found = [name, socket.getfqdn()]
    with contextlib.suppress(OSError):  # the name may be known to nobody
        found += [str(each[4][0]) for each in socket.getaddrinfo(name, None)]
    if os.environ.get("RANK") == "0" and "MASTER_ADDR" in os.environ:
        found.append(os.environ["MASTER_ADDR"])
    return tuple(dict.fromkeys([*found, "127.0.0.1"]))
