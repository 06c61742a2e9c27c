"""An asynchronous server and its connections, in one process: who waits for whom, and how that ends."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.ir import Meeting
from autopar.ir.order import Order
from autopar.runtime.replicas import server_clients, server_handshake
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.server import Server
from autopar.runtime.replicas.server_connections import Connection, read
from autopar.runtime.replicas.server_handshake import LOOPBACK, Address, Listener, Machine, connect, host_of_owner
from autopar.runtime.replicas.server_table import ServerTable

WAIT_SECONDS = 20.0  # much more than any of these take


def server(
    replicas: int = 2, staleness: int = 1, wait_seconds: float = WAIT_SECONDS, kind: type[Server] = Server
) -> Server:
    meeting = Meeting("dp", replicas, 1, "async-server", staleness=staleness)
    return kind(ServerTable(meeting, {"x": torch.zeros(1)}), wait_seconds)


def parcel(value: float) -> ExchangeBuffer:
    found = ExchangeBuffer({"x": torch.zeros(1)})
    found.tensors["x"].fill_(value)
    return found


def value(of: ExchangeBuffer) -> float:
    return of.tensors["x"].item()


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call, *args), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            self.result = call(*args)
        except Exception as error:  # of the thread, for the test to look at
            self.result = error

    def is_done(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def test_the_fastest_waits_at_the_bound() -> None:
    """Under staleness 1 replica 0 is let through once, and the second time waits for the first push of replica 1."""
    asked, first, second = server(), parcel(2.0), parcel(4.0)
    asked.exchange(0, 1, first)
    assert value(first) == 1.0
    ahead = Later(asked.exchange, 0, 1, second)
    assert not ahead.is_done(0.2)
    own = parcel(8.0)
    asked.exchange(1, 1, own)
    assert ahead.is_done(WAIT_SECONDS) and ahead.result is None
    assert value(own) == 7.0 and value(second) == 7.0


def test_the_push_that_a_pull_waits_for_answers_it() -> None:
    """Under staleness 0 what replica 1 pushes next is not in the pull of replica 0, however late that wakes up."""
    asked, waiting = server(staleness=0), parcel(2.0)
    ahead = Later(asked.exchange, 0, 1, waiting)
    assert not ahead.is_done(0.1)
    with asked._changed:  # keeps the thread of replica 0 asleep
        asked.exchange(1, 1, parcel(4.0))
        again = parcel(100.0)
        asked._table.push(1, 1, again)
    assert ahead.is_done(WAIT_SECONDS) and value(waiting) == 3.0


def test_all_who_wait_too_long_are_told_for_whom() -> None:
    asked = server(replicas=3, staleness=0, wait_seconds=0.5)
    first = Later(asked.exchange, 1, 1, parcel(1.0))
    assert not first.is_done(0.1)
    with pytest.raises(TimeoutError) as caught:
        asked.exchange(2, 1, parcel(1.0))
    assert first.is_done(WAIT_SECONDS) and str(first.result) == str(caught.value)
    assert str(caught.value) == (
        "A pull of replica 1, which has pushed 1 times since the last meeting, waited 0.5 s for replica 0, which has "
        "pushed 0 times; a replica may be 0 ahead"
    )


@pytest.mark.parametrize("ends", ["end", "meet"])
def test_nobody_waits_for_one_that_does_not_push_again(ends: str) -> None:
    asked = server(staleness=0)
    ahead = Later(asked.exchange, 0, 1, parcel(1.0))
    assert not ahead.is_done(0.1)
    gone = Later(asked.end, 1) if ends == "end" else Later(asked.meet, 1, 0, parcel(0.0))
    assert ahead.is_done(WAIT_SECONDS) and ahead.result is None
    order = asked.meet(0, 0, parcel(0.0))
    assert str(order) == ("0+1 1! 0= meet" if ends == "end" else "0+1 0= meet")
    assert gone.is_done(WAIT_SECONDS)


def test_a_meeting_gives_all_the_same_and_begins_a_new_order() -> None:
    asked, own, other = server(staleness=3), parcel(1.0), parcel(3.0)
    waits = Later(asked.meet, 1, 2, other)
    assert not waits.is_done(0.1)
    order = asked.meet(0, 1, own)
    assert waits.is_done(WAIT_SECONDS) and waits.result == order
    assert str(order) == "1+2 0+1 meet" and value(own) == value(other) == 2.0
    asked.end(1)
    assert str(asked.meet(0, 0, own)) == "1! meet"


def test_new_parameters_are_the_owners() -> None:
    asked, own, other = server(), parcel(5.0), parcel(6.0)
    waits = Later(asked.begin, 1, other)
    asked.begin(0, own)
    assert waits.is_done(WAIT_SECONDS) and value(other) == value(own) == 5.0


def test_a_push_before_the_meeting_adds_nothing_to_new_parameters() -> None:
    """The owner loads 100 while replica 1 still pushes a difference of 8 to the old parameters."""
    asked, own, other = server(), parcel(100.0), parcel(8.0)
    loads = Later(asked.begin, 0, own)
    assert not loads.is_done(0.1)
    asked.exchange(1, 1, other)
    assert value(other) == 4.0
    asked.begin(1, other)
    assert loads.is_done(WAIT_SECONDS) and value(own) == value(other) == 100.0


def test_small_updates_of_half_precision_add_up() -> None:
    """Of 256 a bfloat16 has steps of 2, so that 0.5 alone is rounded away; 64 halves of it are 16."""
    meeting = Meeting("dp", 2, 1, "async-server")
    values = {"x": torch.full((1,), 256.0, dtype=torch.bfloat16)}
    table, changes = ServerTable(meeting, values), ExchangeBuffer(values)
    for _ in range(64):
        changes.tensors["x"].fill_(0.5)
        table.push(0, 1, changes)
    table.pull(0, changes)
    assert value(changes) == 272.0


def test_after_a_wait_in_vain_nothing_is_answered() -> None:
    asked = server(staleness=0, wait_seconds=0.1)
    with pytest.raises(TimeoutError, match="A meeting of replica 1") as caught:
        asked.meet(1, 1, parcel(1.0))
    for call in (asked.exchange, asked.meet):
        with pytest.raises(TimeoutError) as again:
            call(0, 1, parcel(1.0))
        assert str(again.value) == str(caught.value)
    assert not asked._table.meeting_of and asked._table.clock(0) == 0


def test_the_owner_stays_until_large_answers_have_gone() -> None:
    asked = server()
    owner = server_clients.LocalClient(asked, 0, parcel(0.0), {})
    waits, other = Later(owner.meet, 0), Later(asked.meet, 1, 0, parcel(0.0))
    assert other.is_done(WAIT_SECONDS) and not waits.is_done(0.2)
    asked.has_sent(1)
    assert waits.is_done(WAIT_SECONDS) and str(waits.result) == "meet"


class _OwnerWakesLate(Server):
    """A server whose owner comes out of the first meeting when replica 1 has come to the second."""

    def meet(self, replica: int, steps: int, parcel: ExchangeBuffer) -> Order:
        order = super().meet(replica, steps, parcel)
        if replica == 0 and self._meetings == 1:
            with self._changed:
                assert self._changed.wait_for(lambda: self._meeting, WAIT_SECONDS)
        return order


def test_an_owner_that_wakes_late_does_not_wait_for_the_next_meeting() -> None:
    """Replica 1 has its answer and asks again before the owner has seen that the meeting is over."""
    asked = server(kind=_OwnerWakesLate)
    here, there = (Connection(each, parcel(0.0)) for each in socket.socketpair())
    owner = server_clients.LocalClient(asked, 0, parcel(0.0), {1: here})
    other = server_clients.RemoteClient(there, "rank 0", 2)
    far = Later(lambda: [other.meet(0), other.meet(0)])
    near = Later(lambda: [owner.meet(0), owner.meet(0)])
    assert near.is_done(WAIT_SECONDS / 2) and far.is_done(WAIT_SECONDS / 2)
    assert [str(each) for each in near.result] == ["meet", "meet"] == [str(e) for e in far.result]
    other.close(), owner.close()


# --- connections

TENSORS = {
    "w": torch.arange(3.0, dtype=torch.float64),
    "b": torch.tensor(2, dtype=torch.int8),
    "h": torch.ones(2, 2, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
}


def test_a_parcel_crosses_a_connection_with_its_formats() -> None:
    here, there = (Connection(each, ExchangeBuffer(TENSORS)) for each in socket.socketpair())
    for name, x in TENSORS.items():
        here.parcel.tensors[name].copy_(x)
    here.send(b"p", 7)
    assert there.receive(b"p")[:2] == (b"p", 7)
    for name, x in TENSORS.items():
        found = there.parcel.tensors[name]
        assert torch.equal(found, x) and found.dtype == x.dtype
    here.close()
    with pytest.raises(ConnectionError, match="closed by its other end"):
        there.receive(b"p")
    there.close()


def test_rows_that_did_not_change_are_not_sent() -> None:
    """Rows 1 and 4 of 100 are two numbers of a row and two rows of 3 numbers; a tensor of many changes goes whole."""
    like = {"table": torch.zeros(100, 3, dtype=torch.float64), "b": torch.zeros(5)}
    here, there = (Connection(each, ExchangeBuffer(like)) for each in socket.socketpair())
    here.parcel.tensors["table"][[1, 4]] = torch.tensor([[1.0, 0, 0], [0, float("nan"), 2]]).double()
    here.parcel.tensors["b"].fill_(7)
    here.parcel.keep_changed_rows()
    here.send(b"p", 1)
    assert here.sent_bytes == 17 + 2 * 8 + 2 * 8 + 2 * 3 * 8 + 5 * 4
    there.receive(b"p")
    assert there.parcel.rows["table"].tolist() == [1, 4] and "b" not in there.parcel.rows
    for name, x in here.parcel.tensors.items():
        torch.testing.assert_close(there.parcel.tensors[name], x, rtol=0, atol=0, equal_nan=True)
    here.parcel.tensors["table"].fill_(1)
    here.parcel.keep_changed_rows()
    assert not here.parcel.rows
    here.close(), there.close()


def test_a_pull_has_the_rows_that_changed_since_the_last() -> None:
    meeting = Meeting("dp", 2, 1, "async-server", staleness=9)
    table = ServerTable(meeting, {"x": torch.zeros(50, 4)})
    own, other = (ExchangeBuffer({"x": torch.zeros(50, 4)}) for _ in range(2))

    def push(replica: int, into: ExchangeBuffer, row: int) -> None:
        into.tensors["x"].zero_()[row] = 2.0
        into.keep_changed_rows()
        table.push(replica, 1, into)

    push(0, own, 3)
    push(1, other, 7)
    table.pull(0, own)
    table.pull(1, other)
    assert own.rows["x"].tolist() == other.rows["x"].tolist() == [3, 7]
    push(1, other, 9)
    table.pull(1, other)
    assert other.rows["x"].tolist() == [9]
    push(0, own, 1)
    table.pull(0, own)
    assert own.rows["x"].tolist() == [1, 9] and own.tensors["x"][9].tolist() == [1.0] * 4
    table.begin(other)
    table.meet({0: own, 1: other})
    assert not own.rows and torch.equal(own.tensors["x"], other.tensors["x"])


def test_a_connection_needs_the_secret() -> None:
    listener = Listener()
    found = Later(listener.accept, [1, 2], WAIT_SECONDS)
    with pytest.raises(ConnectionError, match=r"owner at 127\.0\.0\.1, port \d+, gave no greeting"):
        connect(listener.address._replace(secret=bytes(32)), 1, WAIT_SECONDS)
    ends = [connect(listener.address, i, WAIT_SECONDS) for i in (1, 2)]
    assert found.is_done(WAIT_SECONDS) and sorted(found.result) == [1, 2]
    for each in (*ends, *found.result.values()):
        each.close()


def between(replica: socket.socket, owner: socket.socket) -> bytes:
    """Hands on what both ends of a greeting say; returns all of it."""
    heard = b""
    for source, target, size in (owner, replica, 32), (replica, owner, 68), (owner, replica, 32):
        said = bytes(read(source, bytearray(size)))
        target.sendall(said)
        heard += said
    return heard


def test_the_secret_never_crosses_a_connection_and_what_crosses_it_is_of_no_further_use() -> None:
    listener = Listener()
    found = Later(listener.accept, [1, 2], WAIT_SECONDS)
    address = listener.address
    with socket.create_server(("127.0.0.1", 0)) as spy:
        beside = address._replace(port=spy.getsockname()[1])
        first = Later(connect, beside, 1, WAIT_SECONDS)
        replica, _ = spy.accept()
        owner = socket.create_connection((address.host, address.port), WAIT_SECONDS)
        heard = between(replica, owner)
    assert address.secret not in heard and len(heard) == 132
    with socket.create_connection((address.host, address.port), WAIT_SECONDS) as again:
        read(again, bytearray(32))
        again.sendall(heard[32:100])
        assert again.recv(1) == b""  # the owner has drawn other bytes, and closes
    last = connect(address, 2, WAIT_SECONDS)
    assert found.is_done(WAIT_SECONDS) and sorted(found.result) == [1, 2]
    assert first.is_done(WAIT_SECONDS)
    for each in (replica, owner, first.result, last, *found.result.values()):
        each.close()


def test_an_owner_that_does_not_know_the_secret_is_refused() -> None:
    """It could give a replica any parameters."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = Address("127.0.0.1", stranger.getsockname()[1], bytes(32))
        found = Later(connect, address, 1, WAIT_SECONDS)
        connection, _ = stranger.accept()
        connection.sendall(bytes(32))
        read(connection, bytearray(68))
        connection.sendall(bytes(32))
        assert found.is_done(WAIT_SECONDS) and "does not know the secret" in str(found.result)
        connection.close()


