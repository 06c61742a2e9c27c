"""Bytes that one rank sends in a collective, by the ring that attains the lower bound.

Patarasuk and Yuan 2009: an all-gather or reduce-scatter of B bytes over n ranks sends (n - 1) / n B
from each, an all-reduce twice that. A broadcast or reduce of B bytes sends B from all ranks but one, which is as
much on average; a scatter or gather moves (n - 1) / n B from or to the owner, and a send B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.cost_model.arith import Quantity

# The last two exchange rows with their experts. How many leave a rank is known in a run alone; as if the experts were
# evenly used, n - 1 of n do.
EXCHANGES = ("all_to_all", "dispatch", "combine")

_RINGS: Mapping[str, Callable[[Quantity, Quantity], Quantity]] = MappingProxyType(
    {
        "broadcast": lambda before, after: after,
        "reduce": lambda before, after: before,
        "scatter": lambda before, after: before,
        "gather": lambda before, after: after,
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


def sends(name: str) -> bool:
    """Whether a collective, named as in `autopar.ir.conversion`, sends anything to other ranks."""
    if name == "send":
        return True
    assert name in _RINGS, f"no formula for the collective {name!r}"
    return _RINGS[name](1, 1) != 0


def traffic_bytes(
    name: str, *, before_bytes: Quantity, after_bytes: Quantity, ranks: Quantity
) -> Quantity:
    """Bytes that a rank sends; `before_bytes` and `after_bytes` are what it holds on either side."""
    if name == "send":
        return before_bytes
    assert name in _RINGS, f"no formula for the collective {name!r}"
    return _RINGS[name](before_bytes, after_bytes) * (ranks - 1) / ranks
