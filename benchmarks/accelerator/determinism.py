"""Part 8: the same plan twice gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.subjects import Subject, varied
from benchmarks.accelerator.training import compile_subject, compiled_step

STEPS = 3


def run(context: Context) -> Iterator[Found]:
    """Trains every subject twice from the same values."""
    torch.use_deterministic_algorithms(True)
    yield Sentence("On CUDA, CUBLAS_WORKSPACE_CONFIG=:4096:8 is set, which deterministic products need.")
    for subject in context.subjects(varied(context)):
        first, second = (_bits(context, subject) for _ in range(2))
        differing = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
        name = f"{subject.name}: losses and parameters with other bits after {STEPS} steps"
        yield Figure(name, differing, "count", limit=0, note=f"of {len(first)} tensors")


def _bits(context: Context, subject: Subject) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    made, batch = compile_subject(subject, context, torch.bfloat16)
    step = compiled_step(made, batch)
    losses = [step().cpu() for _ in range(STEPS)]
    return losses + [parameter.detach().cpu() for parameter in made.original.parameters()]
