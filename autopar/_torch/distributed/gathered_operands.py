"""Operators that torch cannot run on shards run on whole operands.

torch (2.13) has no sharding strategy for some operators, such as `renorm`, and flattens no tensor that is cut unevenly,
such as a weight of 50,257 rows. Scripts call them on parameters and gradients, all ranks alike: each gathers the
operands, and has the whole result, a replicated DTensor. What is written in place is cut again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch.distributed.dtensors import dtensor
from autopar._torch.distributed.owned import cut_like
from autopar._torch.pytree import tree_leaves, tree_map_only

_CANNOT = re.compile(r"does not have a sharding strategy registered|unevenly sharded tensor")
_PROPAGATE = "_propagate_op_sharding_dispatch_slow_path"
CAN_GATHER = hasattr(DTensor._op_dispatcher, _PROPAGATE)  # torch 2.11 has no such method


@functools.cache
def gather_operands() -> None:
    """Makes operators that torch cannot run on shards gather their operands, from now on."""
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
        return _on_whole(op, args, kwargs)

    setattr(dispatcher, _PROPAGATE, propagate_or_run)


def _on_whole(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    wholes: dict[int, Tensor] = {}
    parts: dict[int, DTensor] = {}

    def whole_of(x: DTensor) -> Tensor:
        if id(x) not in wholes:
            mesh = x.device_mesh
            local = x.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
            wholes[id(x)] = local.clone() if op._schema.is_mutable else local
            parts[id(wholes[id(x)])] = x
        return wholes[id(x)]

    found = op(*tree_map_only(DTensor, whole_of, args), **tree_map_only(DTensor, whole_of, kwargs))
    if op._schema.is_mutable:  # an operand that is not written gets what it has
        for x in parts.values():
            x._local_tensor.copy_(cut_like(wholes[id(x)], x)._local_tensor)
    mesh = next(iter(parts.values())).device_mesh

    def result_of(x: Tensor) -> DTensor:
        if id(x) in parts and op._schema.is_mutable:
            return parts[id(x)]
        return dtensor(x, mesh, [Replicate()] * mesh.ndim, tuple(x.shape))

    return tree_map_only(Tensor, result_of, found)
