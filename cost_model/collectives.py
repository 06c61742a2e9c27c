"""Seconds of collectives and conversions, by the latency and bandwidth of a ring.

A ring over n ranks takes n - 1 steps, and sends (n - 1) / n of the whole tensor over each link (Patarasuk and Yuan
2009). Let B be the bytes of the whole tensor, which a rank holds before or after the collective, and
t = (n - 1) / n  B / bandwidth. The seconds are:

    all_gather      launch + start + (n - 1) latency + t + min(t, fill)      B after the step
    reduce_scatter  the same                                                 B before the step
    all_reduce        a reduce_scatter and an all_gather, with bandwidth * reduce_gain, and reduce_rounds (n - 1)
    latency all_to_all      as all_gather, with bandwidth * exchange_gain and B the bytes that a rank holds
    dispatch, combine   the same, as if experts were evenly used: n - 1 of n rows go to other ranks (a guess)
    broadcast       launch + start + (n - 1) latency + B / bandwidth         B after the step
    reduce          the same                                                 B before the step
    scatter, gather as all_gather                                            B of the whole
    send            launch + start + latency + B / (bandwidth * send_gain)   B bytes to one other rank
    reduce_rows     launch + start + latency + (n - 1) B / (bandwidth * send_gain), and reading and writing A bytes in
                    the rank's memory; B of a message, A of the whole tensor
    send_rows       the same with n = 2
    serve           2 (n - 1) sends over the owner's link                    B bytes of a message
    rotate          n - 1 sends                                              B bytes of a rank's block
    rotate_back     twice as many                                            B bytes of a rank's block
    fill            written in the rank's own memory
    shard, pad, partial   read and written in the rank's own memory
    vary, keep      nothing

A broadcast of a long tensor is a pipeline along the ring: every rank passes on one piece while it receives the next. A
reduce is a broadcast in the opposite direction. A scatter or gather is limited by the link of the one rank that has
the whole tensor, which carries (n - 1) / n of it (Chan, Heimlich, Purkayastha and van de Geijn, Collective
communication: theory, practice, and experience, 2007, sections 3 and 4).

A short message ends before the pipeline is full, and takes its transfer time twice. With the default figures of `Link`
only latency and bandwidth count, as in a plain ring. Because reduce_gain is at most 2 and reduce_rounds at least 1, an
all-reduce never costs less than its reduce-scatter.

An unknown name of a collective is an error, never zero seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import EXCHANGES
from autopar.ir import Labels, Layout, LayoutStep, Op, Tensor, plain


class Seconds(NamedTuple):
    """Seconds of work that runs once in forward and once in backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


BUCKET_BYTES = 25 * 2**20  # of torch's DistributedDataParallel


class _Message(NamedTuple):
    """The arguments of a formula.

    A `bucketed` message shares a collective of `bucket_bytes`, and its latency, with other messages.
    """

    before_bytes: Quantity
    after_bytes: Quantity
    ranks: Quantity
    link: Link
    hardware: Hardware
    bucketed: bool
    bucket_bytes: Quantity = BUCKET_BYTES


def _ring(whole_bytes: Quantity, m: _Message, gain: Quantity = 1.0) -> Quantity:
    """Seconds of n - 1 steps around the ring, at `gain` times the bandwidth of the link."""
    link = m.link
    hops = m.ranks - 1
    transfer = hops / m.ranks * whole_bytes / (link.bandwidth_bytes_per_second * gain)
    start = _begin(m) + hops * link.latency_seconds
    share = _share(whole_bytes, m)
    return share * start + transfer + _fill(transfer, share, m)


def _chain(whole_bytes: Quantity, m: _Message) -> Quantity:
    """Seconds to pass a tensor along the ring from its owner to the last rank, in pieces so that all links are busy."""
    link, hops = m.link, m.ranks - 1
    transfer = whole_bytes / link.bandwidth_bytes_per_second
    start = _begin(m) + hops * link.latency_seconds
    share = _share(whole_bytes, m)
    return share * start + transfer + _fill(transfer, share, m)


def _begin(m: _Message) -> Quantity:
    return m.hardware.launch_seconds + m.link.start_seconds


def _all_reduce(m: _Message) -> Quantity:
    """Seconds of a reduce-scatter and an all-gather, less the latency that a tree saves."""
    gain = m.link.reduce_gain
    both = _ring(m.before_bytes, m, gain) + _ring(m.after_bytes, m, gain)
    saved = (2.0 - m.link.reduce_rounds) * (m.ranks - 1) * m.link.latency_seconds
    return both - _share(m.before_bytes, m) * saved


def _share(whole_bytes: Quantity, m: _Message) -> Quantity:
    """Fraction of a bucket's latency that counts for one of its messages; 1 for a message on its own."""
    return smaller(1.0, whole_bytes / m.bucket_bytes) if m.bucketed else 1.0


def _fill(transfer_seconds: Quantity, share: Quantity, m: _Message) -> Quantity:
    """Seconds to fill the pipeline; a message in a bucket has its share of the bucket's min(t, fill)."""
    fill_seconds = m.link.fill_seconds
    if isinstance(fill_seconds, int | float) and not fill_seconds:
        return 0.0
    return smaller(transfer_seconds, share * fill_seconds)


def _send(m: _Message) -> Quantity:
    link = m.link
    start = _begin(m) + link.latency_seconds
    transfer = m.before_bytes / (link.bandwidth_bytes_per_second * link.send_gain)
    return (_share(m.before_bytes, m) * start if m.bucketed else start) + transfer


