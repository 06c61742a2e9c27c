"""Storages of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose storage has no bytes, of which shapes alone may be asked."""
    x = torch.empty(tuple(shape), dtype=dtype, device=device)
    x.untyped_storage().resize_(0)
    return x


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has memory of its own; one that torch.func maps over has not."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def storage_reference(x: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage, whose address (`cdata`) is not used again while it lives."""
    return StorageWeakRef(x.untyped_storage())


def storage_key(x: Tensor) -> int:
    """A number that tensors share if and only if they lie in one storage, while it lives."""
    return x.untyped_storage()._cdata