def test_ranks_of_one_machine_meet_where_no_other_machine_can_come() -> None:
    here = Machine.here("")
    assert host_of_owner([here, here], 0, "") == LOOPBACK
    assert Listener(LOOPBACK)._socket.getsockname()[0] == LOOPBACK


def test_an_owner_among_several_machines_listens_on_its_way_to_another() -> None:
    """127.0.0.9 is this machine, too; ranks elsewhere say an address by which they can be reached."""
    machines = [Machine("a", "127.0.0.9"), Machine("b", "10.0.0.7")]
    sent = []

    def towards(name: str) -> str:
        sent.append(name)
        return "10.0.0.2" if name == "10.0.0.7" else "127.0.0.1"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_handshake, "_host_towards", towards)
        assert host_of_owner(machines, 0, "a.example") == "10.0.0.2"
    assert sent == ["10.0.0.7"]


def test_a_replica_may_connect_again() -> None:
    """The last connection counts; one that comes and goes without a word is none."""
    listener = Listener()
    address = listener.address
    found = Later(listener.accept, [1, 2], WAIT_SECONDS)
    socket.create_connection((address.host, address.port)).close()
    first, again, other = (connect(address, i, WAIT_SECONDS) for i in (1, 1, 2))
    assert found.is_done(WAIT_SECONDS) and sorted(found.result) == [1, 2]
    assert first.recv(1) == b""
    found.result[1].sendall(b"x")
    assert again.recv(1) == b"x"
    for each in (first, again, other, *found.result.values()):
        each.close()


