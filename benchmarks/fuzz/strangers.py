"""Strangers at the door of an asynchronous server: what they cost those who connect, and a training beside them.

OMP_NUM_THREADS=1 python -m benchmarks.fuzz.strangers --markdown benchmarks/fuzz/results.md

Each try is one stranger of a kind, or a crowd, that comes while two replicas connect. Then two Gloo ranks train by
`async-server:2` with a stranger of each kind at the owner's port, and end where `autopar.replay` of their order ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import autopar
from autopar.ir.order import Order
from autopar.runtime.replicas import server_handshake
from autopar.runtime.replicas.server_handshake import Address, Listener, connect
from benchmarks.async_server.run import on_ranks
from benchmarks.delayed import optimizer_of, random_batches, relative_error
from benchmarks.fuzz.page import replace_part
from benchmarks.local_steps.run import ROWS, small_model
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import Ranks

SECONDS = 20.0  # that the owner waits for its replicas
_GREETING_BYTES = 68


def _opened(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), SECONDS)


def _say(address: Address, said: bytes, *, stays: bool = True) -> list[socket.socket]:
    own = _opened(address)
    own.sendall(said)
    if stays:
        return [own]
    own.close()
    return []


def _drip(address: Address) -> list[socket.socket]:
    """A byte now and then, as long as the door takes it."""
    own = _opened(address)

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(200):
                own.sendall(b"x")
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    return [own]


def _reset(address: Address) -> list[socket.socket]:
    own = _opened(address)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    own.close()
    return []


def _mirror(address: Address) -> list[socket.socket]:
    """Sends back what the owner says."""
    own = _opened(address)
    said = own.recv(64)
    own.sendall(struct.pack("!I", 1) + said + said)
    return [own]


def _says_the_number(number: int) -> Callable[[Address], list[socket.socket]]:
    return lambda address: _say(address, struct.pack("!I", number) + bytes(64))


KINDS: dict[str, Callable[[Address], list[socket.socket]]] = {
    "says nothing": lambda a: [_opened(a)],
    "says a byte now and then": _drip,
    "closes at once": lambda a: _say(a, b"", stays=False),
    "resets the connection": _reset,
    "half a greeting, and stays": lambda a: _say(a, bytes(_GREETING_BYTES // 2)),
    "half a greeting, and closes": lambda a: _say(a, bytes(_GREETING_BYTES // 2), stays=False),
    "a replica's number, a wrong proof": _says_the_number(1),
    "a number that no replica has": _says_the_number(2**32 - 1),
    "a megabyte of random bytes": lambda a: _say(a, os.urandom(2**16) * 16),
    "the owner's own bytes": _mirror,
    "a request of HTTP": lambda a: _say(a, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9),
    "a hundred that say nothing": lambda a: [_opened(a) for _ in range(100)],
}


def meeting_seconds(kind: str | None) -> float:
    """Seconds in which two replicas reach the owner, beside a stranger that came before the first one."""
    listener, found = Listener(), dict[int, socket.socket]()
    owner = threading.Thread(target=lambda: found.update(listener.accept([1, 2], SECONDS)))
    owner.start()
    strangers: list[socket.socket] = []
    if kind is not None:
        with contextlib.suppress(OSError):  # the door has closed the connection
            strangers = KINDS[kind](listener.address)
    begin = time.perf_counter()
    ends = {number: connect(listener.address, number, SECONDS) for number in (1, 2)}
    owner.join(SECONDS + 1)
    seconds = time.perf_counter() - begin
    assert sorted(found) == [1, 2], "both replicas have come"
    for number, end in ends.items():
        end.sendall(b"hello")
        assert found[number].recv(5) == b"hello", "a replica has its own connection"
    for each in (*strangers, *ends.values(), *found.values()):
        each.close()
    return seconds


def tries(count: int) -> Iterator[tuple[str, int, float]]:
    """Kind, number of tries and the longest of them, in seconds."""
    plain = [meeting_seconds(None) for _ in range(10)]
    yield "nobody", len(plain), max(plain)
    for number, kind in enumerate(KINDS):
        own = count // len(KINDS) + (number < count % len(KINDS))
        yield kind, own, max(meeting_seconds(kind) for _ in range(own))


def with_strangers(kind: str | None, seed: int) -> tuple[Any, float]:
    """On a rank: trains with a stranger at the owner's door; the result of `on_ranks`, and its seconds."""
    strangers: list[socket.socket] = []

    class Besieged(Listener):
        """A door before which a stranger stands."""

        def __init__(self, host: str) -> None:
            super().__init__(host)
            if kind is not None:
                threading.Thread(target=come, args=(kind, self.address), daemon=True).start()

    def come(kind: str, address: Address) -> None:
        with contextlib.suppress(OSError):  # the door has closed the connection
            strangers.extend(KINDS[kind](address))

    from autopar.runtime.replicas import served

    random.seed(seed)
    served.Listener = Besieged  # type: ignore[misc]
    try:
        begin = time.perf_counter()
        return on_ranks("async-server:2", "sgd"), time.perf_counter() - begin
    finally:
        served.Listener = server_handshake.Listener  # type: ignore[misc]
        for each in strangers:
            each.close()


def trainings() -> Iterator[tuple[str, float, float]]:
    """Kind, seconds, and the largest relative error of a parameter against a replay of the order."""
    from gpt import loss_fn

    ranks = Ranks(2)
    for kind in (None, None, *KINDS):  # the first of all also captures
        found = ranks.run(with_strangers, kind, 0)
        order = Order.parse(2, found[0][0][0])
        (reference, *_) = autopar.replay(
            small_model(),
            random_batches(ROWS),
            order,
            replicas=2,
            loss_fn=loss_fn,
            optimizer_of=lambda own: optimizer_of("sgd", own),
        )
        expected = dict(reference.named_parameters())
        error = max(relative_error(own[n], x) for (_, own), _ in found for n, x in expected.items())
        yield kind or "nobody", max(seconds for _, seconds in found), error
    ranks.stop()


@click.command()
@click.option("--tries", "count", default=200)
@click.option("--markdown", type=click.Path(path_type=Path), help="Page to write a part of.")
def main(count: int, markdown: Path | None) -> None:
    """Measures what strangers cost."""
    met = list(tries(count))
    trained = {kind: (seconds, error) for kind, seconds, error in trainings()}
    rows = [
        (kind, str(own), f"{longest:.3f}", f"{trained[kind][0]:.2f}", f"{trained[kind][1]:.1e}")
        for kind, own, longest in met
    ]
    heads = ("stranger", "tries", "longest until both had connected, s", "training, s", "error against replay")
    table = markdown_table(heads, rows, text_columns=1)
    print(*table, sep="\n")
    if markdown:
        replace_part(markdown, "Strangers at the server's door", table, "python -m benchmarks.fuzz.strangers")


if __name__ == "__main__":
    main()
