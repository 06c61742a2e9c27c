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
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch.distributed.dtensors import handlers
from autopar._torch.distributed.owned import cut_like
from autopar._torch.pytree import tree_map_only

_aten = torch.ops.aten
_IN_PLACE = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.log_normal_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
_LIKE = (_aten.randn_like.default, _aten.rand_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype)
_OF_VALUES = (_aten.bernoulli.default, _aten.native_dropout.default)


@functools.cache
def draw_whole_on_processors() -> None:
    """Makes random fills of DTensors on processors draw the whole tensor, from now on."""
    handlers().update(dict.fromkeys((*_IN_PLACE, *_LIKE, *_OF_VALUES), _drawn))


def _drawn(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    x: DTensor = args[0]
    is_partial = any(placement.is_partial() for placement in x.placements)
    if x.device_mesh.device_type != "cpu" or x.is_meta or is_partial:
        return as_torch_does(op, args, kwargs)
    if op in _OF_VALUES:
        given = x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim).to_local()
    else:
        given = torch.empty(x.shape, dtype=x.dtype)
    part = tree_map_only(Tensor, lambda whole: cut_like(whole, x), op(given, *args[1:], **kwargs))
    if op not in _IN_PLACE:
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