def _rows(messages: Quantity, m: _Message) -> Quantity:
    """Seconds in which an owner gets messages by rows, one after another over its link.

    A sender reads its tensor to find the rows, and the owner adds them to its own.
    """
    link, latency = m.link, _begin(m) + m.link.latency_seconds
    transfer = messages * m.before_bytes / (link.bandwidth_bytes_per_second * link.send_gain)
    share = _share(m.after_bytes, m) if m.bucketed else 1.0
    return share * latency + transfer + 2 * m.after_bytes / m.hardware.memory_bytes_per_second


def _serve(m: _Message) -> Quantity:
    """Seconds in which an asynchronous server takes a message from each other rank and answers with one.

    The messages of all ranks share the owner's link, so that they come one after another.
    """
    link, size_bytes = m.link, m.before_bytes
    transfer = size_bytes / (link.bandwidth_bytes_per_second * link.send_gain)
    start = _begin(m) + link.latency_seconds
    once = (_share(size_bytes, m) * start if m.bucketed else start) + transfer
    return 2 * (m.ranks - 1) * once


def _rotate(m: _Message) -> Quantity:
    """A rank's block goes round, while those of all others do."""
    return (m.ranks - 1) * _send(m)


def _copy(read_bytes: Quantity, written_bytes: Quantity, m: _Message) -> Quantity:
    traffic = read_bytes + written_bytes
    return m.hardware.launch_seconds + traffic / m.hardware.memory_bytes_per_second


_FORMULAS: dict[str, Callable[[_Message], Quantity]] = {
    "all_gather": lambda m: _ring(m.after_bytes, m),
    "reduce_scatter": lambda m: _ring(m.before_bytes, m),
    "all_reduce": _all_reduce,
    **dict.fromkeys(EXCHANGES, lambda m: _ring(m.before_bytes, m, m.link.exchange_gain)),
    "broadcast": lambda m: _chain(m.after_bytes, m),
    "reduce": lambda m: _chain(m.before_bytes, m),
    "scatter": lambda m: _ring(m.before_bytes, m),
    "gather": lambda m: _ring(m.after_bytes, m),
    "send": _send,
    "reduce_rows": lambda m: _rows(m.ranks - 1, m),
    "send_rows": lambda m: _rows(1, m),
    "serve": _serve,
    "rotate": _rotate,
    "rotate_back": lambda m: 2 * _rotate(m),
    "fill": lambda m: _copy(0, m.after_bytes, m),
    "keep": lambda m: 0.0,
    "shard": lambda m: _copy(m.after_bytes, m.after_bytes, m),
    "pad": lambda m: _copy(m.before_bytes, m.after_bytes, m),
    "partial": lambda m: _copy(m.before_bytes, m.after_bytes, m),
    "vary": lambda m: 0.0,
}

_TRAFFIC = frozenset(
    {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "broadcast",
        "reduce",
        "scatter",
        "gather",
        "send",
        "reduce_rows",
        "send_rows",
        "serve",
        "rotate",
        "rotate_back",
        *EXCHANGES,
    }
)


def communicates(step: LayoutStep) -> bool:
    """Whether a layout change along one mesh axis runs a collective between ranks in forward."""
    return step.transition.forward in _TRAFFIC


def collective_seconds(
    name: str,
    *,
    before_bytes: Quantity,
    after_bytes: Quantity,
    ranks: Quantity,
    link: Link,
    hardware: Hardware,
    bucketed: bool = False,
    bucket_bytes: float = BUCKET_BYTES,
) -> Quantity:
    """Seconds of one collective, named as in `autopar.ir.conversion`; 0 for a single rank.

    `before_bytes` and `after_bytes` are the bytes that one rank holds before and after the collective. The arguments
    may be symbols, or arrays of one shape.
    """
    assert name in _FORMULAS, f"no formula for the collective {name!r}"
    if isinstance(ranks, int) and ranks == 1:
        return 0.0
    message = _Message(before_bytes, after_bytes, ranks, link, hardware, bucketed, bucket_bytes)
    seconds = _FORMULAS[name](message)
    return seconds if isinstance(ranks, int) else smaller(1, ranks - 1) * seconds


def conversion_seconds(
    tensor: Tensor, source: Layout, target: Layout, *, sizes: Sizes, hardware: Hardware, bucketed: bool = False
) -> Seconds:
    """Seconds to convert `tensor` between two layouts, and its gradient back if it has one.

    The gradient of a parameter counts in its own dtype. A `bucketed` conversion shares collectives with other tensors.
    """
    if source == target:
        return Seconds(0.0, 0.0)
    forward = backward = 0.0
    scale = tensor.gradient_scale
    for step, before, after in sizes.steps(tensor, source, target):
        forward += _along(step, step.transition.forward, before, after, sizes, hardware, bucketed)
        if tensor.needs_grad:
            backward += _along(step, step.transition.backward, scale * after, scale * before, sizes, hardware, bucketed)
    return Seconds(forward, backward)


def own_collectives(op: Op, labels: Labels, sizes: Sizes) -> Iterator[tuple[int, str, str, Quantity, Quantity]]:
    """Yields the collectives that a split `op` runs as part of its computation.

    For each one: the axis, its name in forward and in backward ("" for none), and the bytes that a rank holds before
    and after the forward.
    """
    for each in op.collectives:
        before = each.itemsize_bytes * each.stretch * sizes.extent(each.leaves, labels)
        for axis, label in enumerate(labels):
            if plain(label) in each.labels:
                grown = sizes.axis(axis) if each.forward == "all_gather" else 1
                yield axis, each.forward, each.backward, before, before * grown
                # Along a later axis a block goes round once for every step along this one.
                before = before * (sizes.axis(axis) if each.forward == "rotate" else 1)


def _along(
    step: LayoutStep, name: str, before: float, after: float, sizes: Sizes, hardware: Hardware, bucketed: bool
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
