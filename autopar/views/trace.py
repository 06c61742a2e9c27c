"""A predicted step as a Chrome trace, to lay beside a real one in Perfetto or chrome://tracing.

The form is the JSON object of the Trace Event Format: complete events (`"ph": "X"`) with `ts` and
`dur` in microseconds, and metadata events (`"ph": "M"`) that name the process and its threads. Events
of one thread must nest, so that what overlaps on a lane is written to a second thread of that lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autopar.cost_model.breakdown import Event
from autopar.errors import AutoparError
from autopar.ir.files import parse_json, read_text, save_text
from autopar.views.lanes import LaneRow, end, rows

PROCESS = 0  # rank; one stands for all
_NANOSECONDS = 1e9


def write_trace(events: Iterable[Event], path: Path | str) -> None:
    """Writes the events to `path`. Details that JSON has no type for are written as text.

    Raises AutoparError for a file that cannot be written.
    """
    text = json.dumps(to_trace(events), default=str, allow_nan=False)
    save_text(text + "\n", path)


def to_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace as a JSON object."""
    threads = rows(events)
    named = [_metadata("process_name", 0, name="predicted step")]
    for tid, row in enumerate(threads):
        named.append(_metadata("thread_name", tid, name=row.name))
        named.append(_metadata("thread_sort_index", tid, sort_index=tid))
    timed = [_complete(event, tid, row) for tid, row in enumerate(threads) for event in row.events]
    return {"displayTimeUnit": "ms", "traceEvents": named + timed}


def read_trace(path: Path | str) -> tuple[Event, ...]:
    """The events of a trace that `write_trace` wrote, by lane and start, to the nanosecond.

    Raises AutoparError for another file.
    """
    try:
        document = parse_json(read_text(path))
        return tuple(
            Event(each["cat"], each["name"], each["ts"] / 1e6, each["dur"] / 1e6, each["args"])
            for each in document["traceEvents"]
            if each["ph"] == "X"
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise AutoparError(
            f"{path} is not a trace that autopar wrote (autopar explain --trace). {type(error).__name__}: {error}"
        ) from error


def _metadata(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": tid, "args": args}


def _complete(event: Event, tid: int, row: LaneRow) -> dict[str, Any]:
    # Both ends are rounded, not start and duration: events that meet then still meet.
    start = round(event.start_seconds * _NANOSECONDS)
    stop = round(end(event) * _NANOSECONDS)
    return {
        "ph": "X",
        "name": event.name,
        "cat": row.lane,
        "pid": PROCESS,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (stop - start) / 1e3,
        "args": dict(event.detail),
    }
