"""Part 4: recomputation of ops against that of whole blocks, in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.cost_model import find_hardware
from benchmarks.accelerator.calibration import hardware_of
from benchmarks.accelerator.figures import Figure, Picture
from benchmarks.accelerator.memory import peak_of
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Subject, varied
from benchmarks.accelerator.training import compiled_step, in_turns
from benchmarks.speed.bench_recomputation import WITHIN, contenders, measured_bytes

WAYS = ("everything kept", "whole blocks recomputed", "ops recomputed")
TIMES = 2  # so many times the batch of other parts, by which kernels take longer than the host


def run(context: Context) -> Iterator[Found]:
    """Compares the three ways on every model that has blocks."""
    bars: dict[str, list[tuple[str, float]]] = {}
    with_blocks = [each for each in varied(context) if each.description is not None]
    for subject in context.subjects(with_blocks):
        yield from _compared(context, replace(subject, batch=TIMES * subject.batch), bars)
    yield Picture("Step time", "bars", "seconds", bars)


def _compared(context: Context, subject: Subject, bars: dict[str, list[tuple[str, float]]]) -> Iterator[Found]:
    """Kept bytes, peak memory and step time of each way."""
    dtype, device = torch.bfloat16, context.device
    batch = subject.inputs(context, dtype)
    found = contenders(subject.model(context, dtype), batch, find_hardware(hardware_of(context)))
    steps = [compiled_step(module, batch) for module, _ in found]
    for words, step, (module, priced_bytes) in zip(WAYS, steps, found, strict=True):
        step()
        kept = measured_bytes(module, batch)
        yield Figure(
            f"{subject.name}, {words}: error of saved activations", abs(priced_bytes / kept - 1), "ratio", limit=WITHIN
        )
        yield Figure(f"{subject.name}, {words}: saved activations", kept, "bytes")
        peak = peak_of(step, device)
        yield Figure(f"{subject.name}, {words}: memory that a step adds at most", peak, "bytes")
    times = in_turns(steps, device, context.size(5, 11))
    for words, time in zip(WAYS, times, strict=True):
        bars.setdefault(words, []).append((f"{subject.name}, {words}", time.seconds))
        yield Figure(f"{subject.name}, {words}: step time", time.seconds, "seconds")
        yield Figure(f"{subject.name}, {words}: host time", time.host_seconds, "seconds")
    yield Figure(
        f"{subject.name}: step time, ops : blocks",
        times[2].seconds / times[1].seconds,
        "ratio",
        limit=1.0,
        asked=context.on_accelerator,
        note="" if context.on_accelerator else "asked of accelerators: ops of these sizes take what the host takes",
    )
