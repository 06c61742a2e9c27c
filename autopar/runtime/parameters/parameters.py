"""Parameters at rest and in use.

At rest every parameter is a DTensor in its storage layout, swapped into the user's own Parameter object,
so that an earlier optimizer still holds the right object. In use it is a plain leaf in its resident layout and, under a
mixed-precision policy, in the policy's element type:

    storage == resident       the leaf is the stored shard itself (DDP, tensor parallel, ZeRO-3)
    storage -> all-gathers    a full buffer lives between steps; the stored shard is a view of it, so that
                              the optimizer updates its part in place (ZeRO-1 and 2)
    anything else             converted into a temporary at the start of every step; so is what is cast,
                              before it is gathered, and what is stored in another tier, which is moved to
                              the device after it was cast and before it is gathered

The leaf of a parameter whose resident layout is in another tier lies there, too; `gather.py` brings it to the device.

Gradients accumulate in a leaf in the element type that they are reduced in, and land in `.grad` of the
parameter in its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autopar import _torch
from autopar.errors import CaptureError
from autopar.ir import Layout, Mesh, O, ParameterPlan, R, State, Tier, V, local_shape, part_shape
from autopar.ir.call import FIT
from autopar.ir.tier import is_farther
from autopar.ops.sharding import shard
from autopar.program.program import Program, TensorSpec
from autopar.runtime.collectives.hops import Hop, Route, cast, moving, route, signature, transposed
from autopar.runtime.collectives.transfer import Transfer, travel
from autopar.runtime.ranks.world import World


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """DTensor's words for a storage layout.

    On a mesh with vacant places they are of one axis of all ranks, of which one rank or each has the tensor.
    """
    if mesh.occupied is not None:
        return (_placement(_among_ranks(layout, mesh)),)
    return tuple(map(_placement, layout))


def _among_ranks(layout: Layout, mesh: Mesh) -> State:
    if all(state == R for state in layout):
        return R
    assert all(state.kind == "O" for state in layout), (layout, mesh)
    return O(mesh.rank_at([state.owner for state in layout]))


def _placement(state: State) -> Placement:
    assert state.kind in "RSO", state
    if state.kind == "O":
        return _torch.Owned(state.owner)
    return Shard(state.dim) if state.kind == "S" else Replicate()


@dataclass
class ParameterAtRest:
    """A parameter at rest.

    Attributes:
        spec: name, global shape and dims.
        parameter: the user's object; a DTensor unless the world is a single rank.
        storage: its layout.
        tier: memory of the stored shard.
        gathered: the layout of `full`, with R for V.
        full: the buffer that the stored shard is a view of, if one is kept.
        part: the stored shard as a view of `full`.
    """

    spec: TensorSpec
    parameter: nn.Parameter
    storage: Layout
    tier: Tier
    gathered: Layout
    full: Tensor | None
    part: Tensor | None

    @property
    def local(self) -> Tensor:
        """The stored shard."""
        return _torch.local_tensor(self.parameter)

    def surround(self) -> None:
        """Makes a new buffer around a stored shard that someone has replaced, and may have kept a view of before."""
        assert self.full is not None and self.part is not None, "a buffer is kept"
        before, local = self.part, self.local
        self.full = self.full.clone(memory_format=torch.contiguous_format)
        self.part = self.full.as_strided(before.shape, before.stride(), before.storage_offset())
        self.part.copy_(local)
        local.set_(self.part)  # type: ignore[call-overload]  # who has assigned it sees training, as in torch
        _torch.set_local_tensor(self.parameter, self.part)


class ParameterStore:
    """All parameters of a model at rest, by name; tied ones once.

    Attributes:
        world: the ranks.
        kept: the parameters that this rank holds.
        elsewhere: stand-ins for the parameters of other pipeline stages.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept: dict[str, ParameterAtRest] = {}
        self.elsewhere: dict[str, nn.Parameter] = {}

    def fill(
        self, program: Program, model: nn.Module, values: Iterable[tuple[str, Tensor]], held: Container[str]
    ) -> None:
        """Cuts full values, one at a time, and swaps them into the model's parameters; their gradients are cut alike.

        Parameters that the program does not use are stored replicated. Only those `held` are kept.
        """
        specs = {spec.name: spec for spec in program.parameters}
        parameters = dict(model.named_parameters())
        replicated = (R,) * len(self.world.mesh.axes)
        for name, value in values:
            if name in held:
                spec = specs.get(name) or _unused(name, value, replicated)
                is_used = name in specs
                how = program.storage(name) if is_used else ParameterPlan(replicated, replicated)
                self._keep(spec, how, parameters[name], value)
            # Else this name would hold the full value while the next one is made.
            del value

    @property
    def whole_bytes(self) -> int:
        """Bytes of the parameters as if none was cut, which all ranks of a stage find alike."""
        return sum(each.parameter.numel() * each.local.element_size() for each in self.kept.values())

    def replaced(self, model: nn.Module) -> list[str]:
        """The names of the model's parameters that are other objects than those at rest under their names."""
        known = {name: each.parameter for name, each in self.kept.items()} | self.elsewhere
        return [name for name, parameter in model.named_parameters() if known.get(name) is not parameter]

    def _keep(self, spec: TensorSpec, how: ParameterPlan, parameter: nn.Parameter, value: Tensor) -> None:
        mesh, rank, storage = self.world.mesh, self.world.rank, how.storage
        gathered = without_v(spec.layout)
        full = part = None
        keeps_full = value.dtype == spec.dtype and how.tier == "device"
        hops = route(spec.dims, storage, gathered, mesh, rank=rank)
        if keeps_full and _gathers(hops):
            full = shard(value, spec.dims, gathered, mesh, rank).clone(memory_format=torch.contiguous_format)
            part = cut(full, hops, self.world)
        own = shard(value, spec.dims, storage, mesh, rank)
        local = part if part is not None else own.clone(memory_format=torch.contiguous_format)
        if how.tier != "device":
            local = self.world.tiers.keep(own, how.tier)
        gradient, parameter.grad = parameter.grad, None
        self._swap(parameter, local, spec, how)
        if gradient is not None:  # the step adds to it
            whole = _torch.local_tensor(gradient).to(self.world.device)
            part_of_it = shard(whole, spec.dims, storage, mesh, rank).to(local.device, copy=True)
            _torch.accumulate_gradient(parameter, part_of_it.contiguous())
        self.kept[spec.name] = ParameterAtRest(spec, parameter, storage, how.tier, gathered, full, part)

    def _swap(self, parameter: nn.Parameter, local: Tensor, spec: TensorSpec, how: ParameterPlan) -> None:
        stored: Tensor = local
        if self.world.device_mesh is not None:
            stored = _torch.dtensor(local, self.world.device_mesh, placements(how.storage, self.world.mesh), spec.shape)
        if stored is local and parameter.device == local.device and parameter.dtype == local.dtype:
            # Unlike a swap, that is possible while something holds on to it, as an earlier capture does.
            parameter.data = local
            return
        new = _torch.parameter_of(stored, requires_grad=parameter.requires_grad)
        if how.tier == "nvme":
            _torch.make_states_by(self.world.tiers.empty_in_file, new)
        try:
            torch.utils.swap_tensors(parameter, new)
        except RuntimeError as error:
            raise CaptureError(
                f"Parameter {spec.name} cannot be made a DTensor in place, because something holds on to it "
                f"({error}). Compile the model before anything else traces or runs it."
            ) from error


