"""Storages of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose storage has no bytes: its shape and dtype can be read, its values cannot."""
    x = torch.empty(tuple(shape), dtype=dtype, device=device)
    x.untyped_storage().resize_(0)
    return x


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has a storage; the wrapper tensors of torch.func have none."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def storage_reference(x: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage, whose address (`cdata`) is not used again while it lives."""
    return StorageWeakRef(x.untyped_storage())


def is_shared(x: Tensor) -> bool:
    """Whether another tensor has the same storage, and would change where this one is written."""
    storage = x.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # `x` and `storage`


def own_gradient(leaf: Tensor) -> None:
    """Gives a leaf a copy of its gradient, if another tensor has the gradient's memory.

    Autograd gives leaves views of one gradient, as in `a.view(4, 2) + b.view(4, 2)`, which may also be a gradient that
    a later node of the backward reads. It adds the gradient of the next backward in place.
    """
    gradient = leaf.grad
    if gradient is not None and gradient.layout is torch.strided and is_shared(gradient):
        leaf.grad = gradient.clone()


def storage_key(x: Tensor) -> int:
    """A number that identifies a tensor's storage as long as the storage is alive."""
    return x.untyped_storage()._cdata
