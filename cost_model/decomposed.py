"""How much of a collective hides behind the products that it is decomposed with; see `autopar.ops.decomposed`.

Over n ranks the products take C seconds in n equal pieces, and the collective T. The first piece is computed before
anything arrives, or before anything can be sent:

    one after the other   C + T
    decomposed            max(C, C / n + T)
    hidden                min(T, C - C / n)

In the backward of an all-gather the pieces are those of the operand's gradient, half of the work, and the gradients of
the weights follow, where weights are trained: C / 2n stands for C / n there. If a rank keeps its own piece of the
operand alone, the other pieces are gathered again beside this second half, so that each half hides what it can of its
own messages: C / 2 - C / 2n. Then a rank never has the whole operand, but one piece that it multiplies and one on its
way.

A result without the factor that is in pieces is added up. For each piece but the first, the sum (in at least 32 bits)
is read and written once more, and the piece written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.compute import memory_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.items import COMPUTE, MemoryItem, Phase, WorkItem
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.memory import KeptSlice
from autopar.cost_model.sizes import Sizes
from autopar.ir import CollectiveCall, Graph, Layout, Op, Plan, calls

_LINEAR = "aten.linear"
_GATHERS, _SCATTERS = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
_EXACT_BYTES = 4  # at least, of an element of a sum of pieces
Seconds = Callable[[Op, Phase], Quantity]  # of the computation of an op in one phase


class Beside(NamedTuple):
    """The compute that runs while a collective sends its pieces.

    Attributes:
        products: the products in pieces.
        share: the part of their seconds in which messages hide.
        summed_bytes: bytes that are read and written because results are added up piece by piece.
    """

    products: Sequence[Op]
    share: Quantity
    summed_bytes: Quantity = 0


class Panels(NamedTuple):
    """An operand of which a rank keeps its own piece, and gathers the others again in backward.

    Attributes:
        pieces: number of pieces.
        again: what is beside the second gather: the gradients of weights.
    """

    pieces: Quantity
    again: Beside


class Decomposed:
    """The decomposed conversions of a plan, found as `autopar.passes.decompose_products` finds them in the graph.

    Args:
        graph: the captured model.
        plan: the plan; its `decomposed` names the axes.
        flow: layouts of the plan.
        sizes: local sizes of tensors on a rank.
        seconds: duration of an op's computation.
        hardware: the device.
        block: what finds the block of an op by its name.
        slices: tensors that blocks save in slices.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        flow: Flow,
        *,
        sizes: Sizes,
        seconds: Seconds,
        hardware: Hardware,
        block: Callable[[str], Hashable],
        slices: Collection[KeptSlice],
    ) -> None:
        self.graph, self.plan, self.flow, self.sizes = graph, plan, flow, sizes
        self.seconds, self.hardware, self.block = seconds, hardware, block
        self.slices: dict[tuple[str, Layout], dict[Hashable, KeptSlice]] = {}
        for each in slices if plan.decomposed else ():
            self.slices.setdefault(each.memory, {})[each.block] = each
        self.axes = frozenset(plan.decomposed)
        self.readers: dict[tuple[str, Layout], list[Op]] = {}
        for op in graph.ops if self.axes else ():
            for name, layout in zip(op.operands, flow.operands[op.name], strict=True):
                self.readers.setdefault((name, layout), []).append(op)

    def items(self, name: str, target: Layout, items: Sequence[WorkItem]) -> Iterator[WorkItem]:
        """The items of a tensor's conversion to a layout; decomposed ones with the seconds that they hide and cost."""
        found = (
            {
                **self._gathers(name, target, self._gathering(name, target)),
                **self._scatters(name, target, self._scattered(name, target)),
            }
            if self.axes
            else {}
        )
        for item in items:
            beside = found.get((item.resource, item.kind, item.phase))
            yield from [item] if beside is None else self._in_pieces(item, beside)

    def restored(self, kept: KeptSlice, items: Sequence[WorkItem]) -> Iterator[WorkItem]:
        """The items that bring a saved slice back; beside the gradients of weights, where it comes in pieces."""
        panels = self._panels(kept)
        for item in items:
            yield from [item] if panels is None else self._in_pieces(item, panels.again)

    def brought_back(self, kept: KeptSlice, whole: MemoryItem) -> MemoryItem:
        """The memory of a saved tensor while its block runs backward: two pieces, where it comes in pieces."""
        panels = self._panels(kept)
        return whole if panels is None else replace(whole, bytes=2 * whole.bytes / panels.pieces)

    def _in_pieces(self, item: WorkItem, beside: Beside) -> Iterator[WorkItem]:
        compute = sum((self.seconds(op, item.phase) for op in beside.products), start=0)
        yield replace(item, hidden_seconds=smaller(item.seconds, compute * beside.share))
        if beside.summed_bytes:
            seconds = memory_seconds(beside.summed_bytes, self.hardware)
            yield replace(
                item,
                name=f"pieces of {item.name} added up",
                kind="aten.add",
                resource=COMPUTE,
                seconds=seconds,
                traffic_bytes=beside.summed_bytes,
                carries="",
                moves="",
                ranks=1,
            )

    def _gathers(self, name: str, target: Layout, products: Sequence[Op]) -> dict[tuple[str, str, str], Beside]:
        """(axis, collective, phase) of both directions of a gather -> what is beside it."""
        if not products:
            return {}
        gather, keeps = self._calls(name, target)[-1], self._slice(name, target, products)
        pieces, axis = self.sizes.axis(gather.axis), self.plan.mesh.names[gather.axis]
        is_of_features = self._is_along_the_last_dim(gather, name)
        sums = [(op.results[0], self.flow.results[op.name][0]) for op in products if is_of_features]
        trains = any(self.graph.tensors[op.operands[1]].needs_grad for op in products)
        behind = _left(pieces, halves=2 if keeps else 1) if trains else _left(pieces)
        return {
            (axis, "all_gather", "forward"): Beside(products, _left(pieces), self._summed(sums, pieces)),
            (axis, "reduce_scatter", "backward"): Beside(products, behind),
        }

    def _scatters(self, name: str, target: Layout, products: Sequence[Op]) -> dict[tuple[str, str, str], Beside]:
        """(axis, collective, phase) of both directions of a scatter -> what is beside it."""
        if not products:
            return {}
        (op,), scatter = products, self._calls(name, target)[0]
        pieces, axis = self.sizes.axis(scatter.axis), self.plan.mesh.names[scatter.axis]
        summed = 0 if self._is_along_the_last_dim(scatter, name) else 1
        sums = [(op.operands[summed], self.flow.operands[op.name][summed])]
        needed = [each for each in sums if self.graph.tensors[each[0]].needs_grad]
        return {
            (axis, "reduce_scatter", "forward"): Beside(products, _left(pieces)),
            (axis, "all_gather", "backward"): Beside(products, _left(pieces), self._summed(needed, pieces)),
        }

    def _summed(self, results: Sequence[tuple[str, Layout]], pieces: Quantity) -> Quantity:
        """Bytes that are read and written when results are added up piece by piece."""
        found: Quantity = 0
        for name, layout in results:
            tensor = self.graph.tensors[name]
            exact = max(tensor.itemsize_bytes, _EXACT_BYTES) / tensor.itemsize_bytes
            found += (pieces - 1) * (2 + 2 * exact) * self.sizes.bytes(tensor, layout)
        return found

    def _panels(self, kept: KeptSlice) -> Panels | None:
        """The products for which a saved tensor is gathered in pieces, and again in backward; None if it is not."""
        for target in self.flow.targets.get(kept.tensor, {}) if self.slices else ():
            products = self._gathering(kept.tensor, target)
            if products and self._slice(kept.tensor, target, products) == kept:
                return self._again(kept.tensor, self._calls(kept.tensor, target)[-1], products)
        return None

    def _again(self, name: str, gather: CollectiveCall, products: Sequence[Op]) -> Panels:
        pieces = self.sizes.axis(gather.axis)
        of_weights = () if self._is_along_the_last_dim(gather, name) else products
        sums = [(op.operands[1], self.flow.operands[op.name][1]) for op in of_weights]
        return Panels(pieces, Beside(products, _left(pieces, halves=2), self._summed(sums, pieces)))

    def _gathering(self, name: str, target: Layout) -> list[Op]:
        """The products for which the last call of a conversion gathers; none if others read what it gathers, too."""
        called, readers = self._calls(name, target), self.readers.get((name, target), [])
        if not called or called[-1].after is not None or not self._is(called[-1], _GATHERS, name):
            return []
        is_delivered = name in self.graph.outputs and self._delivered(name) == target
        alone = all(op.kind == _LINEAR and op.operands.index(name) == 0 for op in readers)
        keeps = alone and self._keeps_a_piece_or_all(name, target, readers, called[-1])
        return readers if keeps and not is_delivered else []

    def _keeps_a_piece_or_all(self, name: str, target: Layout, readers: Sequence[Op], gather: CollectiveCall) -> bool:
        """Whether the products keep for backward the operand of the gather, or its whole result."""
        if self.flow.saved.memory(name, target) not in self.slices:
            return True
        if len({self.block(op.name) for op in readers}) > 1:
            return False
        found = self._slice(name, target, readers)
        if found is None or found.tensor != name:
            return True
        back = calls(self.graph.tensors[name].dims, found.slice_layout, found.layout, self.plan.mesh)
        (call, *more) = back or (None,)
        is_same = call is not None and not more and call.is_same_forward(gather)
        return is_same and found.tier == "device" and self.plan.recompute == "none"

    def _slice(self, name: str, target: Layout, readers: Sequence[Op]) -> KeptSlice | None:
        """The slice that the block of the readers saves of a tensor in a layout."""
        of = self.slices.get(self.flow.saved.memory(name, target), {})
        return of.get(self.block(readers[0].name)) if readers else None

    def _scattered(self, name: str, target: Layout) -> list[Op]:
        """The product whose rows the first call of a conversion adds up and scatters, if nothing else reads them."""
        called, product = self._calls(name, target), self.graph.producer.get(name)
        if not called or called[0].before is not None or not self._is(called[0], _SCATTERS, name):
            return []
        if product is None or product.kind != _LINEAR or len(self.flow.targets[name]) > 1:
            return []
        rows, layout = product.operands[0], self.flow.operands[product.name][0]
        return [] if self._gathering(rows, layout) else [product]

    def _is(self, call: CollectiveCall, kind: tuple[str, str], name: str) -> bool:
        """Whether a call is of a kind, along a decomposed axis, and of a tensor with rows besides its features."""
        is_matrix = len(self.graph.tensors[name].dims) > 1
        along = self.plan.mesh.names[call.axis] in self.axes
        return (call.name, call.backward) == kind and is_matrix and along

    def _is_along_the_last_dim(self, call: CollectiveCall, name: str) -> bool:
        """Whether a call is along the features of a product's operand, or the columns of its result."""
        return call.dims[0] == len(self.graph.tensors[name].dims) - 1

    def _calls(self, name: str, target: Layout) -> tuple[CollectiveCall, ...]:
        """The calls of a conversion; none for a parameter, which is converted with others."""
        tensor, source = self.graph.tensors[name], self.flow.produced[name]
        if name in self.graph.parameters.values():
            return ()
        found = calls(tensor.dims, source, target, self.plan.mesh)
        return tuple(call for call in found if call.name != "vary" or tensor.needs_grad)

    def _delivered(self, name: str) -> Layout:
        return self.graph.delivered(self.flow.produced[name])


def _left(pieces: Quantity, halves: int = 0) -> Quantity:
    """The share of the products' seconds that is left to hide messages once the first piece has been computed.

    Args:
        pieces: number of pieces.
        halves: 1 if only half of the products are in pieces, and the other half follows them; 2 if the messages have
            that half alone; 0 if all products are in pieces.
    """
    if not halves:
        return 1 - 1 / pieces
    return (1 if halves == 1 else 1 / 2) - 1 / (2 * pieces)
