"""Fields of a hardware file: its tables, their keys, and the values that each figure may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from autopar.cost_model.machines.hardware import DTYPE_BYTES

Rows: TypeAlias = tuple[Mapping[str, str | float], ...]

# Tables of measurements, each with the columns of its rows.
CURVES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("dtype", "rows", "columns", "inner", "seconds", "predicted_seconds"),
    "collective": ("name", "link", "ranks", "bytes", "seconds", "predicted_seconds"),
}

LINKS = ("inside_node", "across_nodes")


class FigureRule(NamedTuple):
    """The values that a figure may have: in words, and as a function that tests a value."""

    words: str
    holds: Callable[[float], bool]
    whole: bool = False


_COUNT = FigureRule("a positive whole number", lambda x: x >= 1, whole=True)

_WHOLE = FigureRule("a whole number, 0 or more", lambda x: x >= 0, whole=True)

_POSITIVE = FigureRule("a positive number", lambda x: x > 0)

_DURATION = FigureRule("a number, 0 or more", lambda x: x >= 0)

_FRACTION = FigureRule("a fraction, above 0 and up to 1", lambda x: 0 < x <= 1)

_PART = FigureRule("a fraction, 0 to 1", lambda x: 0 <= x <= 1)

_ONE_TO_TWO = FigureRule("a number from 1 to 2", lambda x: 1 <= x <= 2)

REQUIRED = {
    "devices_per_node": _COUNT,
    "memory_bytes": _COUNT,
    "memory_bytes_per_second": _POSITIVE,
    "launch_seconds": _DURATION,
}

OPTIONAL = {
    "matmul_efficiency": _FRACTION,
    "matmul_half_size": _DURATION,
    "memory_efficiency": _FRACTION,
    "attention_efficiency": _FRACTION,
    "host_seconds": _DURATION,
    "update_seconds": _DURATION,
    "step_seconds": _DURATION,
    "hides": _PART,
    "reserved_bytes": _WHOLE,
    "wired_ranks": _WHOLE,
    "reduce_gain_ranks": _COUNT,
}

LINK_REQUIRED = {"bandwidth_bytes_per_second": _POSITIVE, "latency_seconds": _DURATION}

LINK_OPTIONAL = {
    "start_seconds": _DURATION,
    "fill_seconds": _DURATION,
    "reduce_gain": _ONE_TO_TWO,
    "reduce_rounds": _ONE_TO_TWO,
    "exchange_gain": _POSITIVE,
    "send_gain": _POSITIVE,
}

_HOST = {
    "memory_bytes": _WHOLE,
    "bandwidth_bytes_per_second": _POSITIVE,
    "latency_seconds": _DURATION,
    "update_bytes_per_second": _POSITIVE,
}

_NVME = {
    "memory_bytes": _COUNT,
    "read_bytes_per_second": _POSITIVE,
    "write_bytes_per_second": _POSITIVE,
    "latency_seconds": _DURATION,
}

# Tables of the memories other than the device's. A file gives all figures of such a table, or leaves the table out.
MEMORIES: Mapping[str, Mapping[str, FigureRule]] = {"host": _HOST, "nvme": _NVME}

TABLES: Mapping[str, Mapping[str, FigureRule]] = {
    "": REQUIRED | OPTIONAL | {"nodes": _COUNT},
    "peak_flops": dict.fromkeys(DTYPE_BYTES, _POSITIVE),
    **{link: LINK_REQUIRED | LINK_OPTIONAL for link in LINKS},
    **MEMORIES,
}
