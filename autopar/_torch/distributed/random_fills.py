"""Random numbers in DTensors on processors: those that one device draws for the whole tensor.

torch tells the shards of a DTensor apart by the offset of an accelerator's generator. On processors it does not (torch
2.13), so that after `torch.manual_seed` every rank draws the same numbers for its own shard, as `nn.init` and noise of
`torch.randn_like(p)` do. Here each rank draws the whole tensor and takes its part: ranks that are seeded alike have
what one device has, in any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import handlers
from autopar._torch.distributed.owned import cut_like

_aten = torch.ops.aten
_IN_PLACE = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
_LIKE = (_aten.randn_like.default, _aten.rand_like.default)


@functools.cache
def draw_whole_on_processors() -> None:
    """Makes random fills of DTensors on processors draw the whole tensor, from now on."""
    handlers().update(dict.fromkeys((*_IN_PLACE, *_LIKE), _drawn))


def _drawn(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x: DTensor = args[0]
    is_partial = any(placement.is_partial() for placement in x.placements)
    if x.device_mesh.device_type != "cpu" or x.is_meta or is_partial:
        return as_torch_does(op, args, kwargs)
    whole = op(torch.empty(x.shape, dtype=x.dtype), *args[1:], **kwargs)
    part = cut_like(whole, x)
    if op in _LIKE:
        return part
    x._local_tensor.copy_(part._local_tensor)
    return x


def as_torch_does(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator of `handlers` without its function."""
    handler = handlers().pop(op, None)  # None where another thread is here, too
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers()[op] = handler
