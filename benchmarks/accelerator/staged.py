"""A process group for ranks that share one accelerator: Gloo, with tensors staged through the host.

NCCL refuses two ranks on one device, and Gloo lacks some collectives for tensors of an accelerator. Here every
collective copies its tensors to the host, runs over Gloo, and copies the results back when it is waited for.
Tensors of a processor are copied too, so that a machine without an accelerator runs the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

NAME = "staged"


def register() -> None:
    """Makes `backend="staged"` known to `torch.distributed.init_process_group`."""
    if NAME not in dist.Backend.backend_list:
        kinds = sorted({"cpu", "cuda", "xpu"})
        dist.Backend.register_backend(NAME, _make, devices=kinds)


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return StagedGroup(store, rank, size, timeout)


def _on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


def _flat(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [x for each in tensors for x in each]


class StagedWork(dist._Work):  # type: ignore[name-defined, misc]
    """A collective under way on the host, and the tensors that get its results."""

    def __init__(self, work: Any, targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._copies = work, list(zip(targets, results, strict=True))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the collective, then copies its results to where they belong, once."""
        self._work.wait()
        for target, result in self._copies:
            target.detach().copy_(result)
        self._copies = []
        return True

    def is_completed(self) -> bool:
        """Whether the results are where they belong."""
        return not self._copies and self._work.is_completed()


def _last(works: Iterable[StagedWork]) -> StagedWork:
    """The last of several collectives, once the others have ended."""
    *others, last = works
    for work in others:
        work.wait()
    return last


class StagedGroup(dist.ProcessGroup):
    """The collectives that programs of autopar use."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _in_place(self, tensors: Sequence[Tensor], name: str, *args: Any) -> StagedWork:
        """A collective that overwrites its tensors."""
        hosts = [_on_host(x) for x in tensors]
        return StagedWork(getattr(self._gloo, name)(hosts, *args), tensors, hosts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> StagedWork:
        return self._in_place(tensors, "allreduce", opts or distributed_c10d.AllreduceOptions())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> StagedWork:
        return self._in_place(tensors, "broadcast", opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> StagedWork:
        return self._in_place(tensors, "reduce", opts)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> StagedWork:
        return self._in_place(tensors, "recv", source, tag)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> StagedWork:
        hosts = [_on_host(x) for x in tensors]
        return StagedWork(self._gloo.send(hosts, target, tag), [], [])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> StagedWork:
        hosts = [[_on_host(x) for x in each] for each in outputs]
        work = self._gloo.allgather(hosts, [_on_host(x) for x in inputs], opts or distributed_c10d.AllgatherOptions())
        return StagedWork(work, _flat(outputs), _flat(hosts))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> StagedWork:
        hosts = [[_on_host(x) for x in each] for each in outputs]
        work = self._gloo.gather(hosts, [_on_host(x) for x in inputs], opts)
        return StagedWork(work, _flat(outputs), _flat(hosts))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> StagedWork:
        hosts = [_on_host(x) for x in outputs]
        work = self._gloo.scatter(hosts, [[_on_host(x) for x in each] for each in inputs], opts)
        return StagedWork(work, outputs, hosts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> StagedWork:
        host = _on_host(output)
        work = self._gloo._allgather_base(host, _on_host(x), opts or distributed_c10d.AllgatherOptions())
        return StagedWork(work, [output], [host])

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> StagedWork:
        host = _on_host(output)
        opts = opts or distributed_c10d.ReduceScatterOptions()
        return StagedWork(self._gloo._reduce_scatter_base(host, _on_host(x), opts), [output], [host])

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> StagedWork:
        host = _on_host(output)
        opts = opts or distributed_c10d.AllToAllOptions()
        work = self._gloo.alltoall_base(host, _on_host(x), output_sizes, sizes, opts)
        return StagedWork(work, [output], [host])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> StagedWork:
        return _last(map(self.all_gather_single, outputs, tensors))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> StagedWork:
        return _last(self.reduce_scatter_single(y, x, opts) for y, x in zip(outputs, tensors, strict=True))

    def barrier(self, opts: Any = None) -> StagedWork:
        return StagedWork(self._gloo.barrier(opts or distributed_c10d.BarrierOptions()), [], [])

    # torch before 2.13 calls them so.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce

    @property
    def group_name(self) -> str:
        """The name under which operators look the group up."""
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME
