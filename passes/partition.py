"""The captured graph and a plan -> the graph that one rank runs.

Every op runs on local shards, after its operands are converted to the layouts that its choices need. All consumers
that need a tensor in one layout share one conversion, so that autograd sums their gradients before the single
collective in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autopar.analysis.factors import Analysis
from autopar.capture.captured import Captured
from autopar.ir import (
    EXCHANGED,
    CollectiveCall,
    Layout,
    Mesh,
    Plan,
    R,
    Tier,
    calls_between,
    has_owner,
    local_shape,
    nesting_of,
    operand_layouts,
    parts_of,
    plain,
    result_layouts,
    split_counts,
    split_factors,
)
from autopar.ir.call import FIT
from autopar.ops import collectives, random  # noqa: F401  (they define torch.ops.autopar)
from autopar.ops.alone import Alone, owners_of
from autopar.ops.collectives import Collective, fitted, result_shape
from autopar.ops.marks import to_device
from autopar.ops.nodes import is_getitem, output_nodes, tensor_operands, tensor_results
from autopar.ops.ring import Ring
from autopar.passes.group_gathers import MOVING

aten = torch.ops.aten


def partition(captured: Captured, analysis: Analysis, plan: Plan) -> tuple[fx.GraphModule, tuple[Layout, ...]]:
    """Builds the graph that each rank runs on its local tensors; returns it with the layouts of its outputs.

    Its placeholders are the tensor placeholders of the captured graph, in the same order: parameters in their resident
    layouts, buffers and constants replicated, inputs in the layouts of the plan. A parameter that is not on the device
    in a step goes through a `to_device` for every layout that it is used in. Its outputs are those of the captured
    graph: the loss and the new values of buffers replicated, the others without partial sums (P). Collectives name
    mesh axes instead of process groups.

    Every call has in `meta["origin"]` the name of the captured op for which it was added, "" for the conversion of an
    output. A call that belongs to the conversion of a tensor's layout has the tensor's name in `meta["converts"]`, and
    the number of dims of its operand in `meta["ndim"]`. A node that is a tensor of the captured graph in some layout
    has both in `meta["holds"]`. A call that only some ranks run, because the tensors are in O, has an `Alone` in
    `meta["alone"]`. A call that runs on some rows of an op's operands has the number of this run in `meta["tile"]`.
    """
    return _Partitioner(captured, analysis, plan).run()


class _Partitioner:
    def __init__(self, captured: Captured, analysis: Analysis, plan: Plan) -> None:
        self.captured, self.analysis, self.plan = captured, analysis, plan
        self.mesh: Mesh = plan.mesh
        self.graph = fx.Graph()
        self.placed: dict[tuple[str, Layout], fx.Node] = {}  # one node per (tensor, layout)
        self.produced: dict[str, Layout] = {}
        self.far: dict[str, tuple[fx.Node, Tier]] = {}  # parameters outside the device in a step
        self.replicated: Layout = (R,) * len(self.mesh.axes)
        self.origin = ""  # the captured op that is being placed
        # Under torch.no_grad() no result of a call requires a gradient.
        calls = (n for n in captured.module.graph.nodes if n.op == "call_function")
        values = (node.meta.get("val") for node in calls)
        self.has_autograd = any(x.requires_grad for x in values if isinstance(x, torch.Tensor))

    def run(self) -> tuple[fx.GraphModule, tuple[Layout, ...]]:
        for node in self.captured.module.graph.nodes:
            if node.op == "placeholder":
                self._place_leaf(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._place_call(node)
        layouts = self._place_outputs()
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph), layouts

    # --- nodes

    def _place_leaf(self, node: fx.Node) -> None:
        if not isinstance(node.meta.get("val"), torch.Tensor):  # that is built into the graph
            return
        leaf, layout = self.graph.placeholder(node.name), self._leaf_layout(node.name)
        self._produce(node.name, layout, leaf)
        parameter = self.captured.parameters.get(node.name)
        if parameter and (tier := self.plan.parameters[parameter].resident_tier) != "device":
            self.far[node.name] = leaf, tier
            del self.placed[node.name, layout]  # each use brings it to the device anew

    def _leaf_layout(self, name: str) -> Layout:
        if name in self.captured.parameters:
            return self.plan.parameters[self.captured.parameters[name]].resident
        if name in self.captured.inputs:
            return self.plan.inputs[self.captured.inputs[name]]
        return self.replicated

    def _place_call(self, node: fx.Node) -> None:
        self.origin = node.name
        op = self.analysis.graph.by_name[node.name]
        labels = self.plan.ops[node.name]
        wanted = operand_layouts(op, labels)
        operands = [self.convert(t, layout) for t, layout in zip(op.operands, wanted, strict=True)]
        names = self.analysis.names[node.name]
        layouts = result_layouts(op, labels)[: len(names)]  # without what only backward sees
        shapes = tuple(
            local_shape(self.analysis.graph.tensors[t].dims, layout, self.mesh)
            for t, layout in zip(names, layouts, strict=True)
        )
        local = _LocalCall(self, node, operands, shapes, labels)
        before = len(self.graph.nodes)
        new = self.analysis.specs[node.name].localize(local)
        if isinstance(new, fx.Node) and not isinstance(node.meta.get("val"), torch.Tensor):
            new = tuple(self.call(operator.getitem, (new, i)) for i in range(len(names)))
        parts = new if isinstance(new, tuple) else (new,)
        self._leave_to_owners(list(self.graph.nodes)[before:], node, layouts, shapes, parts)
        for name, layout, part in zip(names, layouts, parts, strict=True):
            self._produce(name, layout, part)

    def _leave_to_owners(
        self,
        new: list[fx.Node],
        node: fx.Node,
        layouts: tuple[Layout, ...],
        shapes: tuple[tuple[int, ...], ...],
        parts: tuple[fx.Node, ...],
    ) -> None:
        """Notes on the calls of an op that one rank runs alone whose they are, and the results that others lack."""
        owners = owners_of(layouts[0], self.mesh)
        if not owners:
            return
        for each in new:  # what requires no gradient on the owner takes none on the other ranks
            each.meta["alone"] = Alone(owners, needs_grad=each.target is not aten.detach.default)
        names, values = self.analysis.names[node.name], tensor_results(node)
        for name, value, shape, part in zip(names, values, shapes, parts, strict=True):
            if part in new:
                needs_grad = self.analysis.graph.tensors[name].needs_grad
                # It joins autograd's graph on the other ranks, and so has to on its owner.
                assert value.requires_grad or not needs_grad or not self.has_autograd, name
                part.meta["alone"] = Alone(owners, shape, value.dtype, needs_grad)

    def _place_outputs(self) -> tuple[Layout, ...]:
        self.origin = ""
        names = [self.analysis.names[n.name][0] for n in output_nodes(self.captured.module)]
        layouts = []
        for i, name in enumerate(names):
            keep = i in self.captured.mutated or (self.captured.is_step and i == len(names) - 1)
            keep = keep or self.mesh.occupied is not None  # a part could lie at a vacant place
            layouts.append(self.replicated if keep else self.analysis.graph.delivered(self.produced[name]))
        results = [self.convert(name, to) for name, to in zip(names, layouts, strict=True)]
        self.graph.output(tuple(results))
        return tuple(layouts)

    # --- conversions

    def _produce(self, tensor: str, layout: Layout, node: fx.Node) -> None:
        self.produced[tensor] = layout
        self.placed[tensor, layout] = node
        node.meta.setdefault("holds", (tensor, layout))

    def convert(self, tensor: str, target: Layout) -> fx.Node:
        """The node that holds `tensor` in layout `target`, made at its first use."""
        found = self.placed.get((tensor, target))
        if found is None:
            found = self.placed[tensor, target] = self._conversion(tensor, target)
            found.meta.setdefault("holds", (tensor, target))
        return found

    def _conversion(self, tensor: str, target: Layout) -> fx.Node:
        spec = self.analysis.graph.tensors[tensor]
        source = self.produced[tensor]
        if tensor in self.far:
            node = self.call(to_device, self.far[tensor])
            node.meta["converts"] = tensor
        else:
            node = self.placed[tensor, source]
        shape = local_shape(spec.dims, source, self.mesh)
        for before, call, after in calls_between(spec.dims, source, target, self.mesh):
            shape = call.before or shape
            if call.name != "vary" or spec.needs_grad:
                for target_op, arguments, alone in self._calls(call, before, after, shape):
                    node = self.call(target_op, (node, *arguments))
                    node.meta["converts"] = tensor
                    node.meta["ndim"] = len(shape)
                    if alone is not None:
                        node.meta["alone"] = alone
            shape = call.after or call.fits or self._result(call, shape)
        return node

    def _result(self, call: CollectiveCall, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a collective's result."""
        return tuple(result_shape(call.name, shape, call.dims, self.mesh.sizes[call.axis]))

    def _calls(
        self, call: CollectiveCall, before: Layout, after: Layout, shape: tuple[int, ...]
    ) -> Iterator[tuple[Any, tuple[Any, ...], Alone | None]]:
        """The ops of a conversion, each with its arguments after the tensor, and the ranks that run it if not all do.

        A collective that converts from or to O is run by all ranks of its axis, which lie elsewhere along none.
        """
        mesh = self.mesh
        if call.before is not None:
            yield aten.reshape.default, (list(call.before),), Alone.at(before, mesh, call.before)
        if call.name == FIT:
            yield fitted, (list(call.fits),), Alone.at(before, mesh, call.fits)
        else:
            yield self._sent(call, before, after, shape)
        if call.after is not None:
            yield aten.reshape.default, (list(call.after),), Alone.at(after, mesh, call.after)

    def _sent(
        self, call: CollectiveCall, before: Layout, after: Layout, shape: tuple[int, ...]
    ) -> tuple[Any, tuple[Any, ...], Alone | None]:
        """The op of a collective, with its arguments after the tensor, and the ranks that run it if not all do."""
        (name, size), mesh = self.mesh.axes[call.axis], self.mesh
        op = getattr(torch.ops.autopar, call.name).default
        result = self._result(call, shape)
        arguments = (list(call.dims), size, name, call.backward)
        elsewhere = (*before[: call.axis], R, *before[call.axis + 1 :])
        owned = has_owner((*before, *after))
        return op, arguments, Alone(owners_of(elsewhere, mesh), result, taken=shape) if owned else None

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Adds a call, named for its op."""
        name = getattr(getattr(target, "overloadpacket", target), "__name__", "call")
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        node.meta["origin"] = self.origin
        return node


class _LocalCall:
    """The argument of a localizer (`autopar.rules.spec.Local`): a rule's function that writes an op for shards."""

    def __init__(
        self,
        owner: _Partitioner,
        node: fx.Node,
        operands: list[fx.Node],
        result_shapes: tuple[tuple[int, ...], ...],
        labels: tuple[str, ...],
    ) -> None:
        self._owner, self._labels = owner, labels
        self.node = node
        self.result_shapes = result_shapes
        self.args, self.kwargs = _substitute(node, operands)
        self.tile: int | None = None

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self._owner.call(target, args, kwargs)
        assert self._is_stated(new), f"the rule of {self.node.format_node()} states no {new}"
        kept = ("nn_module_stack", "stack_trace")
        new.meta |= {key: self.node.meta[key] for key in kept if key in self.node.meta}
        if self.tile is not None:
            new.meta["tile"] = self.tile
        return new

    def _is_stated(self, new: fx.Node) -> bool:
        """Whether the rule lists the collective that a new node runs; an unlisted one would have no price."""
        call, ring = Collective.of(new), Ring.of(new)
        sent = [(call.name, call.group)] if call and call.name in MOVING else []
        sent += [(ring.name, axis) for axis in ring.turning] if ring else []
        own = self._owner.analysis.graph.by_name[self.node.name].collectives
        labels = dict(zip(self._owner.mesh.names, self._labels, strict=True))
        return all(
            any(name == each.forward and plain(labels[axis]) in each.labels for each in own) for name, axis in sent
        )

    def axes(self, letter: str) -> tuple[tuple[str, int], ...]:
        own: Mapping[str, tuple[str, ...]] = self._owner.analysis.letters[self.node.name]
        labels = own.get(letter, ())
        found = ((self._owner.mesh.axes[i], self._labels[i]) for i in nesting_of(self._labels))
        return tuple(axis for axis, label in found if axis[1] > 1 and not {*labels}.isdisjoint(split_factors(label)))

    def is_even(self, letters: Iterable[str]) -> bool:
        # A letter may be a dim with the batch in it, whose size the ranks divide where they do not divide the batch.
        analysis, name = self._owner.analysis, self.node.name
        factors = {label for letter in letters for label in analysis.letters[name].get(letter, ())}
        counts = split_counts(analysis.graph.by_name[name], self._labels, self._owner.mesh)
        return not any(x.size % count and not factors.isdisjoint(split_factors(x.label)) for x, count in counts)

    def part(self, letter: str) -> int:
        size = self._size(letter)
        for whole, axes in self._cuts(letter):
            size = size // whole * parts_of(whole, axes, self._owner.mesh)[1]
        return size

    def first(self, letter: str) -> int:
        ((whole, axes),) = self._cuts(letter)
        return parts_of(whole, axes, self._owner.mesh)[0] * (self._size(letter) // whole)

    def _size(self, letter: str) -> int:
        return self._owner.analysis.specs[self.node.name].sizes.get(letter, 1)

    def _cuts(self, letter: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The size of every factor of a letter that is split, with the positions of the axes, the major one first."""
        analysis, name = self._owner.analysis, self.node.name
        for label in analysis.letters[name].get(letter, ()):
            axes = [i for i in nesting_of(self._labels) if label in split_factors(self._labels[i])]
            if axes:
                yield analysis.graph.by_name[name].choice(label).size, tuple(axes)

    def exchanges(self, letter: str) -> tuple[tuple[str, int], ...]:
        axes = zip(self._owner.mesh.axes, self._labels, strict=True)
        exchanged = {axis for axis, label in axes if EXCHANGED in label}
        return tuple(axis for axis in self.axes(letter) if axis in exchanged)


def _substitute(node: fx.Node, operands: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with its tensor operands replaced, in the order `tensor_operands` finds them."""
    remaining = iter(operands)

    def replace(argument: fx.Node) -> Any:
        return next(remaining) if isinstance(argument.meta.get("val"), torch.Tensor) else argument

    args, kwargs = fx.map_arg((node.args, node.kwargs), replace)
    assert next(remaining, None) is None and len(operands) == len(tensor_operands(node))
    return args, kwargs
