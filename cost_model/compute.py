"""Seconds of one op on one rank: a roofline over FLOPs and bytes, plus the launch of its kernel.

    product      launch + max(flops / (peak * efficiency(rows, columns, inner)), bytes / bandwidth)
    other        launch + max(flops / peak, bytes / bandwidth)
    body         the sum over its kernels, each a product or another op (a mixture of experts)

`flops` is what one rank computes, and `bytes` what it reads and writes. Where the ranks have unequal work
(`Choice.stretch`), `flops` are those of the busiest rank. The backward of a matrix product is two products of the same
size, one per operand that needs a gradient. The backward of any other op reads and writes about as much as its
forward (Kaplan et al. 2020, section 2.1: 2N forward and 4N backward).

A product whose operands are rounded (`Op.product_itemsize_bytes`) reads them in their own format and writes them in the
narrow one, in a kernel before; the product then has the peak of the narrow format. In backward the product that makes
the gradient of the weight is not rounded (`autopar.ops.float8`).

The formulas accept numbers and symbols, see `autopar.cost_model.arith`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.collectives import Seconds
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import (
    EXCHANGED,
    UNSPLIT,
    Graph,
    Labels,
    Moved,
    Op,
    Tensor,
    Work,
    operand_layouts,
    plain,
    result_layouts,
    split_factors,
)


class Direction(NamedTuple):
    """One direction of an op on one rank.

    Attributes:
        passes: number of times that the kernel runs; the figures below hold for one pass.
        seconds: device time, without the launch.
        traffic_bytes: bytes read and written in the device's own memory.
        flops: floating-point operations.
    """

    passes: float
    seconds: Quantity
    traffic_bytes: Quantity
    flops: Quantity


class OpPrice(NamedTuple):
    """The prices of an op in forward and in backward."""

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
        """Prices `op`, run with one choice per mesh axis. Tensors in `inner` stay in registers and cost no traffic."""
        if is_body(op):
            return cls(*_body(op, labels, tensors, sizes, hardware))
        if op.is_view:
            forward = Direction(1, 0.0, 0.0, 0.0)
        else:
            flops = sum(sizes.flops(op, work, labels) for work in works(op))
            moved = local_bytes(op, labels, tensors, sizes, inner)
            seconds = larger(
                _arithmetic_seconds(op, labels, result_itemsize_bytes(op, tensors), sizes, hardware),
                memory_seconds(moved, hardware),
            )
            forward = Direction(1, seconds, moved, flops)
        passes = backward_passes(op, tensors)
        if op.product_itemsize_bytes is None:
            return cls(forward, forward._replace(passes=passes))
        of_x, of_weight, of_result = _sizes_of_linear(op, labels, tensors, sizes)
        rounding = partial(_rounded, forward, op, labels, sizes=sizes, hardware=hardware)
        backward = (rounding((of_result, of_weight)), forward)  # of the input, and of the weight
        wanted = [each for x, each in zip(op.operands, backward, strict=True) if tensors[x].needs_grad]
        return cls(rounding((of_x, of_weight)), _mean(wanted or backward[:1])._replace(passes=passes))


def is_body(op: Op) -> bool:
    """Whether an op is a body of several kernels, such as a mixture of experts."""
    return any(work.moved for work in op.work)


def _body(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes, hardware: Hardware
) -> tuple[Direction, Direction]:
    """Both directions of a body of kernels, each of which takes as long as it would alone."""
    found = [(work.gradients, _kernel(op, work, labels, sizes, hardware)) for work in op.work]
    forward = _mean([each for _, each in found])
    trains = any(tensors[name].needs_grad for name in op.results)
    backward = [each for gradients, each in found for _ in range(gradients * trains)]
    return forward, _mean(backward) if backward else forward._replace(passes=0)


def _kernel(op: Op, work: Work, labels: Labels, sizes: Sizes, hardware: Hardware) -> Direction:
    moved = sum(_moved_bytes(op, each, labels, sizes) for each in work.moved)
    seconds = memory_seconds(moved, hardware)
    if work.itemsize_bytes is not None:
        seconds = larger(_work_seconds(op, work, labels, work.itemsize_bytes, sizes, hardware), seconds)
    return Direction(1, seconds, moved, sizes.flops(op, work, labels))


def _moved_bytes(op: Op, moved: Moved, labels: Labels, sizes: Sizes) -> Quantity:
    """Bytes of a tensor of a body on the busiest rank, which has more of the rows that ranks exchange."""
    own = {leaf.label for leaf in moved.leaves}
    exchanged = {x for x in map(plain, labels) if EXCHANGED in x and split_factors(x)[0] in own}
    stretch = math.prod(op.choice(label).stretch for label in exchanged)
    return stretch * moved.itemsize_bytes * sizes.extent(moved.leaves, labels)


class _Size(NamedTuple):
    """Bytes of a tensor on one rank, in its own format, and bytes of one of its elements."""

    bytes: Quantity
    itemsize_bytes: int


def _sizes_of_linear(op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes) -> list[_Size]:
    """The sizes of the two operands and of the result of a rounded product."""
    names = (*op.operands, *op.results[:1])
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels)[:1])
    return [
        _Size(sizes.bytes(tensors[x], layout), tensors[x].itemsize_bytes)
        for x, layout in zip(names, layouts, strict=True)
    ]


def _rounded(
    plain: Direction, op: Op, labels: Labels, operands: Sequence[_Size], *, sizes: Sizes, hardware: Hardware
) -> Direction:
    """A product that rounds these operands before, where `plain` is the one that does not."""
    narrow = op.product_itemsize_bytes
    assert narrow is not None, "the op rounds"
    read = sum(each.bytes for each in operands)
    written = sum(each.bytes * (narrow / each.itemsize_bytes) for each in operands)
    seconds = larger(
        _arithmetic_seconds(op, labels, narrow, sizes, hardware),
        memory_seconds(plain.traffic_bytes - read + written, hardware),
    )
    rounding = memory_seconds(read + written, hardware)
    return Direction(1, seconds + rounding, plain.traffic_bytes + 2 * written, plain.flops)


def _mean(passes: Sequence[Direction]) -> Direction:
    """The pass that takes as long, times its number, as these passes together.

    >>> _mean([Direction(1, 1.0, 10.0, 4.0), Direction(1, 3.0, 30.0, 8.0)])
    Direction(passes=2, seconds=2.0, traffic_bytes=20.0, flops=6.0)
    """
    count = len(passes)
    return Direction(
        count,
        sum(each.seconds for each in passes) / count,
        sum(each.traffic_bytes for each in passes) / count,
        sum(each.flops for each in passes) / count,
    )


def op_seconds(op: Op, labels: Labels, tensors: Mapping[str, Tensor], *, sizes: Sizes, hardware: Hardware) -> Seconds:
    """Seconds of `op` with its launch, run with one choice per mesh axis. A view moves no data and takes 0 seconds."""
    if op.is_view:
        return Seconds(0.0, 0.0)
    forward, backward = OpPrice.of(op, labels, tensors, sizes, hardware)
    return Seconds(
        *(
            each.passes * larger(hardware.launch_seconds + each.seconds, hardware.host_seconds)
            for each in (forward, backward)
        )
    )


def _arithmetic_seconds(op: Op, labels: Labels, itemsize_bytes: int, sizes: Sizes, hardware: Hardware) -> Quantity:
    return sum(_work_seconds(op, work, labels, itemsize_bytes, sizes, hardware) for work in works(op))


def _work_seconds(
    op: Op, work: Work, labels: Labels, itemsize_bytes: int, sizes: Sizes, hardware: Hardware
) -> Quantity:
    peak = hardware.flops_per_second(itemsize_bytes)
    stretch = math.prod(op.choice(label).stretch for label in {*map(plain, labels)})
    return stretch * sizes.flops(op, work, labels) / (peak * efficiency(op, work, labels, sizes, hardware))


def memory_seconds(traffic_bytes: Quantity, hardware: Hardware) -> Quantity:
    """Seconds to read and write this much of the device's own memory."""
    return traffic_bytes / (hardware.memory_bytes_per_second * hardware.memory_efficiency)


