"""Seconds of one op on one rank: a roofline over FLOPs and bytes, plus the launch of its kernel.

    product      launch + max(flops / (peak * efficiency(rows, columns, inner)), bytes / bandwidth)
    other        launch + max(flops / peak, bytes / bandwidth)

`flops` and `bytes` are what the rank itself computes, reads and writes, all parts alike; where a split op
computes more than its share (`Choice.stretch`), flops are those of the slowest part. The backward of a matrix
product is two products of the same size, one per operand that needs a gradient; the backward of any
other op reads and writes about what its forward did (Kaplan et al. 2020, section 2.1: 2N forward
and 4N backward).

The formulas work on numbers and on symbols alike, see `autopar.cost_model.arith`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.collectives import Seconds
from autopar.cost_model.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Labels, Op, Tensor, Work, operand_layouts, result_layouts


class Direction(NamedTuple):
    """One direction of an op on one rank.

    Attributes:
        passes: number of times that the kernel runs, each with the following figures.
        seconds: device time, without the launch.
        traffic_bytes: bytes read and written in the device's own memory.
        flops: floating-point operations.
    """

    passes: float
    seconds: Quantity
    traffic_bytes: Quantity
    flops: Quantity


class OpPrice(NamedTuple):
    """Both directions of an op."""

    forward: Direction
    backward: Direction

    @classmethod
    def of(
        cls,
        op: Op,
        labels: Labels,
        tensors: Mapping[str, Tensor],
        sizes: Sizes,
        hardware: Hardware,
        inner: frozenset[str] = frozenset(),
    ) -> OpPrice:
        """Prices `op`, run with one choice per mesh axis; what is `inner` stays in registers."""
        if op.is_view:
            forward = Direction(1, 0.0, 0.0, 0.0)
        else:
            flops = sum(sizes.flops(op, work, labels) for work in works(op))
            moved = local_bytes(op, labels, tensors, sizes, inner)
            seconds = larger(
                _arithmetic_seconds(op, labels, tensors, sizes, hardware),
                memory_seconds(moved, hardware),
            )
            forward = Direction(1, seconds, moved, flops)
        return cls(forward, forward._replace(passes=backward_passes(op, tensors)))


def op_seconds(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], *, sizes: Sizes, hardware: Hardware
) -> Seconds:
    """Seconds of `op`, run with one choice per mesh axis. A view moves nothing and is free."""
    if op.is_view:
        return Seconds(0.0, 0.0)
    forward, backward = OpPrice.of(op, labels, tensors, sizes, hardware)
    one = larger(hardware.launch_seconds + forward.seconds, hardware.host_seconds)
    return Seconds(one, one * backward.passes)


def _arithmetic_seconds(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes, hardware: Hardware
) -> Quantity:
    peak = hardware.flops_per_second(itemsize_bytes(op, tensors))
    stretch = math.prod(op.choice(label).stretch for label in {*labels})
    return stretch * sum(
        sizes.flops(op, work, labels) / (peak * efficiency(op, work, labels, sizes, hardware))
        for work in works(op)
    )


def memory_seconds(traffic_bytes: Quantity, hardware: Hardware) -> Quantity:
    """Seconds to read and write this much of the device's own memory."""
    return traffic_bytes / (hardware.memory_bytes_per_second * hardware.memory_efficiency)


def efficiency(op: Op, work: Work, labels: Labels, sizes: Sizes, hardware: Hardware) -> Quantity:
    """Fraction of the peak that a product of matrices reaches; 1 for work that is none.

    A tile that is short in one direction spends its time on loading: the fraction falls as
    x / (x + half) with each extent. Fused attention has a fraction of its own.
    """
    if not work.is_product:
        return 1.0
    if op.kind == FUSED_ATTENTION:
        return hardware.attention_efficiency
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


def backward_passes(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """How many times the forward's work the backward of `op` is.

    A product of matrices has one product per operand that needs a gradient. Fused attention makes its
    scores anew: five products instead of two (Dao 2023, FlashAttention-2, section 3.1.2).
    """
    if not any(tensors[name].needs_grad for name in op.results):
        return 0
    if op.kind == FUSED_ATTENTION:
        return 2.5
    if not is_product(op):
        return 1
    return max(1, min(2, sum(tensors[name].needs_grad for name in op.operands)))


FUSED_ATTENTION = "aten.scaled_dot_product_attention"


def is_product(op: Op) -> bool:
    """Whether `op` multiplies matrices."""
    return any(work.is_product for work in works(op))


def local_bytes(
    op: Op,
    labels: Labels,
    tensors: Mapping[str, Tensor],
    sizes: Sizes,
    inner: frozenset[str] = frozenset(),
) -> Quantity:
    """Bytes that one rank reads and writes: operands and results in their local sizes.

    A row of a table that is looked up is read as it is used, so that the table itself does not count.
    """
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    looked_up = {0} if op.kind == "aten.embedding" else set()
    return sum(
        sizes.bytes(tensors[name], layout)
        for position, (name, layout) in enumerate(zip(names, layouts, strict=True))
        if name not in inner and position not in looked_up
    )


def inner_tensors(graph: Graph) -> frozenset[str]:
    """Tensors that never reach memory where chains of element-wise ops are one kernel.

    Those are what one element-wise op makes for the next, if nobody else wants it.
    """
    uses = Counter(name for op in graph.ops for name in op.operands)
    kept = {name for op in graph.ops for name in op.saved} | set(graph.outputs)
    return frozenset(
        name
        for op in graph.ops
        if _is_pointwise(op)
        for name in op.operands
        if uses[name] == 1 and name not in kept and (made := graph.producer.get(name))
        if _is_pointwise(made)
    )


def _is_pointwise(op: Op) -> bool:
    return not op.is_view and op.has_rule and not is_product(op) and op.kind not in NOT_FUSED


# What ends a chain: lookups, copies and losses have kernels of their own.
NOT_FUSED = frozenset({"aten.embedding", "aten.cat", "aten.cross_entropy_loss", "aten.index"})


def itemsize_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the numbers that the op computes with: its widest result's."""
    seen = (name for name in op.results if name not in op.hidden)
    return max((tensors[name].itemsize_bytes for name in seen), default=4)
