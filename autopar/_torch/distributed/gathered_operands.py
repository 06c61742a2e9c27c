"""Operators that torch cannot run on shards run on whole operands.

torch (2.13) has no sharding strategy for some operators, such as `renorm`, flattens no tensor that is cut unevenly,
such as a weight of 50,257 rows, and writes into no sum that is still to be taken. Scripts call them on parameters and
gradients, all ranks alike: each gathers the operands, and has the whole result, a replicated DTensor. What is written
in place is cut again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch.distributed.dtensors import as_torch_does, dtensor, handlers
from autopar._torch.distributed.owned import Owned, cut_like
from autopar._torch.pytree import tree_leaves, tree_map_only

_CANNOT = re.compile(
    r"does not have a sharding strategy registered|unevenly sharded tensor|in-place operations that require placement"
    r"|^aten\.\S+\s+Sharding propagation failed"  # the size of the result depends on values, as of nonzero
)
_PROPAGATE = "_propagate_op_sharding_dispatch_slow_path"
CAN_GATHER = hasattr(DTensor._op_dispatcher, _PROPAGATE)  # torch 2.11 has no such method


@functools.cache
def gather_operands() -> None:
    """Makes operators that torch cannot run on shards gather their operands, from now on."""
    handlers()[torch.ops.aten.view.default] = _view
    if not CAN_GATHER:
        return
    dispatcher: Any = type(DTensor._op_dispatcher)
    propagate = getattr(dispatcher, _PROPAGATE)

    @functools.wraps(propagate)
    def propagate_or_run(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        try:
            return propagate(self, op, args, kwargs, *rest, **options)
        except (NotImplementedError, RuntimeError) as error:
            meshes = {x.device_mesh for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)}
            if not _CANNOT.search(str(error)) or len(meshes) != 1:
                raise
        return on_whole(op, args, kwargs)

    setattr(dispatcher, _PROPAGATE, propagate_or_run)


def _view(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Views a DTensor on its whole values where its shard has gaps in memory, or where one rank owns all of it.

    Elsewhere torch views the shard itself.
    """
    x: DTensor = args[0]
    has_gaps = x.is_contiguous() and not x._local_tensor.is_contiguous()
    if has_gaps or any(isinstance(placement, Owned) for placement in x.placements):
        return on_whole(op, args, kwargs)
    return as_torch_does(op, args, kwargs)


def on_whole(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], unread: Sequence[Any] = ()) -> Any:
    """Runs an operator on gathered operands. It fills the operands in `unread`, so that these are not gathered."""
    wholes: dict[int, Tensor] = {}
    parts: dict[int, DTensor] = {}

    def whole_of(x: DTensor) -> Tensor:
        if id(x) not in wholes:
            wholes[id(x)] = (
                room_like(x) if any(x is each for each in unread) else _gathered(x, copies=op._schema.is_mutable)
            )
            parts[id(wholes[id(x)])] = x
        return wholes[id(x)]

    found = op(*tree_map_only(DTensor, whole_of, args), **tree_map_only(DTensor, whole_of, kwargs))
    for x in written(op, args, kwargs):  # no others: they may share memory with one that is written
        if isinstance(x, DTensor):
            x._local_tensor.copy_(cut_like(wholes[id(x)], x)._local_tensor)
    mesh = next(iter(parts.values())).device_mesh

    def result_of(x: Tensor) -> DTensor:
        if id(x) in parts and op._schema.is_mutable:
            return parts[id(x)]
        return dtensor(x, mesh, [Replicate()] * mesh.ndim, tuple(x.shape))

    return tree_map_only(Tensor, result_of, found)


def written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes; those in a list are one argument each."""
    named = {**dict(zip((each.name for each in op._schema.arguments), args, strict=False)), **kwargs}
    names = [each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return tree_leaves([named.get(each) for each in names])


def room_like(x: DTensor) -> Tensor:
    """An empty whole tensor with the strides of a DTensor, in whose order numbers are drawn."""
    return torch.empty_like(_of_no_values(x), device=x._local_tensor.device)


def _of_no_values(x: DTensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _gathered(x: DTensor, *, copies: bool) -> Tensor:
    whole = x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim).to_local()
    is_ordered = whole.stride() == torch.empty_like(_of_no_values(x)).stride()
    return whole if is_ordered and not copies else room_like(x).copy_(whole)
