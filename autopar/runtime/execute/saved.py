"""Saved tensors in slices or on the host: what autograd keeps of a tensor is this rank's part of it, where a plan says.

A program notes where a block takes such a tensor (`autopar.program.slices`). From there on saved-tensor hooks
replace every saved tensor that lies in its memory (itself, or a view) by a handle on the slice, and the tensor is
freed with its last use in forward. When backward unpacks the first handle, one all-gather makes the whole tensor
for all handles of the block. Each handle returns the tensor once and drops its reference.

    forward    x -> slice of x kept, handles in place of x       the slice is free: every rank has all of x
    backward   x = gather(slices); every handle gives x, or a view of it

The ranks of an axis run the same graph, so that they gather in the same order. A slice on the device is passed on to
the saved-tensor hooks that were active outside, because they may replace it too: those of
`autopar.runtime.parameters.gather` keep a gathered parameter as its shard, and a test's count bytes. A slice of the
tier host is copied there at once (`autopar.runtime.ranks.tiers`), and copied back before the gather.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.ir import CollectiveCall, Mesh
from autopar.ops.marks import kept
from autopar.program.slices import SavedSlice
from autopar.runtime.parameters.gather import SavedView
from autopar.runtime.ranks.tiers import Tiers

# Takes the local tensors of all ranks that this process runs, and the steps of a conversion.
Convert = Callable[[Sequence[Tensor], Sequence[CollectiveCall]], Sequence[Tensor]]
Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


class SlicedSaves:
    """The slices of one program: which tensors they are of in the current forward, and the hooks that keep them.

    Args:
        slices: the slices by name.
        mesh: the axes of a stage.
        convert: what runs a conversion.
        tiers: the memories besides the device's.
    """

    def __init__(self, slices: Mapping[str, SavedSlice], mesh: Mesh, convert: Convert, tiers: Tiers) -> None:
        self._slices, self._mesh, self._convert, self._tiers = slices, mesh, convert, tiers
        self._hooks: Hooks | None = None
        # Storage -> a reference that keeps its address from being used again, the slice in it, and of which rank.
        self._known: dict[int, tuple[object, _KeptParts, int]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which autograd saves handles in place of tensors that are saved as slices."""
        if not self._slices or not torch.is_grad_enabled():
            yield
            return
        self._known, self._hooks = {}, _torch.saved_tensor_hooks()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack(self._hooks)):
                yield
        finally:
            self._known, self._hooks = {}, None

    def note(self, ranks: Sequence[Tensor], name: str) -> None:
        """Registers the layout in which this tensor is saved from now on."""
        if self._hooks is None:
            return
        keys = [_torch.storage_key(x) for x in ranks]
        if any(self._name_of(key) == name for key in keys):
            return  # another tensor in the same memory was noted for the block
        for key in keys:
            self._known.pop(key, None)
        if not name or not all(map(_fills_storage, ranks)):
            return
        made = _KeptParts(name, self._cut(ranks, self._slices[name]), self._back(name, ranks))
        for rank, x in enumerate(ranks):
            reference = _torch.storage_reference(x)
            self._known[reference.cdata] = reference, made, rank

    def _name_of(self, key: int) -> str | None:
        return self._known[key][1].name if key in self._known else None

    @torch.no_grad()
    def _cut(self, ranks: Sequence[Tensor], how: SavedSlice) -> list[object]:
        assert self._hooks is not None, "a tensor is noted in a forward that is watched"
        parts = self._convert([x.detach() for x in ranks], how.cut(self._mesh))
        if how.tier == "device":
            return [self._hooks[0](x) for x in parts]
        return [self._tiers.from_device(x, how.tier) for x in parts]

    def _fetch(self, how: SavedSlice) -> Callable[[Any], Tensor]:
        """The function that brings a kept slice back to the device."""
        assert self._hooks is not None, "a tensor is noted in a forward that is watched"
        if how.tier == "device":
            return self._hooks[1]
        return functools.partial(self._tiers.to_device, tier=how.tier)

    def _back(self, name: str, ranks: Sequence[Tensor]) -> Callable[[Sequence[object]], list[Tensor]]:
        unpack, steps = self._fetch(self._slices[name]), self._slices[name].back(self._mesh)
        views = [SavedView.of(x) for x in ranks]

        def back(parts: Sequence[object]) -> list[Tensor]:
            with torch.no_grad():
                whole = self._convert([unpack(part) for part in parts], steps)
                return [_lying_as(x, view) for x, view in zip(whole, views, strict=True)]

        return back

    def _pack(self, x: Tensor) -> object:
        assert self._hooks is not None, "hooks are active in a forward that is watched"
        _, found, rank = self._known.get(_torch.storage_key(x), (None, None, 0))
        return self._hooks[0](x) if found is None else found.handle(rank, SavedView.of(x))

    @staticmethod
    def _unpack(hooks: Hooks) -> Callable[[object], Tensor]:
        @torch.compiler.disable  # [Note: backward inside forward]
        def unpack(saved: object) -> Tensor:
            return saved.get() if isinstance(saved, _SliceHandle) else hooks[1](saved)

        return unpack


