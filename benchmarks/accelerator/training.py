"""Training steps of a subject, plain and compiled, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import _torch
from benchmarks.accelerator.parts import Context
from benchmarks.accelerator.subjects import Batch, Subject

Step = Callable[[], Tensor]
RATE = 1e-2  # learning rate of every step


def trained(model: nn.Module, backward: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> Step:
    """A step of an optimizer, which returns its loss.

    By default the optimizer is SGD, by which a small change of a gradient stays a small change of a weight.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> Tensor:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def plain_step(model: nn.Module, batch: Batch, called: Callable[..., Tensor] | None = None) -> Step:
    """A step of the model without autopar; `called` stands for its forward, such as torch.compile makes."""
    forward = model if called is None else called

    def backward() -> Tensor:
        loss = forward(*batch)
        loss.backward()
        return loss.detach()

    return trained(model, backward)


def compile_subject(
    subject: Subject, context: Context, dtype: torch.dtype, **options: Any
) -> tuple[autopar.CompiledModule, Batch]:
    """The subject compiled for one rank, and its batch."""
    batch = subject.inputs(context, dtype)
    model = subject.model(context, dtype)
    made = autopar.compile(model, example_inputs=batch, mesh={"dp": 1}, **options)
    return made, batch


def compiled_step(made: autopar.CompiledModule, batch: Batch) -> Step:
    """A step of a compiled module."""
    return trained(made, lambda: made.step(*batch))


@dataclass(frozen=True)
class StepTime:
    """Median durations of one step.

    Attributes:
        seconds: time from the start of the step until the device has ended it.
        host_seconds: time until the host has issued it; on a processor the two are alike.
    """

    seconds: float
    host_seconds: float


def in_turns(steps: Sequence[Step], device: torch.device, rounds: int) -> list[StepTime]:
    """Step times of contenders that take turns, so that what else the machine does meets all of them alike."""
    samples: list[list[tuple[float, float]]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, found in zip(steps, samples, strict=True):
            _torch.synchronize(device)
            start = time.perf_counter()
            step()
            issued = time.perf_counter()
            _torch.synchronize(device)
            found.append((time.perf_counter() - start, issued - start))
    return [StepTime(median(whole for whole, _ in found), median(host for _, host in found)) for found in samples]


def worst_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of losses, relative to the expected loss; infinite where one is NaN.

    >>> worst_difference([1.0, 2.0], [1.0, 2.5]), worst_difference([float("nan")], [1.0])
    (0.2, inf)
    """
    gaps = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)
