"""DTensors made of local shards, and the local shards of DTensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_global_tensor_info


def warn_once_of_redistribution() -> None:
    """Lets the first rank alone log that a DTensor is gathered by one collective for each axis.

    torch says so on every rank, as at `full_tensor()` of a parameter that several axes split.
    """
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    if _is_first_to_say not in log.filters:
        log.addFilter(_is_first_to_say)


def _is_first_to_say(record: logging.LogRecord) -> bool:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return is_first or not str(record.msg).startswith("While redistributing from")


def local_tensor(parameter: Tensor) -> Tensor:
    """The local shard of a DTensor parameter, or a plain parameter's values, without autograd."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def local_of(x: Any) -> Any:
    """The local shard of a DTensor; anything else as it is."""
    return x._local_tensor if isinstance(x, DTensor) else x


def parts_of(x: DTensor) -> int:
    """The number of parts that a tensor's placements cut it in."""
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def local_addresses(parameters: Iterable[Tensor]) -> list[int]:
    """Where the values of `local_tensor(parameter)` begin in memory, for each parameter."""
    return [local_of(p).data_ptr() for p in parameters]


def set_local_tensor(parameter: nn.Parameter, local: Tensor) -> None:
    """Gives a parameter another local shard of the same shape and layout; the object stays, as does its gradient."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
    else:
        parameter.data = local


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...] | None = None
) -> DTensor:
    """A DTensor over a local shard that stays on its device, which may be meta, or the host of a mesh of accelerators.

    `DTensor.from_local` would move a shard on the host to the accelerator.

    Args:
        local: this rank's shard.
        mesh: the ranks that have the others.
        placements: how the tensor lies along each axis.
        shape: its global shape; by default that of shards of one size.
    """
    if shape is None:
        shape = tuple(compute_global_tensor_info(local, mesh, placements)[0])
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return _over(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta))


def _over(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over a shard that may be a part of a buffer.

    A DTensor takes the storage offset of its first shard for its own address, and torch then copies a storage that is
    not there: `copy.deepcopy` fails with "Attempted to call copy_() on an invalid python storage" (torch 2.13). So it
    is made over the beginning of the buffer.
    """
    if local.storage_offset() == 0:
        return DTensor(local, spec, requires_grad=False)
    made = DTensor(local.as_strided(local.shape, local.stride(), 0), spec, requires_grad=False)
    made._local_tensor = local
    return made


def parameter_of(stored: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A Parameter of a tensor; of a DTensor over a part of a buffer one that can be copied, see `_over`."""
    if not isinstance(stored, DTensor) or stored._local_tensor.storage_offset() == 0:
        return nn.Parameter(stored, requires_grad)
    local = stored._local_tensor
    stored._local_tensor = local.as_strided(local.shape, local.stride(), 0)
    made = nn.Parameter(stored, requires_grad)
    made._local_tensor = stored._local_tensor = local  # type: ignore[attr-defined]
    return made


def replicates_implicitly() -> bool:
    """Whether DTensors now take plain tensors for replicated ones.

    Inside `torch.distributed.tensor.experimental.implicit_replication` they do.
    """
    return DTensor._op_dispatcher._allow_implicit_replication


def differentiable_local(parameter: Tensor) -> Tensor:
    """The local shard of a parameter, through which gradients flow back to the parameter in its own placements."""
    return _Local.apply(parameter) if isinstance(parameter, DTensor) else parameter


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, of which torch 2.11 has no second derivative: it would be zero."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        mesh, placements = ctx.spec.mesh, ctx.spec.placements
        _, stride = compute_global_tensor_info(gradient, mesh, placements)
        if gradient.is_contiguous():  # of parts of different sizes torch's strides would be wrong
            stride = list(torch.empty(ctx.spec.shape, device="meta").stride())
        meta = TensorMeta(ctx.spec.shape, tuple(stride), gradient.dtype)
        return _Whole.apply(gradient, DTensorSpec(mesh, placements, tensor_meta=meta))


class _Whole(torch.autograd.Function):
    """`DTensor.from_local`, which would move a shard on the host to an accelerator."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return _over(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        return _Local.apply(gradient.redistribute(ctx.spec.mesh, ctx.spec.placements)), None


def accumulate_gradient(parameter: nn.Parameter, local: Tensor) -> None:
    """Adds a local gradient to `parameter.grad`."""
    before = parameter.grad
    if before is not None:
        local_of(before).add_(local)
    elif isinstance(parameter, DTensor):
        parameter.grad = _over(local, parameter._spec)
    else:
        parameter.grad = local


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """The local shard of a gradient, which is there."""
    assert parameter.grad is not None
    return local_of(parameter.grad)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, row-major over its dims; also while a graph is traced with fake tensors."""
    with unset_fake_temporarily():
        return tuple(mesh.mesh.flatten().tolist())


def lines_along(mesh: DeviceMesh, axis: str) -> list[list[int]]:
    """The global ranks of a mesh in lines along one axis, in the order of the other axes."""
    assert mesh.mesh_dim_names is not None
    position = mesh.mesh_dim_names.index(axis)
    return mesh.mesh.movedim(position, -1).reshape(-1, mesh.mesh.shape[position]).tolist()


def handlers() -> dict[Any, Any]:
    """The operators that torch leaves to functions: they take the operator and its arguments."""
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return found


def as_torch_does(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator as torch does, without the function that `handlers` has for it."""
    handler = handlers().pop(op, None)  # None where another thread is here, too
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers()[op] = handler
