"""A profiler trace read by a program: what of communication and copies lies beside compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from autopar import _torch

Kind = Literal["compute", "communication", "copy"]
Interval = tuple[float, float]  # start and end in seconds

# Names of kernels and of Gloo's work that move data between ranks.
COMMUNICATION = ("nccl", "gloo:", "rccl", "oneccl")
COPIES = ("Memcpy HtoD", "Memcpy DtoH")
# Calls in which the host waits for the device.
WAITS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time that intervals cover.

    >>> length([(0, 2), (1, 3)])
    3
    """
    return sum(end - start for start, end in union(intervals))


def shared(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """The time that lies in both: what both cover, less what either covers.

    >>> shared([(0, 2), (5, 6)], [(1, 5.5)])
    1.5
    """
    return length(a) + length(b) - length([*a, *b])


@dataclass(frozen=True)
class Trace:
    """One step of a rank.

    Attributes:
        spans: kind of work -> its intervals.
        step: the interval from the first work to the end of the last.
        waits: number of times that the host waits for the device.
    """

    spans: dict[Kind, list[Interval]]
    step: Interval
    waits: int = 0

    def beside_compute(self, kind: Kind) -> float | None:
        """The share of a kind's time in which something is computed; None where the trace has none of it."""
        spans = self.spans[kind]
        return shared(spans, self.spans["compute"]) / length(spans) if spans else None

    @property
    def idle(self) -> float:
        """The share of the step in which nothing is computed."""
        whole = self.step[1] - self.step[0]
        return 1 - length(self.spans["compute"]) / whole if whole else 0.0


def kind_of(name: str, *, on_accelerator: bool) -> Kind | None:
    """What an event does; None for one that only surrounds others, or belongs to the host.

    >>> kind_of("ncclDevKernel_AllReduce", on_accelerator=True)
    'communication'
    >>> kind_of("aten::mm", on_accelerator=False), kind_of("MmBackward0", on_accelerator=False)
    ('compute', None)
    """
    if any(name.lower().startswith(word) for word in COMMUNICATION):
        return "communication"
    if name.startswith(COPIES):
        return "copy"
    return "compute" if on_accelerator or name.startswith("aten::") else None


def traced(step: Callable[[], object], device: torch.device) -> Trace:
    """One call, profiled: kernels of an accelerator, or ops and Gloo's work on a processor."""
    on_accelerator = _torch.is_accelerator(device)
    activities = [ProfilerActivity.CPU]
    if on_accelerator:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    with profile(activities=activities) as found:
        step()
        _torch.synchronize(device)
    return read(found.profiler.kineto_results.events(), on_accelerator)  # type: ignore[union-attr]


def read(events: Iterable[Any], on_accelerator: bool) -> Trace:
    """The trace of profiler events; on an accelerator those of the host do not count."""
    spans: dict[Kind, list[Interval]] = {"compute": [], "communication": [], "copy": []}
    waits = 0
    for event in events:
        waits += event.name() in WAITS
        if on_accelerator and event.device_type().name == "CPU":
            continue
        kind = kind_of(event.name(), on_accelerator=on_accelerator)
        if kind is not None:
            start = event.start_ns() * 1e-9
            spans[kind].append((start, start + event.duration_ns() * 1e-9))
    every = [interval for each in spans.values() for interval in each]
    step = (min(s for s, _ in every), max(e for _, e in every)) if every else (0.0, 0.0)
    return Trace(spans, step, waits)
