"""Bytes that one rank sends in a collective, with the ring algorithms that send the fewest.

In an all-gather or reduce-scatter of B bytes over n ranks every rank sends (n - 1) / n B, and twice as much in an
all-reduce (Patarasuk and Yuan 2009). Where ranks send different amounts, the bytes are their mean over the n ranks. In
a broadcast or reduce of B bytes all ranks but one send B: (n - 1) / n B. In a scatter or gather (n - 1) / n B leave or
reach the owner: (n - 1) / n^2 B. In a send one rank sends B: B / n.

By rows (`reduce_rows`, `send_rows`) B bytes are those of a message: all ranks but the owner send one, or one rank does.

In a rotation the block of every rank goes round all n, in n - 1 sends of each; back it goes once more, with the sum of
its gradients (`autopar.ops.ring_attention`).

An asynchronous server gets B bytes from each of the other n - 1 ranks, and sends B bytes to each (`serve`). The bytes
are those of its owner, whose link carries all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.cost_model.arith import Quantity

# The last two exchange rows with their experts. Only a run shows how many rows leave a rank; here (n - 1) / n of them
# do, as if all experts were used equally.
EXCHANGES = ("all_to_all", "dispatch", "combine")

_RINGS: Mapping[str, Callable[[Quantity, Quantity], Quantity]] = MappingProxyType(
    {
        "broadcast": lambda before, after: after,
        "reduce": lambda before, after: before,
        "scatter": lambda before, after: after,
        "gather": lambda before, after: before,
        "reduce_rows": lambda before, after: before,
        "keep": lambda before, after: 0,
        "fill": lambda before, after: 0,
        "all_gather": lambda before, after: after,
        "reduce_scatter": lambda before, after: before,
        "all_reduce": lambda before, after: before + after,
        **dict.fromkeys(EXCHANGES, lambda before, after: before),
        "shard": lambda before, after: 0,
        "pad": lambda before, after: 0,
        "partial": lambda before, after: 0,
        "vary": lambda before, after: 0,
    }
)


# How often a rank sends as many bytes as it holds before.
_SENDS: Mapping[str, Callable[[Quantity], Quantity]] = MappingProxyType(
    {
        "send": lambda ranks: 1 / ranks,
        "send_rows": lambda ranks: 1 / ranks,
        "serve": lambda ranks: ranks - 1,
        "rotate": lambda ranks: ranks - 1,
        "rotate_back": lambda ranks: 2 * (ranks - 1),
    }
)


def sends(name: str) -> bool:
    """Whether a collective, named as in `autopar.ir.conversion`, sends anything to other ranks."""
    if name in _SENDS:
        return True
    assert name in _RINGS, f"no formula for the collective {name!r}"
    return _RINGS[name](1, 1) != 0


def traffic_bytes(name: str, *, before_bytes: Quantity, after_bytes: Quantity, ranks: Quantity) -> Quantity:
    """Bytes that a rank sends, on average; it holds `before_bytes` before the collective and `after_bytes` after it."""
    if name in _SENDS:
        return before_bytes * _SENDS[name](ranks)
    assert name in _RINGS, f"no formula for the collective {name!r}"
    return _RINGS[name](before_bytes, after_bytes) * (ranks - 1) / ranks