def _unused(name: str, value: Tensor, layout: Layout) -> TensorSpec:
    dims = tuple((size,) for size in value.shape)
    return TensorSpec(name, dims, tuple(value.shape), value.dtype, layout)


def without_v(layout: Layout) -> Layout:
    """The layout with R for V, which differ in gradients alone."""
    return tuple(R if state == V else state for state in layout)


def _gathers(hops: Route) -> bool:
    return bool(hops) and all(
        hop.name == FIT or (hop.name == "all_gather" and hop.viewed == hop.before) for hop in hops
    )


def cut(full: Tensor, hops: Route, world: World) -> Tensor:
    """The part of a gathered tensor that this rank gave, as a view; the hops are gathers and fits."""
    position = world.mesh.coordinates(world.rank)
    for hop in reversed(hops):
        if hop.name == FIT or (hop.is_elsewhere and hop.dims[0] == 0):
            continue  # a rank that has nothing of the tensor has no rows to cut
        width, there = hop.before[hop.dims[0]], full.shape[hop.dims[0]]
        start = min(position[hop.axis] * width, there)
        full = full.narrow(hop.dims[0], start, min(width, there - start))
    return full


class Residents:
    """The parameters of one program in their resident layouts, in the order of its arguments.

    Attributes:
        specs: name, shape and layout of every leaf.
        leaves: what the program takes and gradients accumulate in; valid after `refresh`.
        returns: the route of every leaf's gradient back to its storage layout.
    """

    def __init__(self, program: Program, store: ParameterStore, *, bucket_bytes: int) -> None:
        self.store, self.world, self._bucket_bytes = store, store.world, bucket_bytes
        self.kept = [store.kept[spec.name] for spec in program.parameters]
        self.specs = program.parameters
        self._layouts = [spec.layout for spec in program.parameters]
        self._by_rows = [program.storage(spec.name).by_rows for spec in program.parameters]
        routes = [self._route(i) for i in range(len(self.kept))]
        self._routes = routes
        self.returns = [transposed(hops) for hops in routes]
        self._moving = [i for i, hops in enumerate(routes) if signature(hops)]
        self._settling = [i for i in range(len(routes)) if i not in self._moving or self._keeps(i)]
        largest = [self.largest(k.spec, k.storage, k.local.dtype) for k in self.kept]
        self._batches = batches(self._moving, [signature(r) for r in routes], largest, bucket_bytes)
        self.leaves: list[Tensor] = [torch.empty(0)] * len(self.kept)
        # Where the shards that leaves were made of lie. A tensor without elements, of another owner, lies at 0.
        self._sources: Sequence[int | None] = [None] * len(self._settling)

    def _route(self, i: int) -> Route:
        """From the stored shard to the leaf: a cast, moves between tiers, and what gathers it.

        Casts are done no farther away than on the host, and collectives on the device. The gradient is cast to the
        type that it is reduced in first, and to that of the stored shard last.
        """
        kept, spec = self.kept[i], self.specs[i]
        mesh = self.world.mesh
        converting = route(
            kept.spec.dims, kept.storage, spec.layout, mesh, rank=self.world.rank, back_by_rows=self._by_rows[i]
        )
        stored, casts = kept.local.dtype, not kept.local.dtype == spec.dtype == spec.gradient_dtype
        found = _Way(part_shape(kept.spec.dims, kept.storage, mesh, self.world.rank), kept.tier)
        if casts:
            found.approach("host")
            found.take(cast(found.shape, stored, spec.dtype, found.tier))
        if converting:
            found.approach("device")
            found.take(*converting)
        found.approach(spec.tier)
        if casts:
            found.take(cast(found.shape, spec.gradient_dtype, spec.dtype, found.tier))
        found.withdraw(spec.tier)
        return found.hops

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of a leaf on this rank, of a parameter that the rank holds."""
        spec, mesh = self.kept[i].spec, self.world.mesh
        return part_shape(spec.dims, self._layouts[i], mesh, self.world.rank)

    def largest(self, spec: TensorSpec, layout: Layout, dtype: torch.dtype) -> Tensor:
        """A tensor without memory as large as on the rank that holds most: all ranks need the same batches."""
        shape = local_shape(spec.dims, layout, self.world.mesh)
        return torch.empty(shape, dtype=dtype, device="meta")

    @torch.no_grad()
    def refresh(self) -> bool:
        """Updates every leaf from the stored shards; returns whether any leaf is a new tensor."""
        changed = self._settle_moved()
        under_way: list[tuple[list[int], Transfer]] = []
        for batch in self._batches:
            under_way.append((batch, self._start(batch)))
            if len(under_way) > 1:  # one moves while another is unpacked: no more memory than two need
                changed |= self._land(*under_way.pop(0))
        for batch, transfer in under_way:
            changed |= self._land(batch, transfer)
        return changed

    def _settle_moved(self) -> bool:
        """Points leaves at stored shards that lie elsewhere by now; returns whether there are any."""
        addresses = _torch.local_addresses(self.kept[i].parameter for i in self._settling)
        if addresses == self._sources:
            return False
        for i, now, before in zip(self._settling, addresses, self._sources, strict=True):
            if now != before:
                self._settle(i, self.kept[i])
        self._sources = addresses
        return True

    def _land(self, batch: list[int], transfer: Transfer) -> bool:
        """Puts gathered values where they belong."""
        for i, value in zip(batch, transfer.wait(), strict=True):
            full = self.kept[i].full
            if full is not None and self._keeps(i):
                full.copy_(value)
            else:
                self._set_leaf(i, value)
        return not all(self._keeps(i) for i in batch)

    def copy_at_rest(self) -> None:
        """Gives trained parameters copies of their values; leaves keep the tensors that they were made of."""
        for kept in self.kept:
            if kept.parameter.requires_grad:
                _torch.set_local_tensor(kept.parameter, kept.local.clone())

    def release(self) -> None:
        """Frees the leaves that are temporaries of one step, or of one forward."""
        for i in self._moving:
            if not self._keeps(i):
                self.leaves[i] = torch.empty(0)

    def differentiable(self) -> list[Tensor]:
        """The resident tensors as functions of the stored parameters, for a forward under autograd."""
        return [
            travel(_torch.differentiable_local(kept.parameter), hops, self.world)
            for kept, hops in zip(self.kept, self._routes, strict=True)
        ]

    def _keeps(self, i: int) -> bool:
        full = self.kept[i].full
        is_alike = full is not None and full.dtype == self.specs[i].dtype
        return is_alike and without_v(self._layouts[i]) == self.kept[i].gathered

    def _settle(self, i: int, kept: ParameterAtRest) -> None:
        """Points a leaf at the stored shard or its full buffer.

        A program runs only while the same parameters are frozen as at its capture, see
        `autopar.capture.guards.structure`, so that a leaf keeps its flag.
        """
        local = kept.local
        if kept.full is None or not self._keeps(i):
            self._set_leaf(i, local)
        else:
            assert kept.part is not None
            if kept.part.data_ptr() != local.data_ptr():
                kept.surround()
            self._set_leaf(i, kept.full)

    def _set_leaf(self, i: int, value: Tensor) -> None:
        leaf = value.detach().requires_grad_(self.kept[i].parameter.requires_grad)
        if leaf.dtype != self.specs[i].gradient_dtype:
            leaf.grad_dtype = self.specs[i].gradient_dtype
        self.leaves[i] = leaf

    def _start(self, batch: Sequence[int]) -> Transfer:
        return Transfer([self._routes[i] for i in batch], [self.kept[i].local for i in batch], self.world)


class _Way:
    """A route as it is put together, and where it has led so far."""

    def __init__(self, shape: tuple[int, ...], tier: Tier) -> None:
        self.hops: Route = ()
        self.shape, self.tier = shape, tier

    def take(self, *hops: Hop) -> None:
        """Adds hops that stay in a tier."""
        self.hops, self.shape = (*self.hops, *hops), hops[-1].after

    def approach(self, tier: Tier) -> None:
        """Adds the moves to a tier that is nearer to the device, if it is."""
        if is_farther(self.tier, tier):
            self.hops, self.tier = (*self.hops, *moving(self.shape, self.tier, tier)), tier

    def withdraw(self, tier: Tier) -> None:
        """Adds the moves to a tier that is farther from the device, if it is."""
        self.hops, self.tier = (*self.hops, *moving(self.shape, self.tier, tier)), tier


def batches(
    indices: Iterable[int],
    signatures: Sequence[tuple[tuple[str, int], ...]],
    tensors: Sequence[Tensor],
    bucket_bytes: int,
) -> list[list[int]]:
    """Indices in order, in runs of equal signature and dtype, each of about `bucket_bytes`."""
    open_runs: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    result: list[list[int]] = []
    for i in indices:
        key = (signatures[i], tensors[i].dtype)
        if key not in open_runs or filled[key] >= bucket_bytes:
            open_runs[key], filled[key] = [], 0
            result.append(open_runs[key])
        open_runs[key].append(i)
        filled[key] += tensors[i].nbytes
    return result
