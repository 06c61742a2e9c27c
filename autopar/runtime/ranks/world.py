"""The mesh as it runs: process groups, this rank's place in it, its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _torch
from autopar.errors import PeerError
from autopar.ir import PIPELINE_AXIS, Meeting, Mesh, mesh_of_all, without_pipeline
from autopar.ops.collectives import group_name
from autopar.runtime.failures.stragglers import who_waits
from autopar.runtime.ranks.everywhere import Everywhere
from autopar.runtime.ranks.files import Files
from autopar.runtime.ranks.tiers import Tiers

_RANKS = "ranks"  # axis of the device mesh of all ranks of a mesh with vacant places


@dataclass(frozen=True)
class Pipe:
    """One rank's place along the pipeline.

    Attributes:
        rank: its position along the pipeline axis.
        device_mesh: mesh of all ranks, with the pipeline axis among its axes.
        group_name: c10d name of the group of all positions that differ in nothing else.
    """

    rank: int
    device_mesh: DeviceMesh
    group_name: str

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; looked up at each access, as with `World.groups`."""
        return _torch.resolve_group(self.group_name)

    def peer(self, rank: int) -> int:
        """The global rank at another position."""
        return dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Replicas:
    """One rank's place among replicas (`autopar.ir.meeting`).

    Attributes:
        meeting: the plan's replicas, and when they meet.
        number: number of this rank's replica.
        ranks: global ranks of this replica, in order.
        across: the ranks that differ from this one in their replica alone, as a mesh of one axis.
        device_mesh: mesh of all ranks; None for a single rank without process groups.
        group_name: c10d name of the group of this replica's ranks; "" for a single rank.
    """

    meeting: Meeting
    number: int
    ranks: Sequence[int]
    across: World
    device_mesh: DeviceMesh | None
    group_name: str


