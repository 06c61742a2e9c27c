"""Calls of a rank's graph that only some ranks run, because a state `O(i)` leaves them to rank i of an axis.

All ranks have one graph. A call that is left to an owner has an `Alone` in `node.meta["alone"]`. In place of the call,
every other rank runs `absent`: it takes the call's tensors, of which the rank has nothing, and gives a result of which
the rank has nothing either (`nothing` of `autopar.ops.collectives`). `absent` is a node of autograd's graph as the call
itself is. So the graph that autograd records has the same shape on every rank, and all ranks run the collectives of
backward in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir import Layout, Mesh
from autopar.ir.share import on

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Alone:
    """The ranks that run a call, and the shape of the stand-in for its result on the other ranks.

    Attributes:
        owners: axis and position along it of the ranks that run the call. For a collective the axes other than its own.
        shape: shape of the result on a rank that runs the call; None for a call whose result stays inside its op.
        dtype: element type of the result; None for that of the call's first tensor.
        needs_grad: whether backward may compute a gradient of the result.
        taken: shape that a collective takes on a rank that has something; None for other calls.
    """

    owners: tuple[tuple[str, int], ...]
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    needs_grad: bool = True
    taken: Shape | None = None

    @classmethod
    def at(cls, layout: Layout, mesh: Mesh, shape: Shape) -> Alone | None:
        """The `Alone` for a view of a tensor in this layout; None if all ranks have some of the tensor."""
        owners = owners_of(layout, mesh)
        return cls(owners, shape) if owners else None

    def on(self, rank: int) -> Alone:
        """The same with the shapes of one rank."""
        shape, taken = (each and on(each, rank) for each in (self.shape, self.taken))
        return replace(self, shape=shape, taken=taken)

    def runs_on(self, rank: int, mesh: Mesh) -> bool:
        """Whether a rank of the mesh runs the call."""
        position = dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
        return all(position[axis] == owner for axis, owner in self.owners)


def owners_of(layout: Layout, mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Axis and owner of every state O in a layout.

    >>> from autopar.ir import O, R
    >>> owners_of((R, O(1)), Mesh.parse("dp=2,tp=2"))
    (('tp', 1),)
    """
    states = zip(mesh.names, mesh.sizes, layout, strict=True)
    return tuple((axis, s.owner) for axis, size, s in states if s.kind == "O" and size > 1)


def alone(node: fx.Node) -> Alone | None:
    """The ranks that run a call; None if all ranks do."""
    found: Alone | None = node.meta.get("alone")
    return found


def absent(
    operands: Sequence[Any],
    shape: Shape | None,
    dtype: torch.dtype | None,
    needs_grad: bool,
    device: torch.device | None = None,
) -> Tensor:
    """Stands in for the result of a call that another rank runs: a tensor without elements.

    Args:
        operands: arguments of the call, those that are not tensors among them.
        shape: shape that the result has on its owner; None for any.
        dtype: element type of the result; None for that of the first operand.
        needs_grad: whether the result requires a gradient if an operand does.
        device: device of the result of a call without operands.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    dtype = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    like = tensors[0] if tensors else torch.empty(0, device=device)
    found = like.new_empty((0, *(shape or ())[1:]), dtype=dtype)
    takes = needs_grad and (dtype.is_floating_point or dtype.is_complex)
    if not takes or not any(x.requires_grad for x in tensors):
        return found
    joined: Tensor = _Absent.apply(found, *tensors)
    return joined


class _Absent(torch.autograd.Function):
    """Takes a gradient without elements, and gives every operand such a one."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *operands: Tensor) -> Tensor:
        ctx.operands = [(x.shape, x.dtype) for x in operands]
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = zip(ctx.operands, ctx.needs_input_grad[1:], strict=True)
        return None, *(gradient.new_zeros(shape, dtype=dtype) if needed else None for (shape, dtype), needed in kept)
