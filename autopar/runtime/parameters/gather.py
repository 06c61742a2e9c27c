"""ZeRO-3 and ZeRO-Infinity inside a step: parameters gathered around their use, and again in backward.

A parameter that lies in another tier during a step is brought to the device by the same groups, before it is gathered
or, where it is used as it lies, in place of that; its gradient is reduced and taken back there.

[Note: gathered again] Autograd would keep a gathered parameter from its use in forward to its use in
backward. While the forward runs, saved-tensor hooks replace every saved tensor that lies in the storage of
a gathered parameter (itself, or a view such as a transpose) by a handle; what backward unpacks is a view of
the same strides on a second gather. That lives until the backward of its group has run.

A recomputed call (`recompute.py`) takes a gathered parameter from such a handle, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.ir import Mesh
from autopar.ops.collectives import Collective, fitted
from autopar.ops.marks import is_move
from autopar.passes.group_gathers import Chain, find_gathers, group_gathers
from autopar.runtime.collectives.hops import Hop, Route, cast, fit, moving, signature, transposed
from autopar.runtime.collectives.transfer import Transfer, travel
from autopar.runtime.failures.failing_op import naming_tensors
from autopar.runtime.ranks.world import World

_MOST_UNDER_WAY = 2  # reductions in flight; each keeps the full gradients of a group


class Sources(Protocol):
    """The parameters of a graph, such as `Residents`: their shards, and the leaves that gradients go to."""

    @property
    def kept(self) -> Sequence[Any]: ...

    @property
    def specs(self) -> Sequence[Any]: ...

    @property
    def leaves(self) -> list[Tensor]: ...

    def shape(self, i: int) -> tuple[int, ...]: ...


class Gathers:
    """The gather groups of one program, and the gathers that are running in the current micro-batch.

    Args:
        residents: the parameters.

    Attributes:
        late: positions of the parameters whose gradients arrive here and not at their leaf.
        in_step: whether gradients are kept for `finish` instead of being returned to autograd.
        mutes: whether the gradients of the forward that runs are replaced by zeros (`autopar.runtime.execute.muted`).
    """

    def __init__(self, residents: Sources, world: World) -> None:
        self.residents, self.world = residents, world
        self.groups: list[GatherGroup] = []
        self.in_step = self.mutes = False
        self._ahead: tuple[int, Transfer] | None = None
        self._calls: list[_Call] = []
        self._saved: dict[int, tuple[Any, _Call, int]] = {}  # storage -> weak reference, gather, position
        self._under_way: list[tuple[list[int], Transfer]] = []

    @property
    def late(self) -> frozenset[int]:
        return frozenset(i for group in self.groups for i in group.members)

    def install(self, module: fx.GraphModule, mesh: Mesh, bucket_bytes: int) -> None:
        """Finds and groups the gathers of a program whose collectives still name mesh axes."""
        specs = self.residents.specs
        reduced = {i for i, spec in enumerate(specs) if spec.gradient_dtype != spec.dtype}
        chains = find_gathers(module, len(specs), reduced)
        routes = {chain: self._route(chain, mesh) for chain in chains}

        def key(chain: Chain) -> object:
            there, back = signature(routes[chain]), signature(transposed(routes[chain]))
            parameter = self.residents.kept[chain.parameter].parameter
            spec = specs[chain.parameter]
            formats = spec.dtype, spec.gradient_dtype
            return there, back, formats, parameter.requires_grad

        def size_bytes(chain: Chain) -> int:
            return torch.Size(routes[chain][-1].after).numel() * specs[chain.parameter].dtype.itemsize

        def make(group: list[Chain]) -> nn.Module:
            made = GatherGroup(self, len(self.groups), [c.parameter for c in group], [routes[c] for c in group])
            self.groups.append(made)
            return made

        group_gathers(module, chains, key=key, size_bytes=size_bytes, make=make, bucket_bytes=bucket_bytes)

    def _route(self, chain: Chain, mesh: Mesh) -> Route:
        """The hops of a chain, with the cast that its gradient begins with."""
        spec = self.residents.specs[chain.parameter]
        hops = route_of(chain, self.residents.shape(chain.parameter), mesh)
        if spec.gradient_dtype == spec.dtype:
            return hops
        return (*hops, cast(hops[-1].after, spec.gradient_dtype, spec.dtype))

    # --- forward

    def watching(self) -> AbstractContextManager[Any]:
        """Inside it, autograd saves handles in place of gathered parameters; see [Note: gathered again]."""
        if not self.groups:
            return contextlib.nullcontext()
        self._calls, self._saved, self._ahead = [], {}, None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def open(self, group: GatherGroup, shards: Sequence[Tensor]) -> _Call:
        """Begins a forward's gather of a group."""
        ahead = self._ahead[1] if self._ahead is not None and self._ahead[0] == group.number else None
        call = _Call(self, group, [x.detach() for x in shards], ahead, self._calls)
        self._ahead = None
        self._calls.append(call)
        return call

    def opened(self, call: _Call, values: Sequence[Tensor]) -> None:
        """Notes the gathered tensors, and starts the next group's gather."""
        for position, value in enumerate(values):
            reference = _torch.storage_reference(value)
            self._saved[reference.cdata] = (reference, call, position)
        following = call.group.number + 1
        if self.in_step and following < len(self.groups):
            self._ahead = (following, self.groups[following].start(self.residents.leaves))

    def _pack(self, x: Tensor) -> Tensor | _Handle:
        _, call, position = self._saved.get(_torch.storage_key(x), (None, None, 0))
        if call is None:
            return x
        call.saved.add(position)
        return _Handle(call, position, SavedView.of(x))

    # --- backward

    def start_previous(self, call: _Call) -> None:
        """Starts the gather that backward will need after this one."""
        for earlier in reversed(call.run[: call.run.index(call)]):
            if earlier.saved and not earlier.is_behind:
                earlier.start_again()
                return

    def submit(self, call: _Call, gradients: Sequence[Tensor | None]) -> None:
        """Starts to reduce a group's gradients."""
        present = [i for i, g in enumerate(gradients) if g is not None]
        routes = [transposed(call.group.routes[i]) for i in present]
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._land(*self._under_way.pop(0))
        given = _owned([g for g in gradients if g is not None], routes)
        transfer = Transfer(routes, given, self.world)
        self._under_way.append(([call.group.members[i] for i in present], transfer))

    def finish(self) -> None:
        """After a backward: adds every reduced gradient to its leaf's."""
        while self._under_way:
            self._land(*self._under_way.pop(0))
        self._calls, self._saved = [], {}

    @torch.no_grad()
    def _land(self, parameters: list[int], transfer: Transfer) -> None:
        with self.naming("gradients", parameters):
            gradients = transfer.wait()
        for i, gradient in zip(parameters, gradients, strict=True):
            leaf = self.residents.leaves[i]
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def naming(self, what: str, parameters: Sequence[int]) -> AbstractContextManager[None]:
        """A context in which an error says whose values or gradients a collective carries."""
        return naming_tensors(what, [self.residents.specs[i].name for i in parameters])

    def forget(self) -> None:
        """Drops the state that a failed step has left."""
        self._under_way, self._calls, self._saved, self._ahead = [], [], {}, None


