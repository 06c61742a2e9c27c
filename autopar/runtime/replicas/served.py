"""Replicas that exchange with an asynchronous server after every K steps (`autopar.ir.meeting`).

The exchange after steps 1 to K is made when step K + 1 begins, see [Note: when replicas meet]. The server is a thread
of the owner's process for each other replica, so that the owner trains as all others do. Common parameters and messages
lie in the host's memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import PeerError, StepError
from autopar.ir.meeting import SERVER
from autopar.ir.order import Order
from autopar.runtime.execute.settings import Settings
from autopar.runtime.parameters.parameters import ParameterStore
from autopar.runtime.ranks.all_ranks import AllRanks
from autopar.runtime.ranks.world import Replicas
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.meetings import Meetings
from autopar.runtime.replicas.server import Server
from autopar.runtime.replicas.server_clients import LocalClient, RemoteClient, ServerClient, lost
from autopar.runtime.replicas.server_connections import LATER_SECONDS, Connection
from autopar.runtime.replicas.server_handshake import Address, Listener, Machine, connect, host_of_owner
from autopar.runtime.replicas.server_table import ServerTable

_DOING = "Connecting the replicas with their server"


def meetings_between(
    replicas: Replicas, store: ParameterStore, model: nn.Module, *, statistics: Sequence[str], settings: Settings
) -> Meetings:
    """The meetings of a replica with the others, or its exchanges with their server; every rank calls this.

    Args:
        replicas: this rank's place among the replicas.
        store: the parameters at rest.
        model: the model.
        statistics: names of the buffers that steps write.
        settings: how the model runs.
    """
    if replicas.meeting.rule != SERVER:
        return Meetings(replicas, store, model, bucket_bytes=settings.bucket_bytes)
    return ServedMeetings(replicas, store, model, statistics=statistics, settings=settings)


class ServedMeetings(Meetings):
    """The exchanges of one replica with the server; a meeting of all replicas is held where somebody asks for it.

    Args:
        replicas: this rank's place among the replicas.
        store: the parameters at rest.
        model: the model.
        statistics: names of the buffers that steps write.
        settings: how the model runs; an exchange waits as long as a collective for other replicas.
    """

    def __init__(
        self,
        replicas: Replicas,
        store: ParameterStore,
        model: nn.Module,
        *,
        statistics: Sequence[str],
        settings: Settings,
    ) -> None:
        self._averaged = [name for name in sorted(statistics) if model.get_buffer(name).is_floating_point()]
        self._desk: ServerClient | None = None
        self._apart = False  # whether replicas may differ, because steps were run since a meeting
        super().__init__(replicas, store, model, bucket_bytes=settings.bucket_bytes)
        seconds = settings.timeout_seconds or _default_seconds()
        self._desk = _desk(replicas, dict(self._exchanged()), seconds)
        weakref.finalize(self, self._desk.close)

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps from one exchange to the next, those of the server included."""
        assert self._desk is not None, "it was made at birth"
        return super().kept_bytes + self._desk.nbytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other replicas."""
        assert self._desk is not None, "it was made at birth"
        return self._desk.sent_bytes

    def hold_if_due(self) -> None:
        """Before a step: an exchange with the server, if it is time for one."""
        if not self.is_due:
            return
        assert self._desk is not None, "it was made at birth"
        self._put_differences(self._desk.parcel)
        try:
            self._desk.exchange(self.steps)
        except PeerError as error:
            raise self._explained(error, "An exchange with the server") from error
        self._take(self._desk.parcel)
        self.steps = 0

    def count_step(self, written: Sequence[str]) -> None:
        super().count_step(written)
        self._apart = True

    def require(self, doing: str) -> None:
        """Holds a meeting of all replicas, which may be held at any time."""
        self.hold()

    def refuse_differences(self, doing: str) -> None:
        """Raises StepError where steps were run since the last meeting."""
        if self._apart:
            raise StepError(
                f"{doing} needs replicas that are alike, but those along {self.meeting.axis} have run steps since they "
                "synchronised. Call model.meet() before, on every rank after the same number of steps."
            )

    def begin_again(self, momentum: Mapping[str, Tensor] | None = None) -> None:
        """Takes the owner's parameters as the common ones; every rank calls this where new ones were read."""
        super().begin_again(momentum)
        self._apart = False
        known = None if self._desk is None else self._desk.parcel.tensors
        # One that was unfrozen has no base, so that the next exchange refuses it.
        begun = {n: x for n, x in self._exchanged() if known is None or n in known}
        self._outer.begin(begun.items(), {})
        if self._desk is None:
            return
        for name, x in begun.items():
            self._desk.parcel.tensors[name].copy_(x)
        self._desk.parcel.rows.clear()
        try:
            self._desk.begin()
        except PeerError as error:
            raise self._explained(error, "Giving the server new parameters") from error
        self._take(self._desk.parcel)

    @torch.no_grad()
    def hold(self) -> Order | None:
        """A meeting of all replicas, after which they are alike; every rank calls this.

        Returns what the server did since the last one. Raises PeerError if another rank died unseen or hangs.
        """
        assert self._desk is not None, "it was made at birth"
        if not self.steps:  # nothing is pushed, so that other changes than those of steps are undone
            for name, x in self._exchanged():
                self._outer.undo(name, x)
        self._put_differences(self._desk.parcel)
        try:
            order = self._desk.meet(self.steps)
        except PeerError as error:
            raise self._explained(error, "A meeting") from error
        self._take(self._desk.parcel)
        self.steps, self._apart = 0, False
        return order

    def _explained(self, error: PeerError, doing: str) -> PeerError:
        """The error with what was being done."""
        return PeerError(
            f"{doing} along {self.meeting.axis} broke: {error}",
            collective=error.collective,
            group=error.group,
            reason=error.reason,
        )

    @torch.no_grad()
    def _put_differences(self, parcel: ExchangeBuffer) -> None:
        """Writes this replica's changes since its last pull; raises StepError for a parameter unfrozen since then."""
        for name, x in self._exchanged():
            change = self._outer.sent(name, x)
            parcel.tensors[name].copy_(change)
        parcel.keep_changed_rows()

    @torch.no_grad()
    def _take(self, parcel: ExchangeBuffer) -> None:
        """Goes on with the common parameters."""
        for name, x in self._exchanged():
            if name in parcel.tensors:
                self._outer.adopt(name, x, parcel.tensors[name], parcel.rows.get(name))

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that the server has, though they may be frozen here (others may train them), or unfrozen since."""
        known = () if self._desk is None else self._desk.parcel.tensors
        for name, kept in self._store.kept.items():
            if kept.parameter.requires_grad or name in known:
                yield name, kept.local.detach()

    def _exchanged(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that replicas exchange: parameters, and running statistics that steps write."""
        statistics = ((name, self._model.get_buffer(name)) for name in self._averaged)
        return itertools.chain(self._parameters(), statistics)


