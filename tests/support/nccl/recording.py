"""Plays one rank of a world of any size in this process, and records what it asks of its process groups.

A process group in Python stands in for torch's backend "fake", whose other ranks are imagined. Messages arrive at once,
with made-up values; what rank 0 tells the others as objects is kept for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import _torch
from tests.support.nccl.traces import Batch, Call, Event, NewGroup, Sync, Trace, Wait

_PACKAGE = autopar.__path__[0]
_C10D = dist.distributed_c10d
# Ops after which the host knows a value of the device, and so has waited for it.
_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "on_host")


@dataclass
class Recorder:
    """The trace of the rank that is played.

    Args:
        told: objects that rank 0 has told the others, in order; filled when rank 0 is played.
    """

    told: list[list[Any]]
    trace: list[Event] = field(default_factory=list)
    _batch: list[Call] | None = None
    _heard: int = 0

    def add(self, call: Call) -> int:
        """Records an operation; returns its number among the events."""
        if self._batch is not None:
            self._batch.append(call)
        else:
            self.trace.append(call)
        return len(self.trace) - (self._batch is None)

    def batch_isend_irecv(self, operations: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Stands in for torch's function."""
        self._batch = []
        works = [each.op(each.tensor, each.peer, group=each.group) for each in operations]
        self.trace.append(Batch(tuple(self._batch)))
        self._batch = None
        return works

    def broadcast_object_list(self, objects: list[Any], src: int | None = None, group: Any = None) -> None:
        """Stands in for torch's function: rank 0 is played first."""
        if dist.get_rank() == 0:
            self.told.append(list(objects))
        else:
            objects[:] = self.told[self._heard]
            self._heard += 1

    def all_gather_object(self, results: list[Any], value: Any, group: Any = None) -> None:
        """Stands in for torch's function: all ranks say the same."""
        results[:] = [value] * len(results)

    def new_group(self, real: Any, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a group as torch does."""
        self.trace.append(NewGroup(tuple(range(dist.get_world_size()) if ranks is None else ranks)))
        return real(ranks, *args, **kwargs)


class _Done(dist.Work):
    """The work of an operation that is over."""

    def __init__(self, recorder: Recorder, event: int) -> None:
        super().__init__()
        self._recorder, self._event = recorder, event

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.trace.append(Wait(self._event))
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        future.set_result([])
        return future


class _Group(dist.ProcessGroup):
    """A process group that records its operations."""

    def __init__(self, recorder: Recorder, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._recorder, self._rank, self._size = recorder, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "fake"

    @property
    def group_name(self) -> str:
        return _C10D._world.pg_names.get(self, "?")

    def _note(self, kind: str, tensors: Sequence[Tensor], detail: Any = None, peer: int | None = None) -> _Done:
        members = tuple(_C10D._world.pg_group_ranks.get(self, {}))
        dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors}
        call = Call(
            self.group_name,
            members,
            kind,
            sum(x.numel() for x in tensors),
            " ".join(sorted(dtypes)),
            sum(x.nbytes for x in tensors),
            None if peer is None else members[peer],
            detail,
            all(x.is_contiguous() for x in tensors),
            _where(sys._getframe(2)),
        )
        return _Done(self._recorder, self._recorder.add(call))

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Done:
        return self._note("send", tensors, peer=dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Done:
        for x in tensors:
            x.detach().fill_(0.01 if x.is_floating_point() else 0)
        return self._note("recv", tensors, peer=src)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self._note("all_reduce", tensors, _reduction(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        if opts.rootRank != self._rank:
            for x in tensors:
                x.fill_(0.01 if x.is_floating_point() else 0)
        return self._note("broadcast", tensors, opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self._note("reduce", tensors, (opts.rootRank, _reduction(opts)))

    def gather(self, results: Any, tensors: list[Tensor], opts: Any = None) -> _Done:
        _fill(results, tensors)
        return self._note("gather", tensors, opts.rootRank)

    def scatter(self, results: list[Tensor], tensors: Any, opts: Any = None) -> _Done:
        for x in results:
            x.zero_()
        return self._note("scatter", results, opts.rootRank)

    def barrier(self, opts: Any = None) -> _Done:
        return self._note("barrier", [])

    def allgather(self, results: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Done:
        _fill(results, tensors)
        return self._note("all_gather of a list", tensors)

    def all_gather_single(self, result: Tensor, x: Tensor, opts: Any = None) -> _Done:
        if x.numel():
            result.view(self._size, -1).copy_(x.reshape(1, -1))
        return self._note("all_gather", [x])

    def reduce_scatter_single(self, result: Tensor, x: Tensor, opts: Any = None) -> _Done:
        result.view(-1).copy_(x.reshape(-1)[: result.numel()])
        return self._note("reduce_scatter", [result], _reduction(opts))

    def all_gather_single_coalesced(self, results: list[Tensor], tensors: list[Tensor], opts: Any = None) -> _Done:
        for result, x in zip(results, tensors, strict=True):
            result.view(self._size, -1).copy_(x.reshape(1, -1))
        return self._note("all_gather of several", tensors)

    def reduce_scatter_single_coalesced(self, results: list[Tensor], tensors: Any, opts: Any = None) -> _Done:
        for result, x in zip(results, tensors, strict=True):
            result.view(-1).copy_(x.reshape(-1)[: result.numel()])
        return self._note("reduce_scatter of several", results)

    def all_to_all_single(
        self, result: Tensor, x: Tensor, received: Any = None, sent: Any = None, opts: Any = None
    ) -> _Done:
        count = min(result.numel(), x.numel())
        result.zero_()
        result.view(-1)[:count].copy_(x.reshape(-1)[:count])
        rows = (tuple(sent), tuple(received)) if sent else None
        return self._note("all_to_all", [x], rows)

    # Names of the same operations in other versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _fill(results: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
    """Gives every rank's part the values of this rank's."""
    for parts, x in zip(results, tensors, strict=False):
        for part in parts:
            part.copy_(x)


def _reduction(options: Any) -> str:
    found = getattr(options, "reduceOp", "SUM")
    return str(getattr(found, "op", found)).rpartition(".")[2]


def _where(frame: FrameType | None) -> str:
    """The innermost lines of autopar that lead to a frame."""
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            lines.append(f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class Syncs(TorchDispatchMode):
    """Records where the host would wait for the device: reads of values, and copies to the host."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._trace = recorder.trace
        self._copies = [
            mock.patch.object(place, name, self._noting(getattr(place, name)))
            for place, name in ((Tensor, "cpu"), (_torch, "host_copy"), (_torch, "host_copies"))
        ]

    def _noting(self, real: Any) -> Any:
        """The function, with a note of each call."""
        trace = self._trace

        def noting(*args: Any, **kwargs: Any) -> Any:
            trace.append(Sync(real.__name__, _where(sys._getframe(1))))
            return real(*args, **kwargs)

        return noting

    def __enter__(self) -> Any:
        for each in self._copies:
            each.start()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        for each in self._copies:
            each.stop()
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(getattr(i, "dtype", None) is torch.bool for i in args[1])
        if name in _READS or by_mask:
            self._trace.append(Sync(name, _where(sys._getframe(1))))
        return func(*args, **(kwargs or {}))


@dataclass
class Played:
    """A world whose ranks are played one after the other, rank 0 first; `traces` has what they asked."""

    size: int
    traces: dict[int, Trace] = field(default_factory=dict)
    _told: list[list[Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[Recorder]:
        """Context in which this process is a rank of the world."""
        recorder = Recorder(self._told)
        backend = dist.Backend._plugins["FAKE"]._replace(
            creator_fn=lambda store, rank, size, timeout: _Group(recorder, rank, size), extended_api=False
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(dist.Backend._plugins, FAKE=backend))
            for place in (dist, _C10D):
                for name in ("batch_isend_irecv", "broadcast_object_list", "all_gather_object"):
                    stack.enter_context(mock.patch.object(place, name, getattr(recorder, name)))
            made = functools.partial(recorder.new_group, _C10D._new_group_with_tag)
            stack.enter_context(mock.patch.object(_C10D, "_new_group_with_tag", made))
            dist.init_process_group("fake", rank=rank, world_size=self.size, store=dist.HashStore())
            stack.callback(dist.destroy_process_group)
            yield recorder
        self.traces[rank] = recorder.trace
