"""Seconds of one op on one rank: a roofline over FLOPs and bytes, plus the launch of its kernel.

    product      launch + max(flops / (peak * efficiency(rows, columns, inner)), bytes / bandwidth)
    other        launch + max(flops / peak, bytes / bandwidth)

`flops` and `bytes` are what the rank itself computes, reads and writes. The backward of a matrix
product is two products of the same size, one per operand that needs a gradient; the backward of any
other op reads and writes about what its forward did (Kaplan et al. 2020, section 2.1: 2N forward
and 4N backward).

The formulas work on numbers and on symbols alike, see `autopar.cost_model.arith`.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.collectives import Seconds
from autopar.cost_model.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import Labels, Op, Tensor, Work, operand_layouts, result_layouts


def op_seconds(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], *, sizes: Sizes, hardware: Hardware
) -> Seconds:
    """Seconds of `op`, run with one choice per mesh axis. A view moves nothing and is free."""
    if op.is_view:
        return Seconds(0.0, 0.0)
    forward = hardware.launch_seconds + busy_seconds(
        op, labels, tensors, sizes=sizes, hardware=hardware
    )
    return Seconds(forward, forward * backward_passes(op, tensors))


def busy_seconds(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], *, sizes: Sizes, hardware: Hardware
) -> Quantity:
    """Seconds that the forward of `op` keeps the device at work, the launch left out."""
    peak = hardware.flops_per_second(itemsize_bytes(op, tensors))
    arithmetic = sum(
        sizes.flops(op, work, labels) / (peak * efficiency(work, labels, sizes, hardware))
        for work in works(op)
    )
    return larger(arithmetic, memory_seconds(local_bytes(op, labels, tensors, sizes), hardware))


def memory_seconds(traffic_bytes: Quantity, hardware: Hardware) -> Quantity:
    """Seconds to read and write this much of the device's own memory."""
    return traffic_bytes / (hardware.memory_bytes_per_second * hardware.memory_efficiency)


def efficiency(work: Work, labels: Labels, sizes: Sizes, hardware: Hardware) -> Quantity:
    """Fraction of the peak that a product of matrices reaches; 1 for work that is none.

    A tile that is short in one direction spends its time on loading: the fraction falls as
    x / (x + half) with each extent.
    """
    if not work.is_product:
        return 1.0
    reached = hardware.matmul_efficiency
    if isinstance(hardware.matmul_half_size, (int, float)) and not hardware.matmul_half_size:
        return reached
    for leaves in (work.rows, work.columns, work.inner):
        extent = sizes.extent(leaves, labels)
        reached = reached * extent / (extent + hardware.matmul_half_size)
    return reached


def works(op: Op) -> tuple[Work, ...]:
    """The loop nests of an op; one without shape where nobody described them."""
    return op.work or (Work(op.flops),)


def backward_passes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """How many times the forward's work the backward of `op` is."""
    if not any(tensors[name].needs_grad for name in op.results):
        return 0
    if not is_product(op):
        return 1
    return max(1, min(2, sum(tensors[name].needs_grad for name in op.operands)))


def is_product(op: Op) -> bool:
    """Whether `op` multiplies matrices."""
    return any(work.is_product for work in works(op))


def local_bytes(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes
) -> Quantity:
    """Bytes that one rank reads and writes: each operand and result in its local size."""
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    return sum(
        sizes.bytes(tensors[name], layout) for name, layout in zip(names, layouts, strict=True)
    )


def itemsize_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the numbers that the op computes with: its widest result's."""
    return max((tensors[name].itemsize_bytes for name in op.results), default=4)
