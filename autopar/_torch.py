"""The one place that touches torch APIs without a stability promise; tests/test_torch_api.py has a test of each."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this c10d group name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Lets collectives of this group fail after waiting for so long."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def local_tensor(parameter: nn.Parameter) -> Tensor:
    """The local shard of a DTensor parameter, or a plain parameter's values, without autograd."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> Tensor:
    """A DTensor of this global shape over a local shard that is on any device, also on meta."""
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def differentiable_local(parameter: nn.Parameter) -> Tensor:
    """The local shard as a function of the parameter, whose gradient is of the same placements."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=parameter.placements)
    return parameter


def accumulate_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Adds a local gradient to `parameter.grad`."""
    if parameter.grad is not None:
        grad = parameter.grad
        (grad._local_tensor if isinstance(grad, DTensor) else grad).add_(local)
    elif isinstance(parameter, DTensor):
        parameter.grad = DTensor(local, parameter._spec, requires_grad=False)
    else:
        parameter.grad = local


def below_autograd() -> AbstractContextManager[None]:
    """Inside it, custom ops are dispatched to their kernels instead of their autograd formulas."""
    return torch._C._AutoDispatchBelowAutograd()


def autopar_op(name: str) -> Any:
    """The default overload of `torch.ops.autopar.<name>`."""
    return getattr(torch.ops.autopar, name).default


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of `x` over the group."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The `x` of all ranks of the group, concatenated along dim 0."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part of the sum of `x` over the group, cut along dim 0."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))


def all_to_all(x: Tensor, size: int, group: str) -> Tensor:
    """Part i of `x` along dim 0 goes to rank i; the parts received, concatenated along dim 0."""
    ops = torch.ops._c10d_functional
    parts = [x.shape[0] // size] * size
    return ops.wait_tensor(ops.all_to_all_single(x, parts, parts, group))


@contextlib.contextmanager
def custom_functions() -> Iterator[list[str]]:
    """Collects the names of the autograd.Functions applied inside, whose backward a graph would not keep."""
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "autopar.")):
            seen.append(cls.__qualname__)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group, in place."""
    return group.allreduce([x])


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to concatenate the `x` of all ranks into `result`, both flat."""
    return group._allgather_base(result, x)


def start_reduce_scatter(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `x` over the group and to leave this rank's part in `result`, both flat."""
    return group._reduce_scatter_base(result, x, dist.ReduceScatterOptions())


def storage_reference(x: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage, whose address (`cdata`) is not used again while it lives."""
    return StorageWeakRef(x.untyped_storage())


def user_line(error: BaseException) -> str:
    """The innermost line of a traceback (or of the trace that export attached) outside torch and autopar."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (
        os.path.dirname(torch.__file__),
        os.path.dirname(__file__),
        os.path.dirname(traceback.__file__),
    )
    outside = [
        f for f in frames if not f.filename.startswith(ours) and not f.filename.startswith("<")
    ]
    if outside:
        frame = outside[-1]
        return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "a line that torch.export does not name"