class _KeptParts:
    """The saved slices of one tensor for one block, on the ranks of this process.

    Attributes:
        name: the block's name of the tensor.
    """

    def __init__(self, name: str, parts: list[object], back: Callable[[Sequence[object]], list[Tensor]]) -> None:
        self.name, self._parts, self._back = name, parts, back
        self._handles: list[weakref.ref[_SliceHandle]] = []

    def handle(self, rank: int, view: SavedView) -> _SliceHandle:
        """A handle for a saved tensor that lies so in the tensor's memory."""
        found = _SliceHandle(self, rank, view)
        self._handles.append(weakref.ref(found))
        return found

    def gather(self) -> None:
        """Gives every handle the whole tensor of its rank."""
        whole = self._back(self._parts)
        for handle in [found for reference in self._handles if (found := reference())]:
            handle.whole = whole[handle.rank]


class _SliceHandle:
    """Stands for a saved tensor until backward wants it, which takes it once."""

    def __init__(self, of: _KeptParts, rank: int, view: SavedView) -> None:
        self.rank = rank
        self.whole: Tensor | None = None
        self._of, self._view = of, view

    def get(self) -> Tensor:
        if self.whole is None:
            self._of.gather()
        whole, self.whole = self.whole, None
        assert whole is not None, f"{self._of.name} was not gathered"
        return self._view.on(whole)


def _fills_storage(x: Tensor) -> bool:
    """Whether a tensor is all that its memory holds, read as it is."""
    is_plain = not (x.is_conj() or x.is_neg())
    return is_plain and x.numel() * x.element_size() == x.untyped_storage().nbytes()


def _lying_as(x: Tensor, view: SavedView) -> Tensor:
    """A tensor of the same values with other strides, from the beginning of its storage."""
    if x.stride() == view.stride:
        return x.contiguous() if x.storage_offset() else x
    return torch.empty_strided(view.shape, view.stride, dtype=x.dtype, device=x.device).copy_(x)


class _Note(nn.Module):
    """A note of the program's graph, bound to the slices of a rank."""

    def __init__(self, saves: SlicedSaves, name: str) -> None:
        super().__init__()
        self._saves, self._name = saves, name

    def forward(self, x: Tensor) -> Tensor:
        self._saves.note([x], self._name)
        return x


def install_notes(module: fx.GraphModule, saves: SlicedSaves) -> None:
    """`kept(x, name)` -> `note(x)`, a call of a module that knows the slices."""
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=kept)):
        module.add_submodule(f"note_{number}", _Note(saves, node.args[1]))
        with module.graph.inserting_before(node):
            bound = module.graph.call_module(f"note_{number}", (node.args[0],))
        bound.meta = dict(node.meta)
        node.replace_all_uses_with(bound)
        module.graph.erase_node(node)
    module.recompile()


def converter(mesh: Mesh, groups: Mapping[str, str], rank: int) -> Convert:
    """Makes the function that runs conversions on this rank's tensors.

    Args:
        mesh: the axes.
        groups: axis name -> the c10d name of its group.
        rank: this rank's number in the mesh.
    """

    def convert(ranks: Sequence[Tensor], steps: Sequence[CollectiveCall]) -> Sequence[Tensor]:
        (x,) = ranks
        for call in (step.on(rank) for step in steps):
            x = x if call.before is None else x.reshape(call.before)
            name, size = mesh.axes[call.axis]
            op = _torch.autopar_op(call.name)
            x = op(x, list(call.dims), size, groups[name], call.backward)
            x = x if call.after is None else x.reshape(call.after)
        return [x]

    return convert
