"""Bytes that one rank holds after forward: what lives between steps, and what backward needs.

    parameters   the resident copy (the stored shard is a part of it, never more); where a mixed-precision
                 policy casts, the stored shard in its own number format beside the cast copy
    gradients    the larger of the sum, as large as the resident copy, or as the stored shard if every
                 micro-batch reduces, in the number format that it is reduced in; and of `.grad`, in which
                 it ends up: the stored shard's size and number format, because optimizers want those
    optimizer    AdamW: two moments in the stored shard's number format
    saved        every tensor that autograd keeps, once for each layout a consumer saw it in
    buffers      whole

With N ranks and P float32 parameters these are the sums of ZeRO (Rajbhandari et al. 2020, section
3): 16P without sharding, 8P + 8P/N for stage 1, 4P + 12P/N for stage 2, 16P/N for stage 3. Copies
of a parameter that a use gathers are dropped after it and made again in backward, so they are not
here; neither are transient peaks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from autopar.cost_model.sizes import Sizes
from autopar.ir import VARIED, Graph, Layout, Op, ParameterPlan, R, State, Tensor

OPTIMIZER_STATES = 2  # first and second moment of AdamW (Loshchilov and Hutter 2019)


class ParameterBytes(NamedTuple):
    """What one parameter takes on one rank."""

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
    """How a view's result is seen from its operand: the states of one in those of the other.

    Attributes:
        operand: the tensor whose memory it shares.
        states: state of the result -> state of the operand.
        is_whole: whether it shows all of the operand, each state of one for one of the other.
    """

    operand: str
    states: Mapping[State, State]
    is_whole: bool


class SavedTensors:
    """Finds which memory a saved tensor lies in, looking through views.

    A view keeps all the memory of its operand alive, however little it shows of it: a third of a
    fused projection keeps the whole, a tensor expanded over a batch only the small one. A tensor in
    V lies in the memory of the tensor in R. What is saved under several names is counted once.
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
        """The view that makes the tensor called `name`, if one does."""
        return self._views.get(name)

    def root(self, name: str) -> str:
        """The tensor whose memory the tensor called `name` shares if nothing converts it."""
        while name in self._views:
            name = self._views[name].operand
        return name

    def memory(self, name: str, layout: Layout) -> tuple[str, Layout]:
        """The tensor and layout that stand for the memory of `name` seen in `layout`."""
        layout = tuple(R if state.kind == "V" else state for state in layout)
        while view := self._views.get(name):
            if any(state not in view.states for state in layout):
                break
            name, layout = view.operand, tuple(view.states[state] for state in layout)
        return name, layout


def keeps(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether autograd records `op`, and so keeps what it saves."""
    return any(tensors[name].needs_grad for name in op.results)


def layers_of_ops(graph: Graph) -> Mapping[str, Hashable]:
    """Op -> the repeated layer that it belongs to, without the ops outside of layers."""
    places = {op.name: graph.stack_of(op.module) for op in graph.ops}
    return {name: (at[0].path, at[1]) for name, at in places.items() if at is not None}


class Selected(NamedTuple):
    """Recomputation of single ops, chosen anywhere in a graph.

    Attributes:
        makers: recomputed ops, each with "", and recomputed conversions, as the op that first needs it and
            the tensor that is converted.
        kept: memory that stays for backward -> of every block that keeps it the op that first needs it there.
    """

    makers: frozenset[tuple[str, str]]
    kept: Mapping[tuple[str, Layout], tuple[str, ...]]

    def repeats(self, op: str, converts: str, phase: str, carries: str) -> bool:
        """Whether an item runs a second time; backward gathers parameters in any case."""
        return phase == "forward" and carries != "parameter" and (op, converts) in self.makers


class KeptSlice(NamedTuple):
    """A tensor of which a block keeps this rank's slice for backward, which gathers it again; see `autopar.ir.saved`.

    Attributes:
        name: name of the tensor in the plan, of a single block, such as `layers.3.input`.
        memory: the memory that the block would keep otherwise.
        tensor: name of the tensor in that memory as the block takes it.
        layout: layout of the whole tensor, R in place of V.
        slice_layout: layout of the slice.
        block: number of the block, as `autopar.pipeline.saved_values` counts them.
        user: name of the first op of the block that takes the tensor.
    """

    name: str
    memory: tuple[str, Layout]
    tensor: str
    layout: Layout
    slice_layout: Layout
    block: int
    user: str


def recomputed_ops(graph: Graph, blocks: Mapping[str, Hashable]) -> frozenset[str]:
    """Ops that the recomputation of their block executes: all up to the block's last saved tensor.

    `torch.utils.checkpoint` ends a recomputation as soon as backward has every tensor that it wants, so
    that a sum over ranks at the end of a block is not repeated.

    Args:
        graph: the captured model.
        blocks: op -> its block; ops that are missing are never recomputed.
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
    """How the result at `position` is seen from the first operand; None if that is ambiguous."""
    operand, result = tensors[op.operands[0]], tensors[op.results[position]]
    pairs = {(c.operands[0], c.results[position]) for c in op.choices if c.label != VARIED}
    states = {after: R if before.kind == "V" else before for before, after in pairs}
    if len(states) < len(pairs):
        return None
    same_size = math.prod(operand.shape) == math.prod(result.shape)
    one_to_one = len(set(states.values())) == len(pairs) and all(a.kind != "V" for a, _ in pairs)
    alone = len(op.operands) == len(op.results) == 1
    return View(operand.name, states, same_size and one_to_one and alone)