def efficiency(op: Op, work: Work, labels: Labels, sizes: Sizes, hardware: Hardware) -> Quantity:
    """Fraction of the peak FLOP/s that a matrix product reaches; 1 for other work.

    A product that is short in one direction spends its time on loading. The fraction therefore has a factor
    x / (x + half) for each extent x (rows, columns, inner). Fused attention has a fraction of its own.

    Rows that meet one of several matrices are as many products. Ranks that exchange rows have fewer matrices each,
    and as many rows for each of them as one rank would have.
    """
    if not work.is_product:
        return 1.0
    if op.kind == FUSED_ATTENTION:
        return hardware.attention_efficiency
    reached = hardware.matmul_efficiency
    if isinstance(hardware.matmul_half_size, (int, float)) and not hardware.matmul_half_size:
        return reached
    kept = tuple(UNSPLIT if EXCHANGED in label else label for label in labels)
    groups = math.prod((sizes.factor(leaf) for leaf in work.groups), start=1)
    for leaves, matrices in ((work.rows, groups), (work.columns, 1), (work.inner, 1)):
        extent = sizes.extent(leaves, kept) / matrices
        reached = reached * extent / (extent + hardware.matmul_half_size)
    return reached


def works(op: Op) -> tuple[Work, ...]:
    """The loop nests of an op; for an op without a description, one nest with all its flops and no shape."""
    return op.work or (Work(op.flops),)


