"""`Owned`: placement of a DTensor that lies whole on one rank of a mesh axis; other ranks hold no element of it.

To torch it is a kind of `Shard(0)` in which one shard has all rows. Operators that work entry by entry run on what
a rank has, so that optimizers, foreach and fused ones too, update on the owner alone and make their states there. A
norm is summed over the ranks as that of shards is. torch has no placement of uneven shards; what it would do
itself with the sizes of shards is done here: to make the tensor whole, to cut a whole one, and to say which part a
rank has, as checkpoints ask.

A new tensor that an operator makes of such a DTensor (`p * 2`, `p.clone()`) is a `Shard(0)` to torch, with the
owner's rows on one rank; its `full_tensor()` fails. What is made by `zeros_like`, `empty_like` or `detach`, or
written in place, keeps the placement.

[Note: equal to a shard] torch checks a DTensor that is written in place against the `Shard(0)` that it takes an owner
for, so that the two must be equal there. Its C++ cache of what operators give compares the DTensors of two calls whose
hashes share a bucket, without the hashes themselves; there they must differ, or a parameter in shards would come out
as one of an owner. The cache compares by `DTensorSpec._check_equals`, and nothing else does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from autopar._torch.distributed.dtensors import dtensor
from autopar._torch.distributed.elsewhere import is_elsewhere
from autopar.errors import StepError


def _compares_specs() -> bool:
    """Whether torch asks for a placement's equality to compare two DTensors, see [Note: equal to a shard]."""
    return sys._getframe(2).f_code is DTensorSpec._check_equals.__code__


class Owned(Shard):
    """All of a tensor on rank `owner` of the mesh dim."""

    owner: int

    def __new__(cls, owner: int) -> Owned:
        """Makes an object that the C++ code of torch treats as `Shard(0)`."""
        return Shard.__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, owner: int) -> None:
        super().__init__(0)
        self.owner = owner

    def __reduce__(self) -> tuple[type[Owned], tuple[int]]:
        return Owned, (self.owner,)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Owned):
            return self.owner == other.owner
        return isinstance(other, Shard) and other.dim == 0 and not _compares_specs()

    def __hash__(self) -> int:
        return hash((Owned, self.owner))

    def __repr__(self) -> str:
        return f"Owned({self.owner})"

    def __str__(self) -> str:
        return f"O({self.owner})"

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        return (curr_local_size if rank == self.owner else 0), 0

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        parts = [tensor if i == self.owner else tensor.narrow(0, 0, 0) for i in range(num_chunks)]
        return parts, [0] * num_chunks

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> Tensor:
        is_owner = mesh.get_local_rank(mesh_dim) == self.owner
        whole = (
            local_tensor.detach().contiguous().clone()
            if is_owner
            else local_tensor.new_empty(tuple(current_logical_shape))
        )
        dist.broadcast(whole, group=mesh.get_group(mesh_dim), group_src=self.owner)
        return whole


def _keep_owners() -> None:
    """Lets results of operators on tensors of one owner have that owner, where torch (2.14) makes placements anew.

    torch then has rows of placements, of operands and results, in which a shard of any kind may stand for a shard
    along a dim, and fills in those kinds that it knows. A row of shards along dim 0 holds for owners, too.
    """
    from torch.distributed.tensor._ops import single_dim_strategy as found_there

    single_dim_strategy: Any = found_there
    fill = single_dim_strategy._fill_single_dim_strategy_placeholders

    def filled(found: Any, rows: Any) -> Any:
        owners = {each.owner for each in found if isinstance(each, Owned)}
        return fill(found, rows) + [
            [Owned(owner) if isinstance(x, single_dim_strategy._ShardingPlaceholder) else x for x in row]
            for row in rows
            for owner in owners
            if _along_rows(row, single_dim_strategy._ShardingPlaceholder)
        ]

    single_dim_strategy._fill_single_dim_strategy_placeholders = filled


def _along_rows(row: Sequence[Any], shard: type[Any]) -> bool:
    """Whether a row of placements has open shards, all of them along dim 0."""
    return {x.dim for x in row if isinstance(x, shard)} == {0}


# Before 2.14 the operators that optimizers use hand a placement on as it is.
if torch.__version__ >= "2.14":
    _keep_owners()


def cut_like(whole: Tensor, present: DTensor) -> DTensor:
    """Cuts a tensor that is whole on every rank by the placements of `present`, without communication.

    Of a sum that is still to be taken the first rank has the whole, and the others zeros; of a mean, maximum or minimum
    each rank has the whole.
    """
    if is_elsewhere(present):
        return torch.empty_like(present)  # type: ignore[return-value]
    mesh, sums = present.device_mesh, [axis for axis, each in enumerate(present.placements) if each.is_partial("sum")]
    given = dtensor(whole.detach().to(present.device), mesh, [Replicate()] * mesh.ndim, tuple(whole.shape))
    is_whole = [any(each.is_partial(kind) for kind in ("sum", "avg", "max", "min")) for each in present.placements]
    part = given.redistribute(
        mesh, [Replicate() if full else each for full, each in zip(is_whole, present.placements, strict=True)]
    )
    if not any(is_whole):
        return part
    is_first = all(mesh.get_local_rank(axis) == 0 for axis in sums)
    local = part._local_tensor if is_first else torch.zeros_like(part._local_tensor)
    return dtensor(local, mesh, present.placements, tuple(whole.shape))


