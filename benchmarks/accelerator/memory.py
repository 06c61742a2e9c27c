"""The peak memory of a step, counted by the allocator of an accelerator, or by the profiler on a processor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from autopar import _torch


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call holds at once beyond what was held before it.

    On a processor torch's profiler sees every allocation of tensors; it takes no account of libraries' own buffers.
    """
    if not _torch.is_accelerator(device):
        return peak_in_trace(step)
    _torch.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    step()
    _torch.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


def peak_in_trace(step: Callable[[], object]) -> int:
    """The same from the allocations that the profiler sees on the processor.

    >>> x = torch.empty(1000, dtype=torch.uint8)
    >>> peak_in_trace(lambda: (x + 1) + (x + 2))  # two operands and the sum
    3000
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = step()
    del result
    now = most = 0
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e for e in events if e.name() == "[memory]" and e.device_type().name == "CPU"]
    for event in sorted(changes, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