def backward_passes(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Work of the backward of `op`, as a multiple of the work of its forward.

    The backward of a matrix product has one product per operand that needs a gradient. Fused attention recomputes its
    scores: five products in backward for two in forward (Dao 2023, FlashAttention-2, section 3.1.2).
    """
    if not any(tensors[name].needs_grad for name in op.results):
        return 0
    if op.kind == FUSED_ATTENTION:
        return 2.5
    if is_body(op):
        return sum(work.gradients * work.flops for work in op.work) / op.flops
    if not is_product(op):
        return 1
    return max(1, min(2, sum(tensors[name].needs_grad for name in op.operands)))


FUSED_ATTENTION = "aten.scaled_dot_product_attention"


def is_product(op: Op) -> bool:
    """Whether `op` multiplies matrices."""
    return any(work.is_product for work in works(op))


def local_bytes(
    op: Op, labels: Labels, tensors: Mapping[str, Tensor], sizes: Sizes, inner: frozenset[str] = frozenset()
) -> Quantity:
    """Bytes that one rank reads and writes in an op: its operands and results in their local sizes.

    The table of an embedding does not count: an op reads only the rows that it looks up, and they count as the result.
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
    """Names of tensors that stay in registers where chains of element-wise ops run as one kernel.

    These are results of an element-wise op that only another element-wise op uses. Backward of the latter, which is one
    kernel, too, computes them again from what the chain reads.
    """
    uses = Counter(name for op in graph.ops for name in op.operands)
    return frozenset(
        name
        for op in graph.ops
        if _is_pointwise(op)
        for name in op.operands
        if uses[name] == 1 and name not in graph.outputs and (made := graph.producer.get(name))
        if _is_pointwise(made)
    )


def _is_pointwise(op: Op) -> bool:
    return not op.is_view and op.has_rule and not is_product(op) and op.kind not in NOT_FUSED


# Lookups, copies and losses have kernels of their own, so that a chain ends there.
NOT_FUSED = frozenset({"aten.embedding", "aten.cat", "aten.cross_entropy_loss", "aten.index"})


def result_itemsize_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of one number in the op's arithmetic: those of its widest result."""
    seen = (name for name in op.results if name not in op.hidden)
    return max((tensors[name].itemsize_bytes for name in seen), default=4)
