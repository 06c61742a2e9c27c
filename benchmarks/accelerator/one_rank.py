"""Part 2: a compiled model on one rank against the plain model, by the same mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.accelerator.figures import Figure, Picture
from benchmarks.accelerator.memory import peak_of
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Subject, subjects
from benchmarks.accelerator.training import (
    StepTime,
    compile_subject,
    compiled_step,
    in_turns,
    plain_step,
    worst_difference,
)

STEPS = 3
SHALLOW = 4  # layers of what Inductor compiles on an accelerator, which takes it seconds a layer
# Losses of fused ops differ by where values are rounded to bfloat16: by half of a unit in the last of 8 bits.
ROUNDING = 2.0**-8
# The executor of autopar, and the backend of torch.compile that the plain model runs under; op by op without.
MODES = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor"}


@dataclass(frozen=True)
class Pair:
    """A compiled and a plain model in one mode, after some steps."""

    losses: tuple[list[float], list[float]]
    times: tuple[StepTime, StepTime]
    peaks: tuple[int, int]


def run(context: Context) -> Iterator[Found]:
    """Measures every subject in every mode."""
    ratios: dict[str, list[tuple[str, float]]] = {}
    for mode, chosen in modes(context):
        for subject in chosen:
            pair = measure(context, subject, mode)
            yield from _figures(context, subject, mode, pair)
            ratio = pair.times[0].seconds / pair.times[1].seconds
            ratios.setdefault(mode, []).append((f"{subject.name}, {mode}", ratio))
    yield Picture("Step time of autopar : plain", "bars", "ratio", ratios)


def modes(context: Context) -> Iterator[tuple[str, list[Subject]]]:
    """Each mode with its subjects.

    Inductor takes a processor a minute for a small model: there it compiles the smallest one alone, and `aot_eager`,
    which makes the same regions, stands for it.
    """
    every = list(context.subjects(subjects(context)))
    yield "eager", every
    if context.on_accelerator:
        yield "inductor", [subject.shallow(SHALLOW) for subject in every]
    elif context.scope == "whole":
        yield "aot_eager", every[:1]
        yield "inductor", every[-1:]


def measure(context: Context, subject: Subject, mode: str) -> Pair:
    """Trains a subject compiled and plain, from the same values."""
    dtype, device = torch.bfloat16, context.device
    made, batch = compile_subject(subject, context, dtype, executor=mode)
    ours = compiled_step(made, batch)
    model, backend = subject.model(context, dtype), MODES[mode]
    plain = plain_step(model, batch, torch.compile(model, backend=backend) if backend else None)
    with _same_bits(mode):
        losses = tuple([step().item() for _ in range(STEPS)] for step in (ours, plain))
    times = in_turns((ours, plain), device, context.size(7, 15))
    peaks = tuple(peak_of(step, device) for step in (ours, plain))
    return Pair(losses, (times[0], times[1]), peaks)  # type: ignore[arg-type]


@contextmanager
def _same_bits(mode: str) -> Iterator[None]:
    """Inside it kernels give the same bits at each call; not under Inductor, which would compile once more.

    With `warn_only` the backward of flash attention would not: it adds up gradients of queries in any order.
    """
    torch.use_deterministic_algorithms(mode != "inductor")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _figures(context: Context, subject: Subject, mode: str, pair: Pair) -> Iterator[Found]:
    name, on_device = f"{subject.name}, {mode}", context.on_accelerator
    ours, plain = pair.times
    why = "" if on_device else "asked of accelerators: a processor is shared with other work"
    yield Figure(
        f"{name}: difference of {STEPS} losses",
        worst_difference(*pair.losses),
        "error",
        limit=ROUNDING if mode == "inductor" else 0.0,
    )
    first = worst_difference(pair.losses[0][:1], pair.losses[1][:1])
    yield Figure(f"{name}: difference of the first loss", first, "error")
    yield Figure(
        f"{name}: step time, autopar : plain",
        ours.seconds / plain.seconds,
        "ratio",
        limit=1.0,
        asked=on_device,
        note=why,
    )
    yield Figure(f"{name}: step time of autopar", ours.seconds, "seconds")
    yield Figure(f"{name}: step time of the plain model", plain.seconds, "seconds")
    yield Figure(f"{name}: host time of autopar", ours.host_seconds, "seconds")
    yield Figure(f"{name}: host time of the plain model", plain.host_seconds, "seconds")
    for words, peak in zip(("autopar", "the plain model"), pair.peaks, strict=True):
        yield Figure(f"{name}: memory that a step of {words} adds at most", peak, "bytes")
    if on_device:
        reserved = torch.accelerator.max_memory_reserved(context.device)
        yield Figure(f"{name}: reserved memory, both models", reserved, "bytes")
