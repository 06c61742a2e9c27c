"""The processes of a run: the default process group, the mesh over it, and what its ranks agree on."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _torch, errors
from autopar.errors import AutoparError, MeshError
from autopar.ir import PIPELINE_AXIS, Meeting, Mesh, Plan, mesh_of_all
from autopar.runtime.failures.failures import show_failures
from autopar.runtime.ranks.all_ranks import AllRanks
from autopar.runtime.ranks.world import World
from autopar.units import counted

_PLANNING_SECONDS = 1800.0  # that ranks wait for a plan, whatever limit they have for a step


def join_process_group(device: torch.device) -> None:
    """Under torchrun, makes the default process group if there is none yet; with other ranks, takes the device.

    Raises MeshError on every rank where two ranks compute on one accelerator, or on devices of different kinds.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if launched and not dist.is_initialized():
        # torch reads it when a group is made. After a failure NCCL's watchdog sleeps for four times as long, and
        # writes what its flight recorder holds, if that was asked for; of many ranks a second writes nothing.
        if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        dist.init_process_group(_torch.backends_of(device))
        show_failures()  # over torch's own hook, which the process group brings
    if dist.is_initialized() and dist.get_world_size() > 1:
        _torch.use_device(device)
        if dist.get_backend() != "fake":  # which imagines the other ranks
            _refuse_shared(Seat.of(device))


@dataclass(frozen=True)
class Seat:
    """The device that a rank computes on, as it describes it to the other ranks.

    Attributes:
        device: name of the device there, such as "cuda:0".
        machine: name of the machine.
        identity: text that another rank has too if it computes on the same device; "" for a device that ranks may
            share.
        count: number of devices of this kind that the rank sees.
    """

    device: str
    machine: str
    identity: str
    count: int

    @classmethod
    def of(cls, device: torch.device) -> Seat:
        """The seat of this rank."""
        is_own = _torch.is_accelerator(device) and _torch.uses_own_backend(device)
        # NCCL takes a process with another NCCL_HOSTID for one on another machine.
        machine = os.environ.get("NCCL_HOSTID", platform.node())
        identity = f"{machine} {_torch.identity_of(device)}" if is_own else ""
        return cls(str(device), machine, identity, _torch.accelerator_count(device.type))

    @property
    def kind(self) -> str:
        """The kind of the device, such as "cuda"."""
        return self.device.partition(":")[0]


_SEATED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
# Numbers of comparisons in this process. A later process group may have the same store, with the old keys in it.
_NUMBERS = itertools.count(1)


def _refuse_shared(seat: Seat) -> None:
    """Raises MeshError on every rank unless each has a device of its own; once for each kind in a process group.

    The ranks tell each other through the store of the group, because a collective over NCCL would fail itself.
    """
    known = _SEATED.setdefault(dist.group.WORLD, set())
    if seat.kind in known:
        return
    known.add(seat.kind)
    store, rank = _torch.default_store(), dist.get_rank()
    prefix = f"autopar/devices/{next(_NUMBERS)}"
    store.set(f"{prefix}/{rank}", json.dumps(asdict(seat)))
    if rank == 0:
        said = [store.get(f"{prefix}/{other}") for other in range(world_size())]
        store.set(f"{prefix}/verdict", why_not_together([Seat(**json.loads(x)) for x in said]))
    verdict = store.get(f"{prefix}/verdict").decode()
    if verdict:
        raise MeshError(verdict)


def why_not_together(seats: Sequence[Seat]) -> str:
    """The reason why ranks cannot compute on these devices together, with a remedy; "" where they can.

    Args:
        seats: the device of each rank.
    """
    other = next((rank for rank, seat in enumerate(seats) if seat.kind != seats[0].kind), None)
    if other is not None:
        return (
            f"Rank 0 computes on {seats[0].device} of {seats[0].machine}, and rank {other} on {seats[other].device} of "
            f"{seats[other].machine}. Move the model alike on all ranks, or pass device='cpu' to compute on processors."
        )
    sharing = dict[str, list[int]]()
    for rank, seat in enumerate(seats):
        sharing.setdefault(seat.identity, []).append(rank)
    for identity, ranks in sharing.items():
        if identity and len(ranks) > 1:
            beside = [seat for seat in seats if seat.machine == seats[ranks[0]].machine]
            return _shared(ranks, seats[ranks[0]], len(beside))
    return ""