@dataclass(frozen=True)
class World:
    """One rank's view of the mesh.

    Attributes:
        mesh: the axes; of this rank's pipeline stages, if there is a pipeline, or of its replica.
        device: where this rank computes.
        device_mesh: the process groups; None for a single rank that needs none.
        pipe: the place along the pipeline, if there is one.
        replicas: the place among replicas, if there are any.
        files: where this rank keeps tensors of the tier nvme; None where nobody named a folder.
        lines: on a mesh with vacant places, the c10d name of this rank's group along every axis. The device mesh then
            has one axis of all ranks.
    """

    mesh: Mesh
    device: torch.device
    device_mesh: DeviceMesh | None = None
    pipe: Pipe | None = None
    replicas: Replicas | None = None
    files: Files | None = None
    lines: tuple[str, ...] = ()

    @classmethod
    def with_vacant_places(cls, mesh: Mesh, device: torch.device) -> World:
        """The world of one rank of a mesh with vacant places, of which torch has no device mesh."""
        everyone = init_device_mesh(device.type, (mesh.ranks,), mesh_dim_names=(_RANKS,))
        names = []
        for axis in range(len(mesh.axes)):
            lines = {mesh.peers(rank, axis) for rank in range(mesh.ranks)}
            present = [[rank for rank in line if rank < mesh.ranks] for line in sorted(lines)]
            own, _ = dist.new_subgroups_by_enumeration(present)
            assert own is not None, "every rank is on a line"
            names.append(group_name(own))
        return cls(mesh, device, everyone, lines=tuple(names))

    @classmethod
    def with_pipeline(
        cls, mesh: Mesh, device: torch.device, device_mesh: DeviceMesh, timeout_seconds: float | None
    ) -> World:
        """The world of one pipeline rank, given the mesh of all ranks."""
        inner = without_pipeline(mesh)
        rank = device_mesh.get_local_rank(PIPELINE_AXIS)
        pipe = Pipe(rank, device_mesh, _pipeline_group(device_mesh, device, timeout_seconds))
        everywhere = Everywhere.along(device_mesh, timeout_seconds)
        return cls(inner, device, _torch.StageMesh(device_mesh[inner.names], everywhere), pipe)

    @classmethod
    def of_replica(cls, mesh: Mesh, device: torch.device, device_mesh: DeviceMesh | None, meeting: Meeting) -> World:
        """The world of one rank of a replica, given the mesh of a replica and the device mesh of all ranks."""
        line = Mesh(((meeting.axis, meeting.replicas),))
        if device_mesh is None:
            across = cls(line, device)
            return cls(mesh, device, replicas=Replicas(meeting, 0, (0,), across, None, ""))
        number = device_mesh.get_local_rank(meeting.axis)
        across = cls(line, device, device_mesh[meeting.axis])
        rows = device_mesh.mesh.flatten(1).sort().values.tolist() if device_mesh.ndim > 1 else [[0]]
        inner = device_mesh[mesh.names] if device_mesh.ndim > 1 else None
        replicas = Replicas(
            meeting,
            number,
            tuple(rows[number] if inner else (dist.get_rank(),)),
            across,
            device_mesh,
            "" if inner is None else _group_of(inner, rows),
        )
        return cls(mesh, device, inner, replicas=replicas)

    def __post_init__(self) -> None:
        assert self.device_mesh is not None or self.mesh.size == 1, self.mesh

    @cached_property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        place = self.device_mesh.get_coordinate() if self.device_mesh is not None else None
        if self.lines:
            assert place is not None, "every rank is in the mesh"
            return place[0]
        return self.mesh.rank_at(place or [0] * len(self.mesh.axes))

    @property
    def ranks(self) -> int:
        """Number of ranks that train on one batch in step."""
        if self.replicas is not None:
            return len(self.replicas.ranks)
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of these ranks; None for the default group."""
        name = "" if self.replicas is None else self.replicas.group_name
        return _torch.resolve_group(name) if name else None

    @cached_property
    def tiers(self) -> Tiers:
        """This rank's memories besides the device's."""
        return Tiers(self.device, self.files)

    @property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process group of every axis; None where nobody else is in it.

        Looked up at each access: a group that is held past `destroy_process_group` ends with the
        interpreter, and Gloo's threads then abort the process.
        """
        if self.lines:
            return tuple(map(_torch.resolve_group, self.lines))
        return tuple(
            None if size == 1 or self.device_mesh is None else self.device_mesh.get_group(name)
            for name, size in self.mesh.axes
        )

    @property
    def covering(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Groups along which a sum, one after the other, is over all ranks of the mesh."""
        if self.lines:
            assert self.device_mesh is not None, "several ranks have process groups"
            return (self.device_mesh.get_group(),)
        return self.groups

    @cached_property
    def group_names(self) -> Mapping[str, str]:
        """Axis name -> the c10d name of its group, "" where nobody else is in it."""
        return {
            name: "" if group is None else group_name(group)
            for name, group in zip(self.mesh.names, self.groups, strict=True)
        }

    @property
    def axes_of_groups(self) -> Mapping[str, str]:
        """C10d name of a group -> its axis, of this mesh, the pipeline, or between replicas."""
        names = dict(self.group_names)
        if self.pipe is not None:
            names[PIPELINE_AXIS] = self.pipe.group_name
        if self.replicas is not None:
            names |= self.replicas.across.group_names
        return {group: axis for axis, group in reversed(names.items()) if group}

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with the first rank's, on all ranks."""
        everyone = self.pipe.device_mesh if self.pipe is not None else self.device_mesh
        if self.replicas is not None:
            everyone = self.replicas.device_mesh
        if everyone is not None and everyone.size() > 1:
            dist.broadcast(x, src=int(everyone.mesh.flatten()[0]))

    def agree(self, number: int) -> int:
        """The first rank's number; that of the first rank of this replica, so that none waits for another.

        Where the process groups have a backend for the host, it travels there, and no host waits for its device.
        """
        if self.ranks == 1:
            return number
        agreed = torch.tensor(number, device=_torch.CPU if _torch.backend_in_use(_torch.CPU) else self.device)
        if self.replicas is None:
            self.broadcast(agreed)
        else:
            dist.broadcast(agreed, src=self.replicas.ranks[0], group=self.everyone)
        return int(agreed)

    def explain(self, error: PeerError, doing: str, waiting: Mapping[int, str] | None = None) -> PeerError:
        """The error of a collective with the operation that failed, and the axis in place of its group.

        Args:
            error: the error of the collective.
            doing: what was being done, in words.
            waiting: ranks that wait elsewhere for this one, each with its reason.
        """
        mesh = self.mesh if self.pipe is None else f"{self.mesh} in a pipeline"
        rank = self.rank
        if self.replicas is not None:
            mesh, rank = mesh_of_all(self.mesh, self.replicas.meeting), dist.get_rank()
        named = self.axes_of_groups.get(error.group)
        axis = f"axis {named!r} of {mesh}" if named else "its group"
        cause = "another rank of that axis died, hangs, or runs another program. Its own error is in its own log."
        if waiting:
            cause = " ".join(f"rank {other} runs another program. {why}" for other, why in waiting.items())
        where = f"{error.collective} over {axis}" + (f", for {error.op}" if error.op else "")
        explained = PeerError(
            f"{doing} broke in {error.collective} over {axis} on rank {rank}: {cause} ({error.reason or error})",
            collective=error.collective,
            group=error.group,
            reason=error.reason,
            op=error.op,
        )
        if error.op:
            explained.add_note(f"for:    {error.op}")
        if words := who_waits(f"{doing}: {where}"):
            explained.add_note(f"ranks:  {words}")
        return explained


def _pipeline_group(device_mesh: DeviceMesh, device: torch.device, timeout_seconds: float | None) -> str:
    """The group along the pipeline. Gloo takes the timeout of a send or receive at a group's birth."""
    group = device_mesh.get_group(PIPELINE_AXIS)
    if timeout_seconds is None:
        return group_name(group)
    if _torch.uses_nccl(device):
        _torch.set_group_timeout(group, timeout_seconds)
        return group_name(group)
    lines = _torch.lines_along(device_mesh, PIPELINE_AXIS)
    timeout = timedelta(seconds=timeout_seconds)
    own, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    assert own is not None, "every rank is on a line"
    return group_name(own)


def _group_of(inner: DeviceMesh, rows: list[list[int]]) -> str:
    """The group of all ranks of a replica: that of its only axis, or one more."""
    if inner.ndim == 1:
        return group_name(inner.get_group())
    own, _ = dist.new_subgroups_by_enumeration(rows)
    assert own is not None, "every rank is in a replica"
    return group_name(own)


def set_timeout(world: World, seconds: float) -> None:
    """Limits the time that a collective of any axis of a stage, or between replicas, waits for the other ranks."""
    between = () if world.replicas is None else world.replicas.across.groups
    for group in (*world.groups, *between):
        if group is not None:
            _torch.set_group_timeout(group, seconds)
