"""Seconds of one op on one rank: a roofline over FLOPs and bytes, plus the launch of its kernel.

    forward  = launch + max(flops / peak, bytes / bandwidth)
    backward = forward * (2 for a matrix product, else 1)         (0 if nothing needs a gradient)

`flops` is the whole op's, divided by the axes that split its work; `bytes` is what the rank reads
and writes, each operand and result in its local size. The backward of a matrix product is two
products of the same size, one per operand that needs a gradient; the backward of any other op
reads and writes about what its forward did. Both are the usual accounting (Kaplan et al. 2020,
section 2.1: 2N forward and 4N backward) and no measurement; attention that recomputes its scores
takes about 2.5 instead of 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost_model.collectives import Seconds
from autopar.cost_model.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import Labels, Op, Tensor, operand_layouts, result_layouts


def op_seconds(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], *, sizes: Sizes, hardware: Hardware
) -> Seconds:
    """Seconds of `op`, run with one choice per mesh axis. A view moves nothing and is free."""
    if op.is_view:
        return Seconds(0.0, 0.0)
    forward = hardware.launch_seconds + max(
        _local_flops(op, labels, sizes) / hardware.flops_per_second(_itemsize(op, tensors)),
        _local_bytes(op, labels, tensors, sizes) / hardware.memory_bytes_per_second,
    )
    return Seconds(forward, forward * backward_passes(op, tensors))


def backward_passes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """How many times the forward's work the backward of `op` is."""
    if not any(tensors[name].needs_grad for name in op.results):
        return 0
    if not is_product(op, tensors):
        return 1
    return max(1, min(2, sum(tensors[name].needs_grad for name in op.operands)))


def is_product(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether `op` multiplies saved operands with more work than there are elements."""
    if not any(name in op.saved for name in op.operands):
        return False
    return op.flops > max(math.prod(tensors[name].shape) for name in (*op.operands, *op.results))


def _local_flops(op: Op, labels: Labels, sizes: Sizes) -> float:
    parts = math.prod(
        size
        for label, size in zip(labels, sizes.mesh.sizes, strict=True)
        if op.choice(label).splits
    )
    return op.flops / parts


def _local_bytes(op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes) -> int:
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    return sum(
        sizes.bytes(tensors[name], layout) for name, layout in zip(names, layouts, strict=True)
    )


def _itemsize(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the numbers that the op computes with: its widest result's."""
    return max((tensors[name].itemsize_bytes for name in op.results), default=4)