class GatherGroup(nn.Module):
    """Parameters that are gathered by one collective: shards in, full parameters out."""

    def __init__(self, owner: Gathers, number: int, members: list[int], routes: list[Route]) -> None:
        super().__init__()
        self.number, self.members, self.routes = number, members, routes
        self._owner = owner

    def start(self, leaves: Sequence[Tensor]) -> Transfer:
        """Starts to gather the group's own of all leaves."""
        return Transfer(self.routes, [leaves[i].detach() for i in self.members], self._owner.world)

    def forward(self, *shards: Tensor) -> tuple[Tensor, ...]:
        call = self._owner.open(self, shards)
        return _Gather.apply(call, *shards)


class _Call:
    """One gather of a group in forward, which can be repeated in backward.

    Attributes:
        saved: positions of the parameters that backward needs, which alone are gathered again.
        is_behind: whether a backward has passed; a second one through the same graph gathers when it arrives.
    """

    def __init__(
        self, owner: Gathers, group: GatherGroup, shards: list[Tensor], ahead: Transfer | None, run: list[_Call]
    ) -> None:
        self.owner, self.group, self.shards = owner, group, shards
        self.run = run  # all gathers of the same forward, of which several may be in flight
        self.saved: set[int] = set()
        self.is_behind, self.in_step, self.mutes = False, owner.in_step, owner.mutes
        self._ahead = ahead
        self._again: tuple[list[int], Transfer] | None = None
        self._values: dict[int, Tensor] | None = None

    def _start(self, positions: Sequence[int]) -> Transfer:
        routes = [self.group.routes[i] for i in positions]
        return Transfer(routes, [self.shards[i] for i in positions], self.owner.world)

    def gather(self) -> list[Tensor]:
        """The full parameters, for forward."""
        transfer, self._ahead = self._ahead or self._start(range(len(self.shards))), None
        with self.owner.naming("values", self.group.members):
            values = transfer.wait()
        self.owner.opened(self, values)
        return values

    def start_again(self) -> None:
        """Starts the gather for backward."""
        if self._again is None and self._values is None:
            wanted = sorted(self.saved)
            self._again = wanted, self._start(wanted)

    def restore(self, position: int) -> Tensor:
        """A full parameter, for backward."""
        if self._values is None:
            self.start_again()
            assert self._again is not None
            (wanted, transfer), self._again = self._again, None
            with self.owner.naming("values", [self.group.members[i] for i in wanted]):
                self._values = dict(zip(wanted, transfer.wait(), strict=True))
            self.owner.start_previous(self)
        return self._values[position]

    def release(self) -> None:
        """Frees the parameters that were gathered for backward, after the last use of every member of the group."""
        self.is_behind, self._values, self._again = True, None, None