def stranger(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), WAIT_SECONDS)


def test_strangers_who_wait_or_drip_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than may wait; of one that says a byte now and then the greeting ends in time, too."""
    monkeypatch.setattr(server_handshake, "_TRY_SECONDS", 0.5)
    monkeypatch.setattr(server_handshake, "_MOST_WAITING", 8)
    listener = Listener()
    begin = time.monotonic()
    found = Later(listener.accept, [1, 2], WAIT_SECONDS)
    idle = [stranger(listener.address) for _ in range(20)]
    first = connect(listener.address, 1, WAIT_SECONDS)
    dripping = stranger(listener.address)
    with pytest.raises(OSError):
        for _ in range(60):
            dripping.sendall(b"x")
            time.sleep(0.05)
    last = connect(listener.address, 2, WAIT_SECONDS)
    assert found.is_done(WAIT_SECONDS) and sorted(found.result) == [1, 2]
    assert time.monotonic() - begin < 5
    for each in (*idle, dripping, first, last, *found.result.values()):
        each.close()


def test_a_stranger_does_not_delay_what_is_waited_for() -> None:
    listener = Listener()
    begin = time.monotonic()
    found = Later(listener.accept, [3], 0.5)
    others = [stranger(listener.address) for _ in range(5)]
    others[0].sendall(bytes(40))
    assert found.is_done(WAIT_SECONDS) and "did not connect within 0.5 s" in str(found.result)
    assert time.monotonic() - begin < 3
    for each in others:
        each.close()


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), None])
def test_a_door_where_nothing_waits_does_not_hold_up_the_end_of_the_wait(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """Without a free descriptor, or with a queue without an end, `sock_accept` never let others run."""
    begin = time.monotonic()
    gone = socket.socket()
    gone.close()

    async def accept(*_: Any) -> tuple[socket.socket, None]:
        if time.monotonic() - begin > 5:
            raise AssertionError("the wait had an end long ago")
        if error is not None:
            raise error
        return gone, None

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", accept)
    with pytest.raises(TimeoutError, match=r"did not connect within 0\.2 s"):
        Listener().accept([3], 0.2)
    assert time.monotonic() - begin < 4


def wild(kind: bytes, number: int, size: int, rest: bytes = b"") -> bytes:
    return struct.pack("!cqQ", kind, number, size) + rest


WILD = {
    "a long text": wild(b"p", 1, 2**63),
    "a text that it does not need": wild(b"p", 1, 2**40),
    "steps below zero": wild(b"p", -1, 0),
    "an unknown kind": wild(b"?", 1, 0),
    "rows below zero": wild(b"p", 1, 0, struct.pack("=q", -5)),
    "more rows than there are": wild(b"p", 1, 0, struct.pack("=q", 2**60)),
    "a row that is not there": wild(b"p", 1, 0, struct.pack("=qqf", 1, 7, 1.0)),
}


@pytest.mark.parametrize("name", WILD)
def test_a_wild_message_ends_its_connection_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    here, there = socket.socketpair()
    here.settimeout(WAIT_SECONDS)
    there.settimeout(WAIT_SECONDS)
    here.sendall(WILD[name])
    server_clients._serve(server(), 1, Connection(there, parcel(0.0)))
    assert "Replica 1 was lost" in caplog.text and there.fileno() == -1
    here.close()


def test_a_replica_that_does_not_connect_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"replicas \[3\] did not connect within 0\.1 s"):
        Listener().accept([3], 0.1)
    assert time.monotonic() - begin < WAIT_SECONDS
