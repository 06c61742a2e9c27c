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

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autopar.runtime.replicas.server_connections import prepare, read

LOOPBACK = "127.0.0.1"
_RANDOM_BYTES = _SECRET_BYTES = 32
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_GREETING = struct.Struct(f"!I{_RANDOM_BYTES}s{_DIGEST_BYTES}s")  # see [Note: greeting]
_NUMBER = struct.Struct("!I")
_TRY_SECONDS = 5.0  # from the connection to the end of its greeting
_RETRY_SECONDS = 0.05  # until the next connection is asked for, after one that could not be had
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
    return next((host for host in ways if not (host.startswith("127.") or host == "::1")), LOOPBACK)


def _host_towards(name: str) -> str:
    """The address of this machine from which it reaches another, without a message; loopback if there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return LOOPBACK


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
        # The caller's thread may run an event loop already, as that of a notebook does.
        hearing = threading.Thread(target=asyncio.run, args=(self._hear(replicas, found, seconds),), daemon=True)
        with self._socket:
            hearing.start()
            hearing.join()
        if missing := sorted(set(replicas) - found.keys()):
            raise TimeoutError(f"replicas {missing} did not connect within {seconds:g} s")
        return found

    async def _hear(self, replicas: Sequence[int], found: dict[int, socket.socket], seconds: float) -> None:
        """Hears whoever connects until all replicas are found or time is over, see [Note: strangers at the door]."""
        self._socket.setblocking(False)
        complete = asyncio.Event()
        greetings: dict[asyncio.Task[None], None] = {}  # the first has waited longest

        async def greet(connection: socket.socket) -> None:
            replica = await self._replica(connection, replicas)
            if replica in found:  # it has given up the earlier one
                found[replica].close()
            if replica is not None:
                found[replica] = connection
            if found.keys() >= set(replicas):
                complete.set()

        async def admit() -> None:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
                except OSError:  # it is gone again, or no descriptor is left for it, which is said without a wait
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                greetings[greeting := asyncio.create_task(greet(connection))] = None
                greeting.add_done_callback(greetings.pop)
                if len(greetings) > len(replicas) + _MOST_WAITING:
                    next(iter(greetings)).cancel()
                await asyncio.sleep(0)  # where the next one is there already, `sock_accept` lets nobody else run

        door = asyncio.create_task(admit())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), seconds)
        door.cancel()  # `asyncio.run` ends those who still greet

    async def _replica(self, connection: socket.socket, replicas: Sequence[int]) -> int | None:
        """The number of the replica; None, and a closed connection, for one that does not greet or know the secret."""
        loop, own, heard = asyncio.get_running_loop(), secrets.token_bytes(_RANDOM_BYTES), bytearray()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # it is gone again, or too late
            stack.callback(connection.close)
            async with asyncio.timeout(_TRY_SECONDS):
                await loop.sock_sendall(connection, own)
                while len(heard) < _GREETING.size:
                    piece = await loop.sock_recv(connection, _GREETING.size - len(heard))
                    if not piece:
                        return None
                    heard += piece
                replica, other, proof = _GREETING.unpack(heard)
                wanted = _proof(self.address, b"replica", replica, own + other)
                if hmac.compare_digest(proof, wanted) and replica in replicas:
                    await loop.sock_sendall(connection, _proof(self.address, b"owner", replica, own + other))
                    prepare(connection, None)
                    stack.pop_all()
                    return int(replica)
        return None


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
