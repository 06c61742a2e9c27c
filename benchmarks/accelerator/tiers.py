"""Part 10: parameters stored on the host: the same losses, and what then stays on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar import _torch
from autopar.explanation.explanation import Explanation
from benchmarks.accelerator.calibration import hardware_of
from benchmarks.accelerator.figures import Figure
from benchmarks.accelerator.memory import peak_of
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Subject, subjects
from benchmarks.accelerator.training import compile_subject, in_turns, trained, worst_difference

RECIPES = ("zero-offload", "zero3-offload", "zero-infinity")
PRECISION = "bf16 reduce=bf16"  # 2 bytes of each parameter to the device, 2 of its gradient back
ROUNDING = 2.0**-8  # of bfloat16: half of a unit in the last of its 8 bits
STEPS = 3


@dataclass(frozen=True)
class Training:
    """Some steps by one recipe.

    Attributes:
        losses: losses of the first steps.
        parameters: number of parameters.
        kept_bytes: what the device holds between steps; None on a processor.
        peak_bytes: what a step adds at most.
        seconds: duration of a step, with the optimizer's.
        predicted_seconds: predicted duration.
    """

    losses: list[float]
    parameters: int
    kept_bytes: int | None
    peak_bytes: int
    seconds: float
    predicted_seconds: float


def run(context: Context) -> Iterator[Found]:
    """Trains the first subject by every recipe that stores on the host, and by one that stores nothing there."""
    subject = subjects(context)[0]
    expected = measure(context, subject, "ddp")
    yield from _figures("ddp", expected)
    for recipe in context.subjects(RECIPES):
        found = measure(context, subject, recipe)
        yield Figure(
            f"{recipe}: difference of {STEPS} losses from ddp",
            worst_difference(found.losses, expected.losses),
            "error",
            limit=ROUNDING,
        )
        yield from _figures(recipe, found)


def _figures(recipe: str, found: Training) -> Iterator[Found]:
    if found.kept_bytes is not None:
        kept = found.kept_bytes / found.parameters
        yield Figure(f"{recipe}: kept on the device between steps, a parameter", kept, "bytes")
    peak = found.peak_bytes / found.parameters
    yield Figure(f"{recipe}: added by a step at most, a parameter", peak, "bytes")
    yield Figure(f"{recipe}: step time", found.seconds, "seconds")
    error = found.predicted_seconds / found.seconds - 1
    yield Figure(f"{recipe}: error of the step time, predicted : measured - 1", error, "ratio")


def measure(context: Context, subject: Subject, recipe: str) -> Training:
    """Trains a subject in float32 that is computed in bfloat16."""
    on_device, device = context.on_accelerator, context.device
    before = torch.accelerator.memory_allocated(device) if on_device else 0
    made, batch = compile_subject(
        subject, context, torch.float32, recipe=recipe, precision=PRECISION, hardware=hardware_of(context)
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
    step = trained(made, lambda: made.step(*batch), optimizer)
    losses = [step().item() for _ in range(STEPS)]
    _torch.synchronize(device)
    kept = torch.accelerator.memory_allocated(device) - before if on_device else None
    peak = peak_of(step, device)
    (time,) = in_turns([step], device, 3)
    found = made.explain()
    assert isinstance(found, Explanation)
    parameters = sum(p.numel() for p in made.original.parameters())
    return Training(losses, parameters, kept, peak, time.seconds, found.step_seconds)
