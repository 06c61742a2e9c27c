"""Marks in a program's graph the tensors of which each rank saves only a slice for backward.

    b = f(w1, a)   ->   a_1 = kept(a, "layers.1.input of block 1"); b = f(w1, a_1)

The mark is a call of `kept` before the first use of the tensor in a block. Because it is a node of the graph, it stays
with its block when the program is cut into stages. `Program.slices` maps the name in each mark to its slice. Because
a module that is called twice has two blocks with tensors of one name, marks have the index of the block, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.flow import Flow
from autopar.cost_model.memory import KeptSlice
from autopar.ir import CollectiveCall, Dims, Graph, Layout, Mesh, Plan, Tier, calls
from autopar.ops.marks import kept
from autopar.pipeline.saved_values import SavedValues

Gathered = tuple[tuple[int, ...], str]  # the dims of an all-gather, and its group


@dataclass(frozen=True)
class SavedSlice:
    """The slice of a tensor that is saved for backward.

    Attributes:
        dims: factors of the tensor's dims.
        layout: layout of the tensor in forward, with R in place of V.
        slice_layout: layout of the slice.
        tier: the memory that has the slice until backward.
    """

    dims: Dims
    layout: Layout
    slice_layout: Layout
    tier: Tier = "device"

    def cut(self, mesh: Mesh) -> tuple[CollectiveCall, ...]:
        """The steps from the tensor to the slice, which need no communication."""
        return calls(self.dims, self.layout, self.slice_layout, mesh)

    def back(self, mesh: Mesh) -> tuple[CollectiveCall, ...]:
        """The steps from the slice to the tensor: an all-gather for each axis."""
        return calls(self.dims, self.slice_layout, self.layout, mesh)


def note_slices(module: fx.GraphModule, graph: Graph, plan: Plan) -> dict[str, SavedSlice]:
    """Adds the marks to a program's graph, and returns the slices by the names in them.

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
        _mark(each): SavedSlice(graph.tensors[each.tensor].dims, each.layout, each.slice_layout, each.tier)
        for each in slices
    }


def gathered_again(slices: Mapping[str, SavedSlice], plan: Plan, groups: Mapping[str, str]) -> dict[str, Gathered]:
    """The slices from which one all-gather makes the saved tensor again, and that all-gather.

    There are none in a plan that recomputes, whose blocks gather their operands by themselves.

    Args:
        slices: the slices of a program by name.
        plan: its plan.
        groups: mesh axis -> name of its group in the graph.
    """
    found: dict[str, Gathered] = {}
    for name, each in slices.items() if plan.recompute == "none" else ():
        match each.back(plan.mesh):
            case (CollectiveCall(name="all_gather", before=None, after=None) as call,):
                if each.tier == "device":
                    found[name] = call.dims, groups[plan.mesh.names[call.axis]]
    return found


def _mark(each: KeptSlice) -> str:
    return f"{each.name} of block {each.block}"


def _note(graph: fx.Graph, node: fx.Node, slices: Mapping[int, KeptSlice]) -> None:
    """Adds a mark before the first call of every block that uses the tensor; the mark of a block without a slice is "".

    The slice is of the tensor that the block uses first. Other views of the same memory need no mark.
    """
    tensor, _ = node.meta["holds"]
    for block, users in _users_by_block(graph, node).items():
        found = slices.get(block)
        if block == node.meta.get("block") if found is None else found.tensor != tensor:
            continue
        with graph.inserting_before(users[0]):
            note = graph.call_function(kept, (node, _mark(found) if found else ""))
        note.meta |= {"origin": users[0].meta["origin"], "block": block, "recomputed": False}
        for user in users:
            user.replace_input_with(node, note)


def _users_by_block(graph: fx.Graph, node: fx.Node) -> dict[int, Sequence[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for user in graph.nodes:
        if user in node.users and "block" in user.meta:
            found.setdefault(user.meta["block"], []).append(user)
    return dict(found)