def follow_assigned_data(is_followed: Callable[[Tensor], bool]) -> None:
    """Makes `p.data = value` give each rank its part of the value, for DTensors for which `is_followed` returns True.

    torch replaces the values of the wrapper alone, which nothing reads (2.13): the assignment would be lost. It is what
    `torch.nn.utils.vector_to_parameters` does, too.
    """
    of_torch: Any = torch.Tensor.data

    def assign(x: DTensor, value: Tensor) -> None:
        if is_followed(x):
            _assign_part(x, value)
        else:
            of_torch.__set__(x, value)

    DTensor.data = property(of_torch.__get__, assign)  # type: ignore[assignment]


@torch.no_grad()
def _assign_part(x: DTensor, value: Tensor) -> None:
    """Makes this rank's part of a whole tensor, or of a DTensor, the shard. Raises StepError for another kind.

    What the shard was stays in the memory that it had, for a script that has kept `p.data` to assign it again.
    """
    if value.shape != x.shape or value.dtype != x.dtype or (x.is_meta and not value.is_meta):
        raise StepError(
            f"p.data = x was given x of shape {list(value.shape)}, {value.dtype} on {value.device}, but the parameter "
            f"has the whole shape {list(x.shape)}, {x.dtype} on {x.device}. Assign a whole tensor of its kind on every "
            "rank; load_state_dict fills a model on the meta device."
        )
    if isinstance(value, DTensor):
        part = value.redistribute(x.device_mesh, x.placements)
    else:
        part = cut_like(value, x)
    local, before = part._local_tensor, x._local_tensor
    if local.data_ptr() == before.data_ptr() and local.stride() == before.stride():
        return  # it is the shard already
    if type(x) not in (DTensor, torch.nn.Parameter) or local.device != before.device or before.is_pinned():
        before.copy_(local)  # in a file, or in memory that is pinned
        return
    is_all = local.is_contiguous() and local.untyped_storage().nbytes() == local.nbytes
    x._local_tensor = local if is_all else local.clone(memory_format=torch.contiguous_format)


def whole_of(x: DTensor) -> Tensor:
    """The whole of a DTensor whose shards may differ in size, as those of an owner's `clone` do.

    All ranks of its mesh have to call it.
    """
    local = x.to_local().detach()
    for axis in reversed(range(x.device_mesh.ndim)):
        placement = x.placements[axis]
        if isinstance(placement, Shard):
            local = _concatenated(local, placement.dim, x.device_mesh.get_group(axis))
    return local


def _concatenated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The `x` of all ranks of a group along a dim, without those that have no element."""
    shapes: list[Any] = [None] * group.size()
    dist.all_gather_object(shapes, tuple(x.shape), group)
    parts = []
    for rank, shape in enumerate(shapes):
        if math.prod(shape):
            part = x.contiguous() if rank == group.rank() else x.new_empty(shape)
            dist.broadcast(part, group=group, group_src=rank)
            parts.append(part)
    return torch.cat(parts, dim) if parts else x


def copied(x: Tensor) -> Tensor:
    """A contiguous copy with the tensor's placements; `clone` would lose `Owned`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def copy_parts_of_buffers() -> None:
    """Makes `copy.deepcopy` copy a DTensor over a part of a buffer, such as a gradient, which torch (2.13) cannot.

    Of what one rank owns torch would make a shard.
    """
    of_torch: Any = DTensor.__deepcopy__

    def copy(x: DTensor, memo: dict[int, Any]) -> Any:
        is_odd = x._local_tensor.storage_offset() or any(isinstance(each, Owned) for each in x.placements)
        if isinstance(x, torch.nn.Parameter) or not x.is_leaf or not is_odd:
            return of_torch(x, memo)
        with torch.no_grad():
            return memo.setdefault(id(x), copied(x))

    DTensor.__deepcopy__ = copy  # type: ignore[method-assign, assignment]


def owned_as(x: Tensor, present: Tensor) -> Tensor:
    """The same memory with the owners of another tensor of its shape, where an operator such as `clone` lost them."""
    if not isinstance(x, DTensor) or not isinstance(present, DTensor) or x.shape != present.shape:
        return x
    if not any(isinstance(placement, Owned) for placement in present.placements):
        return x
    return dtensor(x.to_local(), present.device_mesh, present.placements, tuple(x.shape))
