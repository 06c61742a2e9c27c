"""Bytes that one rank holds after forward: what it stores between steps, and what backward needs.

    parameters   the resident copy, which contains the stored shard; where a mixed-precision policy casts, the stored
                 shard in its own dtype in addition to the cast copy
    gradients    the larger of two: the accumulated gradient (of the size of the resident copy, or of the stored shard
                 if every micro-batch reduces it, in the dtype of the reduction), and `.grad` (of the size and dtype
                 of the stored shard), which replaces it at the end
    optimizer    AdamW: two moments in the dtype of the stored shard
    saved        every tensor that autograd saves, once for each layout in which an op used it
    buffers      the whole buffer

With N ranks and P float32 parameters the sums are those of ZeRO (Rajbhandari et al. 2020, section 3): 16P without
sharding, 8P + 8P/N for stage 1, 4P + 12P/N for stage 2, 16P/N for stage 3. Gathered copies of parameters do not count:
they are freed after each use and gathered again in backward. Other transient peaks do not count either.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from autopar.cost_model.sizes import Sizes
from autopar.ir import VARIED, Graph, Layout, Op, ParameterPlan, R, State, Tensor, Tier

OPTIMIZER_STATES = 2  # first and second moment of AdamW (Loshchilov and Hutter 2019)


class ParameterBytes(NamedTuple):
    """Bytes of one parameter, its gradient and its optimizer states on one rank."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.optimizer


def parameter_bytes(tensor: Tensor, plan: ParameterPlan, sizes: Sizes) -> ParameterBytes:
    """Bytes of a parameter, its gradient and its optimizer states."""
    stored = sizes.bytes(tensor.at_rest, plan.storage)
    resident = sizes.bytes(tensor, plan.resident)
    held = stored + resident if tensor.is_cast else max(stored, resident)
    if not tensor.needs_grad:
        return ParameterBytes(held, 0, 0)
    accumulated = plan.storage if plan.reduce == "micro_batch" else plan.resident
    gradient = max(sizes.bytes(tensor.gradient, accumulated), stored)
    return ParameterBytes(held, gradient, OPTIMIZER_STATES * stored)


class View(NamedTuple):
    """The relation of a view's result to its operand, whose memory it shares.

    Attributes:
        operand: name of the operand.
        states: state of the result -> state of the operand in which the view gives it.
        is_whole: whether the result shows all elements of the operand, and each of its states belongs to another state
            of the operand.
    """

    operand: str
    states: Mapping[State, State]
    is_whole: bool


class SavedTensors:
    """Finds the tensor in whose memory a saved tensor lies, so that shared memory is counted once.

    A view keeps the whole memory of its operand alive: a third of a fused projection keeps the whole projection, and a
    tensor expanded over a batch keeps only the small tensor. A tensor in V has the memory of the same tensor in R.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._views = {
            op.results[i]: view
            for op in graph.ops
            if op.is_view
            for i in range(len(op.results))
            if (view := _as_view(op, i, graph.tensors))
        }

    def view(self, name: str) -> View | None:
        """The view whose result is the tensor called `name`; None if no view produces it."""
        return self._views.get(name)

    def root(self, name: str) -> str:
        """The tensor whose memory the tensor called `name` shares if it is not converted in between."""
        return self.shown(name)[-1]

    def shown(self, name: str) -> list[str]:
        """The tensor called `name`, the tensor that it shows if it is a view, and so on up to its root."""
        found = [name]
        while view := self._views.get(found[-1]):
            found.append(view.operand)
        return found

    def memory(self, name: str, layout: Layout) -> tuple[str, Layout]:
        """The tensor and its layout that identify the memory of the tensor called `name` in `layout`."""
        layout = tuple(R if state.kind == "V" else state for state in layout)
        while view := self._views.get(name):
            if any(state not in view.states for state in layout):
                break
            name, layout = view.operand, tuple(view.states[state] for state in layout)
        return name, layout


def keeps(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether autograd records `op`, and therefore keeps the tensors that the op saves."""
    return any(tensors[name].needs_grad for name in op.results)


def layers_of_ops(graph: Graph) -> Mapping[str, Hashable]:
    """Op name -> its repeated layer, as (path of the list, index); ops outside of layers are absent."""
    places = {op.name: graph.stack_of(op.module) for op in graph.ops}
    return {name: (at[0].path, at[1]) for name, at in places.items() if at is not None}


class Selected(NamedTuple):
    """Recomputation of single ops, chosen anywhere in a graph.

    Attributes:
        producers: recomputed ops and conversions, as pairs: (op, "") for an op; (op, tensor) for the conversion of a
            tensor that this op needs first.
        kept: saved memory -> for every block that saves it, the first op of the block that needs it.
    """

    producers: frozenset[tuple[str, str]]
    kept: Mapping[tuple[str, Layout], tuple[str, ...]]

    def repeats(self, op: str, converts: str, phase: str, carries: str) -> bool:
        """Whether recomputation runs an item again; False for gathers of parameters, which backward repeats anyway."""
        return phase == "forward" and carries != "parameter" and (op, converts) in self.producers


class KeptSlice(NamedTuple):
    """A tensor that a block saves in slices or on the host, until backward brings it back; see `autopar.ir.saved`.

    Attributes:
        name: name of the tensor in the plan, with the index of its block, such as `layers.3.input`.
        memory: the memory that the block would save without slices.
        tensor: name under which the block uses the tensor.
        layout: layout of the whole tensor, R in place of V.
        slice_layout: layout of what a rank saves.
        block: index of the block, as `autopar.pipeline.saved_values` counts them.
        user: name of the first op of the block that takes the tensor.
        tier: the memory where a rank saves it.
    """

    name: str
    memory: tuple[str, Layout]
    tensor: str
    layout: Layout
    slice_layout: Layout
    block: int
    user: str
    tier: Tier = "device"


def recomputed_ops(graph: Graph, blocks: Mapping[str, Hashable]) -> frozenset[str]:
    """The ops that run again when their block is recomputed: all up to the last op of the block that saves a tensor.

    `torch.utils.checkpoint` stops a recomputation as soon as backward has all the tensors that it needs. An all-reduce
    at the end of a block is therefore not repeated.

    Args:
        graph: the captured model.
        blocks: op name -> its block; absent ops are never recomputed.
    """
    pending: dict[Hashable, list[str]] = {}
    found: set[str] = set()
    for op in graph.ops:
        if op.name not in blocks:
            continue
        block = blocks[op.name]
        pending.setdefault(block, []).append(op.name)
        if op.saved and keeps(op, graph.tensors):
            found.update(pending.pop(block))
    return frozenset(found)


def _as_view(op: Op, position: int, tensors: Mapping[str, Tensor]) -> View | None:
    """The relation of the result at `position` to the first operand.

    None where one state of the result comes from several states of the operand.
    """
    operand, result = tensors[op.operands[0]], tensors[op.results[position]]
    pairs = {(c.operands[0], c.results[position]) for c in op.choices if c.label != VARIED}
    states = {after: R if before.kind == "V" else before for before, after in pairs}
    if len(states) < len(pairs):
        return None
    same_size = math.prod(operand.shape) == math.prod(result.shape)
    one_to_one = len(set(states.values())) == len(pairs) and all(a.kind != "V" for a, _ in pairs)
    alone = len(op.operands) == len(op.results) == 1
    return View(operand.name, states, same_size and one_to_one and alone)