def _default_seconds() -> float:
    """Time that collectives of all ranks wait; none for a single rank, which waits for nobody."""
    if not dist.is_initialized():
        return 0.0
    assert dist.group.WORLD is not None, "there is a process group"
    return _torch.group_seconds(dist.group.WORLD) or _torch.store_seconds(_torch.default_store())


def _desk(replicas: Replicas, values: Mapping[str, Tensor], seconds: float) -> ServerClient:
    """The server on its owner, and elsewhere a connection to it; every rank calls this."""
    meeting, own = replicas.meeting, replicas.number
    if own != meeting.owner:
        return _far_desk(replicas, values, seconds)
    common = {name: x.detach().cpu().clone() for name, x in values.items()}
    server = Server(ServerTable(meeting, common), seconds)
    others = [i for i in range(meeting.replicas) if i != own]
    if not others:
        return LocalClient(server, own, ExchangeBuffer(common), {})
    listener = Listener(_host(replicas, values))
    _told(listener.address, _rank_of_owner(replicas))
    try:
        connections = listener.accept(others, seconds)
    except TimeoutError as error:
        words = f"The server of the replicas along {meeting.axis} has no connection to all of them: {error}"
        raise lost(words, collective="connect") from error
    lines = {i: Connection(connection, ExchangeBuffer(common)) for i, connection in connections.items()}
    return LocalClient(server, own, ExchangeBuffer(common), lines)


def _far_desk(replicas: Replicas, values: Mapping[str, Tensor], seconds: float) -> ServerClient:
    meeting, owner = replicas.meeting, _rank_of_owner(replicas)
    _host(replicas, values)
    address = _told(None, owner)
    try:
        connection = connect(address, replicas.number, seconds + LATER_SECONDS)
    except ConnectionError as error:
        words = f"Replica {replicas.number} along {meeting.axis} cannot reach the server on rank {owner}: {error}"
        raise lost(words, collective="connect") from error
    return RemoteClient(Connection(connection, ExchangeBuffer(values)), f"rank {owner}", meeting.replicas)


def _rank_of_owner(replicas: Replicas) -> int:
    assert replicas.device_mesh is not None, "there are several replicas"
    return int(replicas.device_mesh.mesh.flatten()[replicas.meeting.owner])


def _host(replicas: Replicas, values: Mapping[str, Tensor]) -> str:
    """The address on which the owner listens; every rank calls this.

    Raises StepError on all ranks where they do not exchange the same tensors.
    """
    store_host = _torch.store_host(_torch.default_store())
    own = {name: f"{x.dtype} {list(x.shape)}" for name, x in values.items()}
    said = AllRanks(_DOING).everyones((Machine.here(store_host), own))
    for rank, (_, other) in enumerate(said):
        if list(other.items()) != list(said[0][1].items()):
            raise StepError(_difference(said[0][1], other, rank, replicas.meeting.axis))
    return host_of_owner([machine for machine, _ in said], _rank_of_owner(replicas), store_host)


def _told(address: Address | None, owner: int) -> Address:
    """The address that the owner's rank gives, on every rank."""
    found = AllRanks(_DOING).everyones(address)[owner]
    assert found is not None, "the owner has an address"
    return found


def _difference(first: Mapping[str, str], other: Mapping[str, str], rank: int, axis: str) -> str:
    """Why ranks cannot exchange: the first tensor that they do not both have, or have in another order."""
    differing = (n for n in [*first, *other] if first.get(n) != other.get(n))
    name = next(differing, "")
    told = [each.get(name, "nothing") for each in (first, other)] if name else ["one order", "another"]
    return (
        f"Ranks along {axis} exchange different tensors: of {name or 'the same names'} rank 0 exchanges {told[0]}, and "
        f"rank {rank} {told[1]}. Give all ranks the same model, with requires_grad set on the same parameters."
    )
