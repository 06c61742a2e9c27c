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
    """An object that gives tensors of one stage to the ranks of all; equal to another with the same process group."""

    def share(self, tensors: Sequence[DTensor]) -> list[Tensor]:
        """The tensors as whole plain tensors, on all ranks, each of which calls it; a rank may hold none of them."""
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
    """The mesh with no place for this rank, which is not in it: `torch.distributed.checkpoint` asks it for no part."""
    found = copy.copy(mesh)
    found._coordinate_on_dim = None
    return found
