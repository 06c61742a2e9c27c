"""Links: bandwidth and latency inside a node, between nodes, and of the groups of one mesh axis.

The formulas of `collectives` use one `Link` per mesh axis. `axis_link` computes it from the link inside a
node and the link between nodes, for groups of n = `size` ranks whose numbers differ by `stride` (a mesh axis
of n ranks, where the later axes together have `stride` ranks):

    in a node        the link inside the node; where every pair of devices has its own wire instead of a switch,
                     a group of n ranks can use n - 1 wires of each device
    between nodes    a ring enters and leaves each node once, over as many NICs as the group has
                     ranks there: r NICs in the node with the fewest; each step of the ring waits
                     for its slowest hop, which is one between nodes
    two nodes        an all-reduce sums inside each node, and the nodes exchange the sums: every NIC sends its
                     part once, where a ring would send it 2 (n - 1) / n times
    all to all       every rank sends the part that leaves its node, (n - r) of n - 1 shares, over
                     its own NIC
    point to point   one rank, one NIC

Every rank has its own NIC (HGX, NVL72), or a share of the node's NICs. Groups that communicate at the same time
therefore do not slow each other down.

Evidence, all in public nccl-tests tables (`benchmarks/accuracy/collective_accuracy.py` prints the errors):
rings over 10 nodes with 1, 2, 4, 8 ranks in each run at 48, 97, 195, 324 GB/s on NICs of 48 GB/s and
NVLink of 350; all-to-all over the same ranks at 44.7, 47.5, 49.5, 50.4 GB/s, which is 46 (n - 1) /
(n - r); a step costs 4 to 10 us whether 0 or 7 of 8 hops stay in a node; 2 nodes with 50 GB/s of NICs
each all-reduce 16 ranks at 78 GB/s, where a ring could not pass 50.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autopar.cost_model.arith import Quantity, larger, smaller


@dataclass(frozen=True)
class Link:
    """The link of one rank; with the default values only bandwidth and latency count, as in a plain ring.

    `autopar.cost_model.collectives` has the formulas that use these figures.

    Attributes:
        bandwidth_bytes_per_second: rate at which a rank of a ring can send while it receives as much.
        latency_seconds: latency of one step of a ring, or of one send.
        start_seconds: start-up time of a collective or a send, on top of the launch of a kernel.
        fill_seconds: upper bound of the time to fill the pipeline; min(transfer time, fill_seconds) is added to the
            transfer time of a message. In NCCL this is the halved bandwidth of LL for short messages, and the set-up of
            Simple for long ones.
        reduce_gain: bandwidth of an all-reduce, as a multiple of the ring's: 1, or up to 2 where switches do the
            additions (NVLink SHARP).
        reduce_rounds: number of rounds of the ring whose latency an all-reduce pays: 2 for reduce-scatter
            and all-gather, 1 for a tree, which is faster between nodes.
        exchange_gain: bandwidth of an all-to-all, as a multiple of the ring's.
        send_gain: bandwidth of a point-to-point send, as a multiple of the ring's.
    """

    bandwidth_bytes_per_second: Quantity
    latency_seconds: Quantity
    start_seconds: Quantity = 0.0
    fill_seconds: Quantity = 0.0
    reduce_gain: Quantity = 1.0
    reduce_rounds: Quantity = 2.0
    exchange_gain: Quantity = 1.0
    send_gain: Quantity = 1.0


class Wiring(Protocol):
    """The figures of a machine that decide the link of a group; `Hardware` has them."""

    @property
    def devices_per_node(self) -> int: ...

    @property
    def inside_node(self) -> Link: ...

    @property
    def across_nodes(self) -> Link: ...

    @property
    def wired_ranks(self) -> int: ...

    @property
    def reduce_gain_ranks(self) -> int: ...


def axis_link(hardware: Wiring, stride: Quantity, size: Quantity, ranks: Quantity | None = None) -> Link:
    """The link of groups of `size` ranks whose numbers differ by `stride`.

    Args:
        hardware: figures of the machine, as numbers or symbols.
        stride, size: numbers, or arrays of one shape, which give a link whose figures are arrays.
        ranks: number of ranks of the whole mesh; None for more ranks than a node has. It matters only where groups fit
            into a node but do not divide it, so that one group has ranks in two nodes.
    """
    node = hardware.devices_per_node
    fits = (node % (stride * size)) == 0
    if ranks is not None:
        fits = fits | (ranks <= node)
    if isinstance(fits, np.ndarray):
        return _blend(fits, _inside(hardware, size), _across(hardware, stride, size))
    return _inside(hardware, size) if fits else _across(hardware, stride, size)


def ranks_in_node(hardware: Wiring, stride: Quantity, size: Quantity) -> Quantity:
    """Number of ranks that a group spanning several nodes has in the node where it has the fewest.

    The boundaries of groups lie in a node at multiples of g = gcd(stride * size, ranks of a node), so that a group has
    at least g // stride ranks in each of its nodes.
    """
    return larger(1, _gcd(stride * size, hardware.devices_per_node) // stride)


def _inside(hardware: Wiring, size: Quantity) -> Link:
    link = hardware.inside_node
    gains = size >= hardware.reduce_gain_ranks
    return Link(
        link.bandwidth_bytes_per_second * _wires(hardware, size),
        link.latency_seconds,
        link.start_seconds,
        link.fill_seconds,
        1.0 + (link.reduce_gain - 1.0) * gains,
        link.reduce_rounds,
        link.exchange_gain,
        link.send_gain,
    )


def _wires(hardware: Wiring, size: Quantity) -> Quantity:
    """Fraction of a device's wires that a group inside a node can use; 1 where a switch connects the devices."""
    if not hardware.wired_ranks:
        return 1.0
    return larger(1, smaller(size, hardware.wired_ranks) - 1) / (hardware.wired_ranks - 1)