def _shared(ranks: Sequence[int], seat: Seat, beside: int) -> str:
    """The error for ranks that compute on one device, on a machine that runs this many ranks."""
    said = (
        f"Ranks {' and '.join(map(str, ranks[:2]))}{' and others' if len(ranks) > 2 else ''} compute on one device, "
        f"{seat.device} of {seat.machine}, but each rank needs a device of its own. "
    )
    if beside > seat.count:
        return said + (
            f"{beside} ranks run on this machine, which has {counted(seat.count, f'{seat.kind} device')}: start "
            f"{seat.count} (--nproc-per-node {seat.count}), or pass device='cpu' to train on processors."
        )
    line = 'torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))'
    return said + (
        f"Write {line} before the model is moved; or leave out device= and the line that moves the model: then each "
        "rank moves its part to the device of its LOCAL_RANK."
    )


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def check_world(mesh: Mesh) -> None:
    """Raises MeshError with both numbers unless the mesh has as many ranks as run."""
    if mesh.ranks != world_size():
        raise MeshError(
            f"The mesh {mesh} has {mesh.ranks} ranks, but {world_size()} run here. Start as many with "
            f"torchrun --nproc-per-node {mesh.ranks}, or give a mesh of {world_size()}."
        )


def make_world(
    mesh: Mesh,
    device: torch.device,
    device_mesh: DeviceMesh | None,
    timeout_seconds: float | None = None,
    meeting: Meeting | None = None,
) -> World:
    """The process groups of the mesh, and between replicas; a single rank without a default group needs none."""
    if mesh.occupied is not None:
        return World.with_vacant_places(mesh, device)
    whole = mesh if meeting is None else mesh_of_all(mesh, meeting)
    if dist.is_initialized() and not (device_mesh and axes_of_device_mesh(device_mesh) == whole):
        device_mesh = _device_mesh(whole, device)
    if meeting is not None:
        return World.of_replica(mesh, device, device_mesh, meeting)
    if PIPELINE_AXIS in mesh.names:
        assert device_mesh is not None, "check_world has found the ranks of the mesh"
        return World.with_pipeline(mesh, device, device_mesh, timeout_seconds)
    return World(mesh, device, device_mesh)


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The process groups of a mesh: dims in the order of its axes, ranks as the axes are placed."""
    _torch.warn_once_of_redistribution()
    if mesh.placed == mesh:
        return init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.names)
    return DeviceMesh(device.type, _numbers(mesh), mesh_dim_names=mesh.names)


def axes_of_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The axes of a device mesh in their order, and their placement, which its ranks tell.

    Raises MeshError for a device mesh without names, and for ranks that are not numbered row-major over its dims taken
    in some order.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError("The DeviceMesh has no axis names; make it with init_device_mesh(..., mesh_dim_names=('dp',)).")
    axes = tuple(zip(names, device_mesh.shape, strict=True))
    return _axes(axes, _torch.ranks_of(device_mesh))


@functools.cache
def _axes(axes: tuple[tuple[str, int], ...], ranks: tuple[int, ...]) -> Mesh:
    """The mesh with these axes, on which these ranks lie row-major over the axes."""
    number = {rank: i for i, rank in enumerate(sorted(ranks))}  # a part of a larger mesh has gaps
    strides, stride, steps = dict[str, int](), 0, 1
    for name, size in reversed(axes):
        if size > 1:
            stride = number[ranks[steps]] - number[ranks[0]]
        strides[name] = stride  # an axis of one rank lies anywhere: here beside the next axis
        steps *= size
    mesh = Mesh(axes, tuple(sorted(dict(axes), key=lambda name: -strides[name])))
    expected = [mesh.rank_at(place) for place in itertools.product(*map(range, mesh.sizes))]
    if [number[rank] for rank in ranks] != expected:
        raise MeshError(
            f"The ranks of the DeviceMesh are {list(ranks)}: along an axis their numbers are not equally spaced, as "
            f"they are in init_device_mesh, also with permuted dims. With the axes {mesh} they would be "
            f"{[sorted(ranks)[i] for i in expected]}."
        )
    return mesh


def _numbers(mesh: Mesh) -> torch.Tensor:
    """The global ranks at all positions along the axes, in the shape of the mesh."""
    placed = mesh.placed
    ranks = torch.arange(mesh.size).view(placed.sizes)
    return ranks.permute([placed.index(name) for name in mesh.names])


def refuse_unlike(own: Mapping[str, Sequence[str]], parts: Callable[[], Sequence[str]] = list) -> None:
    """Raises MeshError, on all ranks with one sentence, where a rank says another thing than the first one.

    Every rank calls it. A rank that dies before it comes is a PeerError on the others.

    Args:
        own: subject -> what this rank says of it, such as `{"options": ["--recipe ddp"]}`; subjects alike on all ranks.
        parts: lines of what the subject `model` stands for, which are compared where the subject differs.
    """
    if not dist.is_initialized() or world_size() == 1 or dist.get_backend() == "fake":  # which imagines the other ranks
        return
    ranks = AllRanks("Comparing the ranks")
    with _waiting_for_plans():  # ranks capture a model for as long as the slowest of them
        found = ranks.everyones(dict(own))
    unlike = [
        (rank, subject) for rank, said in enumerate(found) for subject in own if said[subject] != found[0][subject]
    ]
    if not unlike:
        return
    rank, subject = unlike[0]
    first, other = found[0][subject], found[rank][subject]
    if subject == "model":
        lines = ranks.everyones(list(parts()))
        pairs = itertools.zip_longest(lines[0], lines[rank], fillvalue="nothing more")
        first, other = next(([a], [b]) for a, b in pairs if a != b)
    raise unlike_ranks(rank, subject, first, other, len({each for each, _ in unlike}))


def unlike_ranks(rank: int, subject: str, first: Sequence[str], other: Sequence[str], count: int) -> MeshError:
    """The error for ranks that differ.

    Args:
        rank: number of the first rank that differs.
        subject: name of what differs, such as "options".
        first: parts that rank 0 has of that.
        other: parts that the rank has of it.
        count: number of ranks that differ.
    """
    its_first, its_other = _parts_that_differ(first, other)
    return MeshError(
        f"Rank {rank} differs from rank 0 in its {subject}: it has {its_other}, and rank 0 has {its_first}"
        f"{f' ({count} ranks differ)' if count > 1 else ''}. Start all ranks with the same "
        "code, versions, environment, options and model; what depends on the rank must not change them."
    )


def _parts_that_differ(one: Sequence[str], two: Sequence[str]) -> tuple[str, str]:
    """What each of two lists has that the other one lacks, as text.

    >>> _parts_that_differ(["--mesh dp=2", "--recipe ddp"], ["--mesh dp=2"])
    ('--recipe ddp', 'nothing else')
    """
    return (
        ", ".join(each for each in one if each not in two) or "nothing else",
        ", ".join(each for each in two if each not in one) or "nothing else",
    )


def agreed(make: Callable[[], Plan]) -> Plan:
    """The plan that the first rank makes, on every rank.

    An error of the first rank is raised on every rank, so that none waits for a plan that will not come:
    as it is on the first one, and elsewhere as an AutoparError that names it.
    """
    if world_size() == 1:
        return make()
    made: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made = [json.dumps(make().to_json())]
        except Exception as error:
            failure, made = error, [_said(error)]
    with _waiting_for_plans():
        dist.broadcast_object_list(made, src=0)
    if failure is not None:
        raise failure
    if isinstance(made[0], str):
        return Plan.from_json(json.loads(made[0]))
    name, text = made[0]
    raise getattr(errors, name)(text)


def _waiting_for_plans() -> AbstractContextManager[None]:
    """Context in which ranks wait for each other as long as planning takes."""
    assert dist.group.WORLD is not None, "there are other ranks"
    return _torch.waiting_longer(dist.group.WORLD, _PLANNING_SECONDS)


def _said(error: Exception) -> tuple[str, str]:
    """The name and the text of a public error; any other error is reported as an AutoparError."""
    if isinstance(error, AutoparError):
        return type(error).__name__, str(error)
    return "AutoparError", f"Planning failed on rank 0: {type(error).__name__}: {error}"
