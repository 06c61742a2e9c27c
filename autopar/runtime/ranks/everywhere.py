"""Tensors of single pipeline stages, such as the norm of a parameter, given to the ranks of all stages.

All ranks run the same script. Where it needs such a value, each rank comes with the tensors that it has, or with their
stand-ins (`autopar._torch.distributed.elsewhere`), in one order. The group is for this alone: a rank that comes while
the others do something else waits, and takes no message of theirs for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import PeerError, StepError, first_line
from autopar.ir import PIPELINE_AXIS
from autopar.ops.collectives import group_name, naming_failures


@dataclass(frozen=True)
class Everywhere:
    """Gives tensors to all ranks of a pipeline.

    Attributes:
        group_name: c10d name of the group of all positions, which serves all models whose stages lie on these ranks.
    """

    group_name: str

    @classmethod
    def along(cls, device_mesh: DeviceMesh, timeout_seconds: float | None) -> Everywhere:
        """Every rank of the mesh of all ranks calls it at the same time."""
        lines = _torch.lines_along(device_mesh, PIPELINE_AXIS)
        # Models may lie on equal meshes, and a rank does not know whose a tensor is.
        group = _torch.group_for("tensors of single pipeline stages", lines)
        if timeout_seconds is not None:
            _torch.set_group_timeout(group, timeout_seconds)
        return cls(group_name(group))

    def share(self, tensors: Sequence[DTensor]) -> list[Tensor]:
        """The tensors whole and plain, and differentiable, of those that this rank has and those that others have.

        Every rank of the pipeline calls it. Raises StepError on all of them if they come with other tensors, and
        PeerError if one does not come.
        """
        with _torch.unchecked():
            whole = [x if _torch.is_elsewhere(x) else x.full_tensor() for x in tensors]
        try:
            found: tuple[Tensor, ...] = _Share.apply(self.group_name, *whole)
        except PeerError as error:
            raise PeerError(
                f"A number of parameters or gradients, or a whole one, of shape {list(tensors[0].shape)}, was asked "
                "for, which takes all ranks of the pipeline, and another one did not ask for it. All must compute it "
                f"(not under `if rank == 0`). ({first_line(error)})",
                collective=error.collective,
                group=error.group,
            ) from error
        return list(found)


class _Share(torch.autograd.Function):
    """The tensors of all ranks; each rank's backward is that of the tensors that it has."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.elsewhere = [x.detach() if _torch.is_elsewhere(x) else None for x in tensors]
        with naming_failures("broadcast", group):
            found = _from_holders(tensors, _holders(tensors, group), group)
        ctx.mark_non_differentiable(*(x for x in found if not (x.is_floating_point() or x.is_complex())))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.elsewhere, strict=True)
        return None, *(g if x is None else x for g, x in pairs)


@dataclass(frozen=True)
class _Brought:
    """What a position brings of a tensor.

    Attributes:
        kind: shape and format.
        values: its sum, first and last value, None where other positions have it.
        holders: these positions, where it is not here.
    """

    kind: tuple[tuple[int, ...], str]
    values: str | None
    holders: frozenset[int]

    @classmethod
    def of(cls, x: Tensor) -> _Brought:
        kind = (tuple(x.shape), str(x.dtype))
        if isinstance(x, _torch.Elsewhere):
            return cls(kind, None, x.holders)
        total = x.sum(dtype=torch.float64 if x.is_floating_point() else None)
        ends = [x.reshape(-1)[i] for i in (0, -1)] if x.numel() > 1 else []
        return cls(kind, str([number.item() for number in (total, *ends)]), frozenset())


def _holders(tensors: Sequence[Tensor], group: str) -> list[int]:
    """The first position that has each tensor. Raises StepError if positions come with other tensors."""
    process_group = _torch.resolve_group(group)
    every: list[Any] = [None] * process_group.size()
    dist.all_gather_object(every, [_Brought.of(x) for x in tensors], process_group)
    if any(len(each) != len(tensors) for each in every) or not all(map(_are_one, zip(*every, strict=True))):
        kinds = "; ".join(
            f"position {i} has {len(x)}, the first of shape {list(x[0].kind[0])}" for i, x in enumerate(every)
        )
        raise StepError(
            f"The ranks of the pipeline ask for other tensors of parameters or gradients: {kinds}. All ranks must "
            "compute norms and other numbers of parameters in one order (not under `if rank == 0`), and of parameters "
            "that have gradients on all ranks."
        )
    return [next(i for i, x in enumerate(brought) if x.values is not None) for brought in zip(*every, strict=True)]


def _are_one(brought: Sequence[_Brought]) -> bool:
    """Whether what the positions bring is one tensor: on all those that hold it with the same values."""
    here = frozenset(i for i, x in enumerate(brought) if x.values is not None)
    return len({x.kind for x in brought}) == 1 and all(
        x.holders == here if x.values is None else x.values == brought[min(here)].values for x in brought
    )


def _from_holders(tensors: Sequence[Tensor], holders: Sequence[int], group: str) -> list[Tensor]:
    """The values of the tensors, in one message for those of one holder and format."""
    found: dict[int, Tensor] = {}
    process_group = _torch.resolve_group(group)
    messages: dict[tuple[int, torch.dtype], list[int]] = {}
    for number, (x, holder) in enumerate(zip(tensors, holders, strict=True)):
        messages.setdefault((holder, x.dtype), []).append(number)
    for (holder, dtype), numbers in messages.items():
        sizes = [tensors[i].numel() for i in numbers]
        if process_group.rank() == holder:
            flat = torch.cat([tensors[i].reshape(-1) for i in numbers])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
        dist.broadcast(flat, group=process_group, group_src=holder)
        found.update(zip(numbers, flat.split(sizes), strict=True))
    return [found[i].view(x.shape).clone() for i, x in enumerate(tensors)]
