"""Example tensors without values, made from their descriptions; storages of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef


def example_tensor(
    mode: FakeTensorMode,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool = False,
    is_parameter: bool = False,
) -> Tensor:
    """A tensor without values. It is made by hand, as an op under the fake mode takes ten times as long."""
    made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    fake: Tensor = FakeTensor(mode, made, device)
    if is_parameter:
        return nn.Parameter(fake, requires_grad)
    return fake.requires_grad_() if requires_grad else fake


def has_values(x: Tensor) -> bool:
    """Whether a tensor has memory, which fakes and tensors on the meta device do not."""
    return not isinstance(x, FakeTensor) and x.device.type != "meta"


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


def own_gradients(leaves: Iterable[Tensor]) -> None:
    """Gives leaves copies of their gradients where a write into one of them would show in another tensor.

    Autograd gives leaves views of one gradient, as in `a.view(4, 2) + b.view(4, 2)`, which may also be a gradient that
    a later node of the backward reads. It adds the gradient of the next backward in place. Gradients that are different
    parts of one memory, as those of parameters that are gathered in one buffer, need no copies if only they have it.
    """
    sharing: dict[int, list[Tensor]] = {}
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None or not _is_shared(gradient):
            continue
        leaf.grad = gradient.detach()  # a view's base is not kept alive for it alone
        del gradient
        sharing.setdefault(storage_key(_gradient(leaf)), []).append(leaf)
    for some in sharing.values():
        end, is_elsewhere = 0, _users(_gradient(some[0])) > len(some)
        for leaf in sorted(some, key=lambda x: _span(_gradient(x))):
            start, stop = _span(_gradient(leaf))
            if is_elsewhere or start < end:
                leaf.grad = _gradient(leaf).clone()
            else:
                end = stop


def _is_shared(x: Tensor) -> bool:
    """Whether other tensors have the memory of `x`."""
    return x.layout is torch.strided and _users(x) > 1


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "the leaf has a gradient"
    return leaf.grad


def _users(x: Tensor) -> int:
    """The number of tensors that have the storage of `x`, which is one of them."""
    storage = x.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without `storage`


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies: of its first element, and after its last."""
    size, start = x.element_size(), int(x.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return start * size, (start + last + 1) * size if x.numel() else start * size


def storage_key(x: Tensor) -> int:
    """A number that identifies a tensor's storage while it is alive; of a sparse tensor, which has none, itself."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)
