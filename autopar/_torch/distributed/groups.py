"""Process groups of c10d: found by name, their collectives, their store and their timeouts."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this c10d group name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_for(purpose: str, lines: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's group of those along `lines`; the one that was made for that purpose before, if there is one.

    Every rank calls it, with the same lines.
    """
    own = next(line for line in lines if dist.get_rank() in line)
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        is_one = isinstance(group, dist.ProcessGroup)
        if is_one and group.group_desc == purpose and sorted(ranks) == sorted(own):
            return group
    found, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], group_desc=purpose)
    assert found is not None, "every rank is on a line"
    return found


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the time after which a waiting collective of this group fails."""
    # The public function is there since torch 2.14; the other one goes with 2.13.
    private = "_set_pg_timeout"
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, private)
    set_timeout(timedelta(seconds=seconds), group)


def group_seconds(group: dist.ProcessGroup) -> float | None:
    """How long collectives of this group wait; None for a backend that has no limit, such as torch's fake one."""
    kinds = group._device_types  # none where the group is written in Python
    options = getattr(group._get_backend(kinds[0]), "options", None) if kinds else None
    return None if options is None else options._timeout.total_seconds()


@contextlib.contextmanager
def waiting_longer(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Context in which collectives of this group wait for at least `seconds`, whatever its timeout is."""
    before = group_seconds(group)
    if before is None:
        yield
        return
    set_group_timeout(group, max(before, seconds))
    try:
        yield
    finally:
        set_group_timeout(group, before)


def runs_at_once(x: Tensor) -> bool:
    """Whether ops on `x` are run now, by torch itself: nobody traces them, and no dispatch mode watches them."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not x.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch.compiler.is_compiling()
    )


# [Note: two ways to a group] A tracer and a dispatch mode see a collective as a functional op of c10d and a wait. These
# take the host some 70 microseconds, where the same calls of the process group take 10. They are called where nobody
# looks: both give the same result, and an error in the wait. Complex numbers are pairs for the functional ops alone.


def _is_direct(x: Tensor) -> bool:
    return runs_at_once(x) and not x.is_complex()


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of a contiguous `x` over the group."""
    if _is_direct(x):
        result = x.clone()
        start_all_reduce(result, resolve_group(group)).wait()
        return result
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The contiguous `x` of all ranks of the group, concatenated along dim 0."""
    if _is_direct(x):
        result = x.new_empty((size * x.shape[0], *x.shape[1:]))
        start_all_gather(result, x, resolve_group(group)).wait()
        return result
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part of the sum of a contiguous `x` over the group, cut along dim 0."""
    if _is_direct(x):
        result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        start_reduce_scatter(result, x, resolve_group(group)).wait()
        return result
    ops = torch.ops._c10d_functional
    if x.is_complex():
        pairs = torch.view_as_real(x).contiguous()
        return torch.view_as_complex(reduce_scatter(pairs, size, group))
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def all_to_all(x: Tensor, size: int, group: str) -> Tensor:
    """Sends part i of a contiguous `x` along dim 0 to rank i, and returns the received parts along dim 0."""
    if _is_direct(x):
        result = torch.empty_like(x)
        start_all_to_all(result, x, resolve_group(group)).wait()
        return result
    ops = torch.ops._c10d_functional
    parts = [x.shape[0] // size] * size
    return ops.wait_tensor(ops.all_to_all_single(x, parts, parts, group))


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Sends `sent[i]` rows of `x` to rank i, and returns the `received[i]` rows of every rank i, concatenated."""
    return start_exchange_rows(x, sent, received, group)()


def start_exchange_rows(x: Tensor, sent: list[int], received: list[int], group: str) -> Callable[[], Tensor]:
    """Starts `exchange_rows` and returns a function that waits for its result; the function keeps `x` alive."""
    ops = torch.ops._c10d_functional
    coming = ops.all_to_all_single(x, received, sent, group)

    def wait(x: Tensor = x) -> Tensor:
        return ops.wait_tensor(coming)

    return wait


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group, in place."""
    return group.allreduce([x])


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to concatenate the `x` of all ranks into `result`. Both tensors are flat."""
    return group._allgather_base(_as_real(result), _as_real(x))


def start_reduce_scatter(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group; this rank's part of the sum is written to `result`. Both tensors are flat."""
    return group._reduce_scatter_base(_as_real(result), _as_real(x), dist.ReduceScatterOptions())


def _as_real(x: Tensor) -> Tensor:
    """A flat tensor, and of complex numbers a view of it as pairs, which every backend moves and adds."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def start_all_to_all(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to exchange equal parts: part i of `x` goes to rank i, and part i of `result` comes from it; both flat."""
    return group.alltoall_base(result, x, [], [])


def wait_for_all(works: Sequence[dist.Work]) -> None:
    """Waits for messages; an exception here is an error of communication."""
    for work in works:
        work.wait()


def broke_in_communication(error: BaseException) -> bool:
    """Whether an error was raised while a rank sent, received or waited for a message."""
    frames = traceback.extract_tb(error.__traceback__)
    is_waiting = any(frame.name == wait_for_all.__name__ for frame in frames)
    return is_waiting or frames[-1].filename.endswith("distributed_c10d.py")


def flight_record() -> bytes:
    """The last collectives as JSON, by torch's flight recorder; nothing where it is off (TORCH_FR_BUFFER_SIZE)."""
    found: bytes = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return found if b'"record_id"' in found else b""


def default_store() -> dist.Store:
    """The key-value store through which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def store_host(store: dist.Store) -> str:
    """Name of the machine that keeps a store; "" for a store without one, such as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else ""


def store_seconds(store: dist.Store) -> float:
    """Default time for which a store waits for a key, in seconds."""
    return store.timeout.total_seconds()  # type: ignore[attr-defined]
