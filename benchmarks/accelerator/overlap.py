"""Part 5: how much of collectives and copies lies beside compute, and how long the device is idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpt import GPT, GPTConfig, loss_fn

import autopar
from autopar import _torch
from benchmarks.accelerator.figures import Figure, Picture, Sentence
from benchmarks.accelerator.joining import join_staged, staged_or_devices
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.several_ranks import RANKS
from benchmarks.accelerator.subjects import Batch
from benchmarks.accelerator.trace import Trace, traced
from tests.runtime.gloo_ranks import Join, Ranks, join

# With what a recipe sends while it computes: sums of gradients; those and gathers ahead of use; nothing.
RECIPES = ("ddp", "zero3", "tp")
BUCKET_BYTES = 200_000  # several messages a step, as of a large model


def run(context: Context) -> Iterator[Found]:
    """Profiles one step of each recipe on two ranks."""
    if not context.on_accelerator:
        yield Sentence(
            "On a processor the trace has the ops of the main thread and the work of Gloo's threads. It tells which "
            "collectives run while something is computed; that both then share cores, it does not tell."
        )
    joined = staged_or_devices(context, RANKS) if context.on_accelerator else join
    if joined is join_staged:
        yield Sentence(
            "Two ranks share one device, and collectives go through the host: the copies are seen, "
            "kernels of collectives are not, and the device's own overlap is not proven."
        )
    yield from shares(context, joined)


def shares(context: Context, joined: Join) -> Iterator[Found]:
    """Shares of a step of each recipe on two ranks that join so."""
    ranks = Ranks(RANKS, joined, context.processes)
    bars: dict[str, list[tuple[str, float]]] = {"beside compute": [], "idle": []}
    try:
        for recipe in context.subjects(RECIPES):
            sizes = context.size((128, 4, 32), (1024, 8, 512))
            found = ranks.run(_traced, recipe, context.device.type, sizes)[0]
            yield from _figures(recipe, found, bars)
    finally:
        ranks.stop()
    yield Picture("Shares of a step", "bars", "ratio", bars)


def _figures(recipe: str, found: Trace, bars: dict[str, list[tuple[str, float]]]) -> Iterator[Found]:
    for kind in ("communication", "copy"):
        share = found.beside_compute(kind)  # type: ignore[arg-type]
        why = "" if share is not None else f"the trace of this device has no {kind}"
        yield Figure(f"{recipe}: share of {kind} beside compute", share, "ratio", note=why)
    yield Figure(f"{recipe}: share of the step without compute", found.idle, "ratio")
    bars["beside compute"].append((recipe, found.beside_compute("communication") or 0.0))
    bars["idle"].append((recipe, found.idle))


def _traced(recipe: str, kind: str, sizes: tuple[int, int, int]) -> Trace:
    """A rank's task: the trace of a third step."""
    mesh = {"tp" if recipe == "tp" else "dp": RANKS}
    made, batch = compiled_gpt(kind, sizes, mesh=mesh, recipe=recipe, bucket_bytes=BUCKET_BYTES)
    for _ in range(2):
        made.step(*batch)
    return traced(lambda: made.step(*batch), _torch.current_device(kind))


def compiled_gpt(kind: str, sizes: tuple[int, int, int], **options: Any) -> tuple[autopar.CompiledModule, Batch]:
    """A GPT of a width, layers and a length on a rank's device, and a batch of it; `options` are those of `compile`."""
    device = _torch.current_device(kind)
    width, layers, length = sizes
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=length, layers=layers, heads=4, width=width)).to(device)
    tokens = torch.randint(0, 256, (8, length)).to(device)
    return autopar.compile(model, loss_fn=loss_fn, **options), (tokens, tokens.roll(-1, 1))
