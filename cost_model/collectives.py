"""Seconds of collectives and conversions, by the latency and bandwidth of a ring.

A ring over n ranks takes n - 1 hops, and sends (n - 1) / n of the whole tensor over each link
(Patarasuk and Yuan 2009). With B the bytes of the whole, which a rank holds on one side of the
step:

    all_gather      (n - 1) latency + (n - 1) / n  B / bandwidth      B after the step
    reduce_scatter  the same                                          B before the step
    all_reduce      reduce_scatter + all_gather
    all_to_all      the same, with B the bytes that a rank holds
    shard, pad, partial   read and written in the rank's own memory
    vary            nothing

An unknown name is an error, never zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autopar.cost_model.arith import smaller
from autopar.cost_model.hardware import Hardware, Link
from autopar.cost_model.sizes import Sizes
from autopar.ir import Layout, Step, Tensor, steps


class Seconds(NamedTuple):
    """Time of something that runs once forward and once backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


BUCKET_BYTES = 25 * 2**20  # of torch's DistributedDataParallel; the runtime's default


class _Message(NamedTuple):
    """What a formula may look at.

    `bucketed` messages share a collective of `BUCKET_BYTES` with others, and its latency.
    """

    before_bytes: int
    after_bytes: int
    ranks: int
    link: Link
    hardware: Hardware
    bucketed: bool


def _ring(whole_bytes: int, m: _Message) -> float:
    hops = m.ranks - 1
    transfer = hops / m.ranks * whole_bytes / m.link.bandwidth_bytes_per_second
    start = m.hardware.launch_seconds + hops * m.link.latency_seconds
    share = smaller(1.0, whole_bytes / BUCKET_BYTES) if m.bucketed else 1.0
    return share * start + transfer


def _copy(read_bytes: int, written_bytes: int, m: _Message) -> float:
    traffic = read_bytes + written_bytes
    return m.hardware.launch_seconds + traffic / m.hardware.memory_bytes_per_second


_FORMULAS: dict[str, Callable[[_Message], float]] = {
    "all_gather": lambda m: _ring(m.after_bytes, m),
    "reduce_scatter": lambda m: _ring(m.before_bytes, m),
    "all_reduce": lambda m: _ring(m.before_bytes, m) + _ring(m.after_bytes, m),
    "all_to_all": lambda m: _ring(m.before_bytes, m),
    "shard": lambda m: _copy(m.after_bytes, m.after_bytes, m),
    "pad": lambda m: _copy(m.before_bytes, m.after_bytes, m),
    "partial": lambda m: _copy(m.before_bytes, m.after_bytes, m),
    "vary": lambda m: 0.0,
}

_TRAFFIC = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})


def communicates(step: Step) -> bool:
    """Whether the forward of a step sends anything to other ranks."""
    return step.transition.forward in _TRAFFIC


def collective_seconds(
    name: str,
    *,
    before_bytes: int,
    after_bytes: int,
    ranks: int,
    link: Link,
    hardware: Hardware,
    bucketed: bool = False,
) -> float:
    """Seconds of one collective, named as in `autopar.ir.conversion`.

    `before_bytes` and `after_bytes` are what one rank holds before and after it.
    """
    assert name in _FORMULAS, f"no formula for the collective {name!r}"
    if ranks == 1:
        return 0.0
    return _FORMULAS[name](_Message(before_bytes, after_bytes, ranks, link, hardware, bucketed))


def conversion_seconds(
    tensor: Tensor,
    source: Layout,
    target: Layout,
    *,
    sizes: Sizes,
    hardware: Hardware,
    bucketed: bool = False,
) -> Seconds:
    """Seconds to convert `tensor` between two layouts, and its gradient back if it has one.

    `bucketed` conversions share collectives with those of other tensors.
    """
    if source == target:
        return Seconds(0.0, 0.0)
    forward = backward = 0.0
    layout = list(source)
    before = sizes.bytes(tensor, source)
    for step in steps(source, target):
        layout[step.axis] = step.target
        after = sizes.bytes(tensor, tuple(layout))
        forward += _along(step, step.transition.forward, before, after, sizes, hardware, bucketed)
        if tensor.needs_grad:
            backward += _along(
                step, step.transition.backward, after, before, sizes, hardware, bucketed
            )
        before = after
    return Seconds(forward, backward)


def _along(
    step: Step, name: str, before: int, after: int, sizes: Sizes, hardware: Hardware, bucketed: bool
) -> float:
    return collective_seconds(
        name,
        before_bytes=before,
        after_bytes=after,
        ranks=sizes.mesh.sizes[step.axis],
        link=hardware.link(sizes.mesh, step.axis),
        hardware=hardware,
        bucketed=bucketed,
    )
