"""Bytes that one rank holds after forward: what lives between steps, and what backward needs.

    parameters   the resident copy (the stored shard is a part of it, never more)
    gradients    as large as the resident copy, or as the stored shard if every micro-batch reduces
    optimizer    AdamW: two moments in the parameter's own number format, for the stored shard
    saved        every tensor that autograd keeps, once for each layout a consumer saw it in
    buffers      whole

With N ranks and P float32 parameters these are the sums of ZeRO (Rajbhandari et al. 2020, section
3): 16P without sharding, 8P + 8P/N for stage 1, 4P + 12P/N for stage 2, 16P/N for stage 3. Copies
of a parameter that a use gathers are dropped after it and made again in backward, so they are not
here; neither are transient peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Layout, Op, ParameterPlan, R, State, Tensor

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
    stored = sizes.bytes(tensor, plan.storage)
    resident = sizes.bytes(tensor, plan.resident)
    if not tensor.needs_grad:
        return ParameterBytes(max(stored, resident), 0, 0)
    gradient = stored if plan.reduce == "micro_batch" else resident
    return ParameterBytes(max(stored, resident), gradient, OPTIMIZER_STATES * stored)


class View(NamedTuple):
    """How a view's result is seen from its operand: the states of one in those of the other."""

    operand: str
    states: Mapping[State, State]


class SavedTensors:
    """Finds which memory a saved tensor lies in, looking through views.

    A view that keeps all elements shares the memory of its operand, and a tensor in V that of the
    tensor in R; a tensor saved under several such names is counted once.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._views = {
            op.results[0]: view for op in graph.ops if (view := _as_view(op, graph.tensors))
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


def _as_view(op: Op, tensors: Mapping[str, Tensor]) -> View | None:
    if not op.is_view or len(op.operands) != 1 or len(op.results) != 1:
        return None
    operand, result = tensors[op.operands[0]], tensors[op.results[0]]
    if math.prod(operand.shape) != math.prod(result.shape):
        return None
    pairs = [(c.operands[0], c.results[0]) for c in op.choices if c.operands[0].kind != "V"]
    states = {after: before for before, after in pairs}
    if len(states) < len(pairs) or len(set(states.values())) < len(pairs):
        return None
    return View(operand.name, states)
