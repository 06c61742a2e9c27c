"""`StageMesh`: the ranks of one pipeline stage, by which a DTensor on it is known to be of one stage.

It is equal to no mesh but that of the same stage. So what operators make of such a DTensor lies on a `StageMesh`, too,
also where torch takes the placements of a result from its cache of earlier calls.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Spreading(Protocol):
    """Gives tensors of single stages to the ranks of all. Two are equal if the same ranks talk in the same group."""

    def share(self, tensors: Sequence[DTensor]) -> list[Tensor]:
        """The tensors whole and plain, on all ranks; each calls it with those that it has, or has not."""
        raise NotImplementedError


class StageMesh(DeviceMesh):
    """A mesh of the ranks of one pipeline stage.

    Attributes:
        spread: what gives tensors that lie on it to the ranks of all stages.
        plain: a mesh of the same ranks, for tensors that all stages have alike.
    """

    spread: Spreading
    plain: DeviceMesh

    def __init__(self, mesh: DeviceMesh, spread: Spreading) -> None:
        """Makes a mesh with the process groups of another."""
        vars(self).update(vars(mesh), _hash=None)
        self.spread, self.plain = spread, mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageMesh) and self.spread == other.spread and super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def is_of_stage(x: Any) -> bool:
    """Whether a tensor is a DTensor of one pipeline stage."""
    return isinstance(x, DTensor) and isinstance(x._spec.mesh, StageMesh)


@functools.cache
def seen_from_outside(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh as ranks see it that are not in it: `torch.distributed.checkpoint` then asks them for no part."""
    found = copy.copy(mesh)
    found._coordinate_on_dim = None
    return found
