"""How much of a collective hides behind the products that it is decomposed with; see `autopar.ops.decomposed`.

Over n ranks the products take C seconds in n equal pieces, and the collective T. The first piece is computed before
anything arrives, or before anything can be sent:

    one after the other   C + T
    decomposed            max(C, C / n + T)
    hidden                min(T, C - C / n)

In the backward of an all-gather the pieces are those of the operand's gradient, half of the work, and the gradients of
the weights follow, where weights are trained: C / 2n stands for C / n there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.flow import Flow
from autopar.cost_model.items import Item, Phase
from autopar.cost_model.sizes import Sizes
from autopar.ir import CollectiveCall, Graph, Layout, Op, Plan, calls

_LINEAR = "aten.linear"
_GATHERS, _SCATTERS = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
Seconds = Callable[[Op, Phase], Quantity]  # of the computation of an op in one phase


class Decomposed:
    """The decomposed conversions of a plan, found as `autopar.passes.decompose_products` finds them in the graph.

    Args:
        graph: the captured model.
        plan: the plan; its `decomposed` names the axes.
        flow: layouts of the plan.
        sizes: local sizes of tensors on a rank.
        seconds: duration of an op's computation.
    """

    def __init__(
        self, graph: Graph, plan: Plan, flow: Flow, *, sizes: Sizes, seconds: Seconds
    ) -> None:
        self.graph, self.plan, self.flow, self.sizes = graph, plan, flow, sizes
        self.seconds = seconds
        self.axes = frozenset(plan.decomposed)
        self.readers: dict[tuple[str, Layout], list[Op]] = {}
        for op in graph.ops if self.axes else ():
            for name, layout in zip(op.operands, flow.operands[op.name], strict=True):
                self.readers.setdefault((name, layout), []).append(op)

    def items(self, name: str, target: Layout, items: Sequence[Item]) -> Iterator[Item]:
        """The items of a tensor's conversion to a layout, those that are decomposed with what they hide."""
        products = {
            **self._products(self._gathering(name, target), _GATHERS, name, target),
            **self._products(self._scattered(name, target), _SCATTERS, name, target),
        } if self.axes else {}  # fmt: skip
        for item in items:
            found = products.get((item.resource, item.kind, item.phase))
            yield (
                item if found is None else replace(item, hidden_seconds=self._hidden(item, *found))
            )

    def _hidden(self, item: Item, products: Sequence[Op], pieces: Quantity) -> Quantity:
        compute = sum((self.seconds(op, item.phase) for op in products), start=0)
        return smaller(item.seconds, compute - compute / pieces)

    def _products(
        self, products: Sequence[Op], kind: tuple[str, str], name: str, target: Layout
    ) -> dict[tuple[str, str, str], tuple[Sequence[Op], Quantity]]:
        """(axis, collective, phase) of both directions of a conversion -> its products and their number of pieces."""
        if not products:
            return {}
        axis = self._calls(name, target)[-1 if kind is _GATHERS else 0].axis
        pieces, word = self.sizes.axis(axis), self.plan.mesh.names[axis]
        trains = any(self.graph.tensors[op.operands[1]].needs_grad for op in products)
        behind = 2 * pieces if kind is _GATHERS and trains else pieces
        forward, backward = kind
        return {
            (word, forward, "forward"): (products, pieces),
            (word, backward, "backward"): (products, behind),
        }

    def _gathering(self, name: str, target: Layout) -> list[Op]:
        """The products for which the last call of a conversion gathers rows; none if others read the rows, too."""
        called, readers = self._calls(name, target), self.readers.get((name, target), [])
        if not called or called[-1].after is not None or not self._is(called[-1], _GATHERS, name):
            return []
        is_delivered = name in self.graph.outputs and self._delivered(name) == target
        alone = all(op.kind == _LINEAR and op.operands.index(name) == 0 for op in readers)
        return readers if alone and not is_delivered else []

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
        """Whether a call is of a kind, along a decomposed axis, and not along the features of the tensor."""
        is_rows = call.dims[:1] < (len(self.graph.tensors[name].dims) - 1,)
        along = self.plan.mesh.names[call.axis] in self.axes
        return (call.name, call.backward) == kind and is_rows and along

    def _calls(self, name: str, target: Layout) -> tuple[CollectiveCall, ...]:
        """The calls of a conversion; none for a parameter, which is converted with others."""
        tensor, source = self.graph.tensors[name], self.flow.produced[name]
        if name in self.graph.parameters.values():
            return ()
        found = calls(tensor.dims, source, target, self.plan.mesh)
        return tuple(call for call in found if call.name != "vary" or tensor.needs_grad)

    def _delivered(self, name: str) -> Layout:
        return self.graph.delivered(self.flow.produced[name])
