"""Random numbers in DTensors on processors: those that one device draws for the whole tensor.

torch tells the shards of a DTensor apart by the offset of an accelerator's generator. On processors it does not (torch
2.13), so that after `torch.manual_seed` every rank draws the same numbers for its own shard, as `nn.init` and noise of
`torch.randn_like(p)` do; of operators outside of a list of its own (`multinomial`, `rrelu`) on accelerators, too. Here
each rank draws the whole tensor and takes its part: ranks that are seeded alike have what one device has, in any
layout, and their generators stay alike. Operators that read values, such as `bernoulli`, gather them first.

Functions of `nn.init` fill a whole tensor as well: `trunc_normal_` draws again until no value is outside of its bounds,
which each rank would see of its own shard, and `orthogonal_` transposes in place, which DTensors do not follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import as_torch_does, handlers
from autopar._torch.distributed.gathered_operands import on_whole, room_like, written
from autopar._torch.distributed.owned import cut_like
from autopar._torch.pytree import tree_leaves, tree_map_only

# All random operators of torch that are no compositions of others; those of attention draw by `bernoulli_`.
_RANDOM = [
    "_fused_dropout",
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy",
    "cauchy_",
    "exponential",
    "exponential_",
    "geometric",
    "geometric_",
    "log_normal",
    "log_normal_",
    "multinomial",
    "native_dropout",
    "normal",
    "normal_",
    "normal_functional",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "random_",
    "randperm",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "rrelu_with_noise_functional",
    "uniform",
    "uniform_",
]


@functools.cache
def draw_whole_on_processors() -> None:
    """Makes random operators on DTensors draw whole tensors, from now on."""
    packets = [getattr(torch.ops.aten, name) for name in _RANDOM]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    handlers().update(dict.fromkeys(ops, _drawn))
    for name in ("dirac_", "eye_", "orthogonal_", "sparse_", "trunc_normal_"):
        setattr(nn.init, name, _filled_whole(getattr(nn.init, name)))


def _filled_whole(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(fill)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, DTensor) or tensor.is_meta:
            return fill(tensor, *args, **kwargs)
        whole = fill(room_like(tensor), *args, **kwargs)
        with torch.no_grad():
            return tensor.copy_(cut_like(whole, tensor))

    return filled


def _drawn(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given: list[DTensor] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    like = given[0]
    is_told_apart = like.device_mesh.device_type != "cpu" and op in DTensor._op_dispatcher._random_ops
    if is_told_apart or like.is_meta:
        return as_torch_does(op, args, kwargs)

    def as_given(x: DTensor) -> DTensor:
        is_partial = any(placement.is_partial() for placement in like.placements)
        if is_partial or x.shape != like.shape or any(x is each for each in given):
            return x
        return x.redistribute(like.device_mesh, like.placements)

    return tree_map_only(DTensor, as_given, on_whole(op, args, kwargs, _unread(op, args, kwargs)))


def _unread(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors whose values an operator does not read, because it fills them or a tensor of their shape."""
    name = op._schema.name.removeprefix("aten::")
    if name.endswith("_like"):
        return [args[0], kwargs.get("out")]
    if name == "rrelu_with_noise_":
        return []
    return written(op, args, kwargs)
