"""How replicas connect to an asynchronous server: where the owner listens, and how both ends prove who they are.

[Note: where the owner listens] Where all ranks share a machine, the owner listens on the loopback address alone, which
no other machine reaches. Else it listens on the one address from which it reaches a rank of another machine.

[Note: greeting] The process group tells the ranks a secret, which no connection ever carries. Each end sends random
bytes, and the other answers with their HMAC under the secret (RFC 2104), as `multiprocessing.connection` does. Each
direction has a word of its own in the HMAC, so that an answer cannot be sent back as one's own:

    owner      its random bytes
    replica    number, its random bytes, HMAC("replica", number, both random bytes)
    owner      HMAC("owner", number, both random bytes)

What follows is neither encrypted nor signed.

[Note: strangers at the door] Anyone who reaches the port may connect. The owner hears all connections side by side and
reads no more from one than a greeting has. One that does not greet in time is closed; where too many wait, so is the
one that has waited longest, since a replica greets at once. So a stranger delays no replica.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autopar.runtime.replicas.server_connections import prepare, read

LOOPBACK = "127.0.0.1"
_RANDOM_BYTES = _SECRET_BYTES = 32
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_GREETING = struct.Struct(f"!I{_RANDOM_BYTES}s{_DIGEST_BYTES}s")  # see [Note: greeting]
_NUMBER = struct.Struct("!I")
_TRY_SECONDS = 5.0  # from the connection to the end of its greeting
_MOST_WAITING = 64  # connections that have not greeted, besides one for each replica
_ANY_PORT = 9  # a datagram socket is connected to it, and sends nothing
_ELSEWHERE = "192.0.2.1"  # an address of no machine (RFC 5737); the way to it is the default route


class Machine(NamedTuple):
    """Where a rank runs, as the others are told.

    Attributes:
        name: name of the machine and of its network, the same on ranks that reach each other by the loopback address.
        host: address from which the rank reaches the machine of the process group's store.
    """

    name: str
    host: str

    @classmethod
    def here(cls, store_host: str) -> Machine:
        """The machine of this process.

        Args:
            store_host: name of the machine that keeps the process group's store; "" where it is not known.
        """
        # Processes of one machine may have networks of their own, and machines may have equal names.
        start = Path("/proc/sys/kernel/random/boot_id")
        network = Path("/proc/self/ns/net")
        parts = [socket.gethostname(), start.read_text().strip() if start.exists() else ""]
        parts.append(os.readlink(network) if network.exists() else "")
        return cls(" ".join(parts), _host_towards(store_host or _ELSEWHERE))


def host_of_owner(machines: Sequence[Machine], owner: int, store_host: str) -> str:
    """The address on which the owner listens, see [Note: where the owner listens]; called on the owner.

    Args:
        machines: machine of every rank.
        owner: number of the owner's rank.
        store_host: name of the machine that keeps the process group's store; "" where it is not known.
    """
    others = [each.host for each in machines if each.name != machines[owner].name]
    if not others:
        return LOOPBACK
    # Where the store's name means this machine, the way to it is the loopback address; other ranks say another.
    ways = (_host_towards(each) for each in (*others, store_host or _ELSEWHERE))
    return next((host for host in ways if not _is_loopback(host)), LOOPBACK)


def _host_towards(name: str) -> str:
    """The address of this machine from which it reaches another, without a message; loopback if there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return LOOPBACK


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


class Address(NamedTuple):
    """Where the owner listens.

    Attributes:
        host: address of its machine.
        port: TCP port.
        secret: what both ends of a connection have to know.
    """

    host: str
    port: int
    secret: bytes


class Listener:
    """The owner's end, while the other replicas connect.

    Args:
        host: address of this machine to listen on.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        port = self._socket.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(_SECRET_BYTES))

    def accept(self, replicas: Sequence[int], seconds: float) -> dict[int, socket.socket]:
        """The connections of these replicas; raises TimeoutError where one does not come in time."""
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + seconds
        with self._socket, _Waiting(self._socket, len(replicas) + _MOST_WAITING) as waiting:
            while missing := set(replicas) - set(found):
                if time.monotonic() >= end:
                    raise TimeoutError(f"replicas {sorted(missing)} did not connect within {seconds:g} s")
                for guest in waiting.greeted(end):
                    replica = self._admitted(guest, replicas)
                    if replica in found:  # it has given up the earlier one
                        found[replica].close()
                    if replica is not None:
                        found[replica] = guest.connection
        return found

    def _admitted(self, guest: _Guest, replicas: Sequence[int]) -> int | None:
        """The number of the replica; None, and a closed connection, for one that does not know the secret."""
        replica, other, proof = _GREETING.unpack(guest.heard)
        wanted = _proof(self.address, b"replica", replica, guest.own + other)
        with contextlib.suppress(OSError):  # it is gone again
            if hmac.compare_digest(proof, wanted) and replica in replicas:
                guest.connection.sendall(_proof(self.address, b"owner", replica, guest.own + other))
                prepare(guest.connection, None)
                return int(replica)
        guest.connection.close()
        return None


class _Guest:
    """A connection that has not said all of its greeting; raises OSError where it is gone.

    Args:
        connection: the connection, which never makes this thread wait.

    Attributes:
        own: random bytes that were sent to it.
        heard: bytes of its greeting so far.
        end: time at which it is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.heard = connection, bytearray()
        self.own, self.end = secrets.token_bytes(_RANDOM_BYTES), time.monotonic() + _TRY_SECONDS
        connection.setblocking(False)
        connection.sendall(self.own)

    def has_greeted(self) -> bool:
        """Takes what has come, and returns whether that is a whole greeting."""
        piece = self.connection.recv(_GREETING.size - len(self.heard))
        if not piece:
            raise ConnectionResetError("the connection was closed by its other end")
        self.heard += piece
        return len(self.heard) == _GREETING.size