@dataclass(frozen=True)
class SavedView:
    """The geometry of a view of a storage, and whether the view is conjugated or negated."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conjugated: bool
    is_negated: bool

    @classmethod
    def of(cls, x: Tensor) -> SavedView:
        """The view that a tensor is."""
        offset = int(x.storage_offset())
        return cls(x.dtype, tuple(x.shape), x.stride(), offset, x.is_conj(), x.is_neg())

    @torch.no_grad()
    def on(self, x: Tensor) -> Tensor:
        """The tensor that lies so in the storage of another."""
        if SavedView.of(x) == self:
            return x
        view = x.new_empty(0, dtype=self.dtype)
        view.set_(x.untyped_storage(), self.offset, self.shape, self.stride)
        view = view.conj() if self.is_conjugated else view
        return view.neg() if self.is_negated else view


@dataclass(frozen=True)
class _Handle:
    """A saved tensor that lies in a gathered parameter's storage."""

    call: _Call
    position: int
    view: SavedView


@torch.compiler.disable  # [Note: backward inside forward]
@torch.no_grad()
def _unpack(saved: Tensor | _Handle) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.view.on(saved.call.restore(saved.position))


class _Gather(torch.autograd.Function):
    """A group's gather, with the reduction of its gradients as backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(call.gather())

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        call.release()
        if call.in_step:
            if call.mutes:
                grads = tuple(None if g is None else torch.zeros_like(g) for g in grads)
            call.owner.submit(call, grads)
            return (None,) * (len(grads) + 1)
        present = [i for i, g in enumerate(grads) if g is not None]
        routes = [transposed(call.group.routes[i]) for i in present]
        given, world = [g for g in grads if g is not None], call.owner.world
        if torch.is_grad_enabled():  # of this backward a derivative will be taken
            reduced = [travel(g, hops, world) for g, hops in zip(given, routes, strict=True)]
        else:
            reduced = Transfer(routes, _owned(given, routes), world).wait()
        result: list[Tensor | None] = [None] * len(grads)
        for i, gradient in zip(present, reduced, strict=True):
            result[i] = gradient
        return None, *result


def _owned(gradients: Sequence[Tensor], routes: Sequence[Route]) -> list[Tensor]:
    """Gradients to work on: autograd may give the same tensor to others, and an all_reduce is done in place."""
    return [
        g.clone() if hops and hops[0].name == "all_reduce" else g for g, hops in zip(gradients, routes, strict=True)
    ]


def route_of(chain: Chain, shape: tuple[int, ...], mesh: Mesh) -> Route:
    """The hops that a chain's nodes make, from a local parameter of this shape."""
    hops: list[Hop] = []
    before = viewed = shape
    for node in chain.nodes:
        found = Collective.of(node)
        if is_move(node):
            hops += moving(shape, node.args[1], "device")  # type: ignore[arg-type]
            continue
        if found is None and node.target is not fitted:
            viewed = tuple(node.args[1])  # type: ignore[arg-type]
            continue
        if hops:
            hops[-1] = replace(hops[-1], after=viewed)
            before = viewed
        if found is None:
            fits = tuple(node.args[1])  # type: ignore[arg-type]
            hops.append(fit(before, viewed, fits, fits))
            viewed = fits
            continue
        hops.append(replace(Hop.of(found.call(mesh), viewed, mesh), before=before))
        viewed = hops[-1].result
    hops[-1] = replace(hops[-1], after=viewed)
    return tuple(hops)