def _across(hardware: Wiring, stride: Quantity, size: Quantity) -> Link:
    """The link of groups that span nodes. None of its figures is better than inside a node."""
    out, here = hardware.across_nodes, ranks_in_node(hardware, stride, size)
    inside = _inside(hardware, smaller(size, hardware.devices_per_node))
    nic = out.bandwidth_bytes_per_second
    bandwidth = smaller(nic * here, inside.bandwidth_bytes_per_second)
    exchange = smaller(
        nic * out.exchange_gain * larger(1, size - 1) / larger(1, size - here),
        inside.bandwidth_bytes_per_second * inside.exchange_gain,
    )
    send = smaller(nic * out.send_gain, inside.bandwidth_bytes_per_second * inside.send_gain)
    gain = larger(1.0, out.reduce_gain)
    if_two = smaller(inside.bandwidth_bytes_per_second * inside.reduce_gain, nic * here * 2 * (size - 1) / size)
    gain = gain + larger(0.0, if_two / bandwidth - gain) * (size == 2 * here)
    most = inside.bandwidth_bytes_per_second * inside.reduce_gain / bandwidth
    return Link(
        bandwidth,
        larger(out.latency_seconds, inside.latency_seconds * inside.reduce_rounds / out.reduce_rounds),
        larger(out.start_seconds, inside.start_seconds),
        larger(out.fill_seconds, inside.fill_seconds),
        smaller(gain, smaller(most, 2.0)),
        out.reduce_rounds,
        exchange / bandwidth,
        send / bandwidth,
    )


def _blend(condition: np.ndarray, yes: Link, no: Link) -> Link:
    """A link whose figures are those of `yes` where the condition holds, and those of `no` elsewhere."""
    fields: dict[str, Any] = {name: np.where(condition, value, getattr(no, name)) for name, value in vars(yes).items()}
    return Link(**fields)


def _gcd(a: Quantity, b: Quantity) -> Quantity:
    return math.gcd(a, b) if isinstance(a, int) else np.gcd(a, b)