class _Waiting:
    """Connections that have not greeted, see [Note: strangers at the door].

    Args:
        door: the listening socket.
        most: number of connections that may wait.
    """

    def __init__(self, door: socket.socket, most: int) -> None:
        self._door, self._most = door, most
        self._guests: dict[socket.socket, _Guest] = {}  # the first has waited longest
        self._selector = selectors.DefaultSelector()
        door.setblocking(False)
        self._selector.register(door, selectors.EVENT_READ)

    def __enter__(self) -> _Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._guests):
            self._close(connection)
        self._selector.close()

    def greeted(self, end: float) -> Iterator[_Guest]:
        """Waits for connections or bytes, until a time at most; yields those that have greeted."""
        ends = (guest.end for guest in self._guests.values())
        ready = self._selector.select(max(min([end, *ends]) - time.monotonic(), 0))
        for key, _ in ready:
            if key.fileobj is self._door:
                self._admit()
            elif (guest := self._heard(key.fileobj)) is not None:
                yield guest
        now = time.monotonic()
        for connection in [c for c, guest in self._guests.items() if guest.end <= now]:
            self._close(connection)

    def _admit(self) -> None:
        with contextlib.suppress(OSError):  # it is gone again, or no descriptor is left for it
            connection, _ = self._door.accept()
            try:
                self._guests[connection] = _Guest(connection)
                self._selector.register(connection, selectors.EVENT_READ)
            except OSError:
                connection.close()
                raise
        if len(self._guests) > self._most:
            self._close(next(iter(self._guests)))

    def _heard(self, connection: Any) -> _Guest | None:
        """The guest, if it has said a whole greeting, which then waits no longer."""
        guest = self._guests.get(connection)
        if guest is None:  # it was closed since it was found to be ready
            return None
        try:
            if not guest.has_greeted():
                return None
        except BlockingIOError:
            return None
        except OSError:
            self._close(connection)
            return None
        self._selector.unregister(connection)
        del self._guests[connection]
        return guest

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._guests[connection]
        connection.close()


def connect(address: Address, replica: int, seconds: float) -> socket.socket:
    """A connection to the owner; raises ConnectionError with the addresses that were tried.

    Args:
        address: where the owner listens.
        replica: number of this replica.
        seconds: time that a message may take, the owner's greeting too.
    """
    place = f"The owner at {address.host}, port {address.port},"
    try:
        connection = socket.create_connection((address.host, address.port), timeout=seconds)
    except OSError as error:
        raise ConnectionError(f"{place} cannot be reached ({error})") from error
    try:
        prepare(connection, seconds)
        _greet(connection, address, replica)
    except OSError as error:
        connection.close()
        raise ConnectionError(f"{place} gave no greeting ({error})") from error
    return connection


def _greet(connection: socket.socket, address: Address, replica: int) -> None:
    """Proves to the owner that this replica knows the secret; raises ConnectionError if the owner does not."""
    other = bytes(read(connection, bytearray(_RANDOM_BYTES)))
    own = secrets.token_bytes(_RANDOM_BYTES)
    proof = _proof(address, b"replica", replica, other + own)
    connection.sendall(_GREETING.pack(replica, own, proof))
    answer = bytes(read(connection, bytearray(_DIGEST_BYTES)))
    if not hmac.compare_digest(answer, _proof(address, b"owner", replica, other + own)):
        raise ConnectionRefusedError("it does not know the secret: another program listens at this address")


def _proof(address: Address, word: bytes, replica: int, both: bytes) -> bytes:
    """The HMAC that proves knowledge of the secret; `both` are the owner's random bytes, then the replica's."""
    return hmac.digest(address.secret, word + _NUMBER.pack(replica) + both, _DIGEST)
