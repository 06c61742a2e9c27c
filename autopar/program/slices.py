"""Marks in a program's graph the tensors of which blocks keep only a slice for backward.

    b = f(w1, a)   ->   a_1 = kept(a, "layers.1.input"); b = f(w1, a_1)

A note stands where a block first takes the tensor, in the graph and not in a table, so that it goes with the
block when the program is cut into stages. `Program.slices` maps each name to its slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.flow import Flow
from autopar.cost_model.memory import KeptSlice
from autopar.ir import CollectiveCall, Dims, Graph, Layout, Mesh, Plan, calls
from autopar.ops.saving import kept
from autopar.pipeline.saved_values import SavedValues


@dataclass(frozen=True)
class SavedSlice:
    """The slice of a tensor that stays for backward.

    Attributes:
        dims: factors of the tensor's dims.
        layout: layout of the tensor in forward, R in place of V.
        slice_layout: layout of what stays.
    """

    dims: Dims
    layout: Layout
    slice_layout: Layout

    def cut(self, mesh: Mesh) -> tuple[CollectiveCall, ...]:
        """The steps from the tensor to the slice, none of which sends anything."""
        return calls(self.dims, self.layout, self.slice_layout, mesh)

    def back(self, mesh: Mesh) -> tuple[CollectiveCall, ...]:
        """The steps from the slice to the tensor: an all-gather for each axis."""
        return calls(self.dims, self.slice_layout, self.layout, mesh)


def note_slices(module: fx.GraphModule, graph: Graph, plan: Plan) -> dict[str, SavedSlice]:
    """Notes in a program's graph what blocks keep in slices, and returns the slices by name.

    Every call has its block in `meta["block"]`, and where it holds a tensor of the graph in a layout, both in
    `meta["holds"]`.
    """
    slices = SavedValues(graph, plan).slices
    of: dict[tuple[str, Layout], dict[int, KeptSlice]] = {}
    for each in slices:
        of.setdefault(each.memory, {})[each.block] = each
    saved = Flow(graph, plan).saved
    for node in list(module.graph.nodes) if slices else ():
        memory = saved.memory(*node.meta["holds"]) if "holds" in node.meta else None
        if memory in of:
            _note(module.graph, node, of[memory])
    module.recompile()
    return {
        each.name: SavedSlice(graph.tensors[each.tensor].dims, each.layout, each.slice_layout)
        for each in slices
    }


def _note(graph: fx.Graph, node: fx.Node, slices: Mapping[int, KeptSlice]) -> None:
    """Puts a note before the first call of every block that takes the tensor; a block without a slice keeps it all.

    A block's slice is of the tensor that it takes first; a view of the same memory needs no note.
    """
    tensor, _ = node.meta["holds"]
    for block, users in _users_by_block(graph, node).items():
        found = slices.get(block)
        if block == node.meta.get("block") if found is None else found.tensor != tensor:
            continue
        with graph.inserting_before(users[0]):
            note = graph.call_function(kept, (node, found.name if found else ""))
        note.meta |= {"origin": users[0].meta["origin"], "block": block, "again": False}
        for user in users:
            user.replace_input_with(node, note)


def _users_by_block(graph: fx.Graph, node: fx.Node) -> dict[int, Sequence[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for user in graph.nodes:
        if user in node.users and "block" in user.meta:
            found.setdefault(user.meta["block"], []).append(user)
    return dict(found)
