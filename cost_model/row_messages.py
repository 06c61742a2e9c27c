"""Bytes of messages by rows ([Note: by rows] in autopar/ir/conversion.py).

A gradient of a table of which ops only look up rows is zero in all rows that no index names. With k rows of r bytes
that may not be zero, a rank's message has k (r + 8) + 8 bytes. k is an upper bound: the number of indices that a rank
looks up before the gradient is sent, and at most the number of its rows. An index may occur twice, or name a row that
gets no gradient (`padding_idx`); fewer rows are sent then. For any other parameter k is the number of all rows.
"""

from __future__ import annotations

import math

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.node_items import NodeItems
from autopar.ir import Layout, ParameterPlan, R, Tensor, steps_of

INDEX_BYTES = 8  # of an index, and of the number of rows


def message_bytes(items: NodeItems, tensor: Tensor, how: ParameterPlan, axis: int, whole_bytes: Quantity) -> Quantity:
    """Bytes of the message that a rank sends to the owner of a gradient along an axis, at most.

    Args:
        items: graph, sizes of local tensors and number of micro-batches.
        tensor: the parameter.
        how: layouts of the parameter.
        axis: axis along which the gradient is sent.
        whole_bytes: bytes of the whole local gradient.
    """
    layout = _sent_layout(items, tensor, how, axis)
    rows = items.sizes.elements(tensor.dims[:1], _rows_alone(layout))
    times = items.micro_batches if how.reduce == "step" else 1
    found = smaller(times * _indices(items, tensor, layout), rows)
    return found * (whole_bytes / rows + INDEX_BYTES) + INDEX_BYTES


def _sent_layout(items: NodeItems, tensor: Tensor, how: ParameterPlan, axis: int) -> Layout:
    """The layout from which the gradient is sent: that of the parameter after the transposed step."""
    layout = list(how.storage)
    for step in steps_of(tensor.dims, how.storage, how.resident, items.sizes.mesh):
        layout[step.axis] = step.target
        if step.axis == axis:
            break
    return tuple(layout)


def _rows_alone(layout: Layout) -> Layout:
    return tuple(state if state.kind == "S" and state.dim == 0 else R for state in layout)


def _indices(items: NodeItems, tensor: Tensor, layout: Layout) -> Quantity:
    """Number of indices that a rank looks up in one micro-batch; infinite for a parameter that has other uses.

    Ranks of an axis in V look up different ones. Along any other axis each rank may look up all.
    """
    lookups = items.graph.lookups.get(tensor.name)
    if lookups is None:
        return math.inf
    states = enumerate(layout)
    parts = math.prod((items.sizes.axis(a) for a, state in states if state.kind == "V"), start=1)
    whole = (math.prod((items.sizes.factor(x) for x in each), start=1) for each in lookups)
    return sum(whole, start=0) / parts
