"""The mesh as it runs: process groups, this rank's place in it, its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.errors import PeerError
from autopar.ir import Mesh
from autopar.runtime.collectives import group_name


@dataclass(frozen=True)
class World:
    """One rank's view of the mesh.

    Attributes:
        mesh: the axes.
        device: where this rank computes.
        device_mesh: the process groups; None for a single rank that needs none.
    """

    mesh: Mesh
    device: torch.device
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        assert self.device_mesh is not None or self.mesh.size == 1, self.mesh

    @cached_property
    def rank(self) -> int:
        """This rank's number in the mesh, row-major."""
        place = self.device_mesh.get_coordinate() if self.device_mesh is not None else None
        rank = 0
        for position, size in zip(place or [0] * len(self.mesh.axes), self.mesh.sizes, strict=True):
            rank = rank * size + position
        return rank

    @property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process group of every axis; None where nobody else is in it.

        Looked up anew each time: a group that is held past `destroy_process_group` ends with the
        interpreter, and Gloo's threads then abort the process.
        """
        return tuple(
            None if size == 1 or self.device_mesh is None else self.device_mesh.get_group(name)
            for name, size in self.mesh.axes
        )

    @cached_property
    def group_names(self) -> Mapping[str, str]:
        """Axis name -> the c10d name of its group, "" where nobody else is in it."""
        return {
            name: "" if group is None else group_name(group)
            for name, group in zip(self.mesh.names, self.groups, strict=True)
        }

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with the first rank's."""
        if self.device_mesh is not None and self.mesh.size > 1:
            dist.broadcast(x, src=int(self.device_mesh.mesh.flatten()[0]))

    def agree(self, number: int) -> int:
        """The first rank's number."""
        agreed = torch.tensor(number, device=self.device)
        self.broadcast(agreed)
        return int(agreed)

    def explain(self, error: PeerError, doing: str) -> PeerError:
        """The error of a collective with what was being done, and the axis in place of its group."""
        axes = [axis for axis, group in self.group_names.items() if group == error.group]
        axis = f"axis {axes[0]!r} of {self.mesh}" if axes else "its group"
        return PeerError(
            f"{doing} broke in {error.collective} over {axis} on rank {self.rank}: another rank of "
            f"that axis died, hangs, or runs another program. Its own error is in its own log. "
            f"({error})",
            collective=error.collective,
            group=error.group,
        )


def set_timeout(world: World, seconds: float) -> None:
    """How long a collective of any axis may wait for the other ranks."""
    for group in world.groups:
        if group is not None:
            _torch.set_group_timeout(group, seconds)
