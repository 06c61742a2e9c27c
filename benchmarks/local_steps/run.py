"""Replicas that synchronise every K steps, on real Gloo ranks: their exactness, their bytes and their losses.

OMP_NUM_THREADS=1 python -m benchmarks.local_steps.run exact     against plain PyTorch with the same delays
OMP_NUM_THREADS=1 python -m benchmarks.local_steps.run curves    losses of a small GPT, for the picture
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture.export import run_with_loss
from benchmarks.delayed import OPTIMIZERS, optimizer_of, random_batches, record_losses, relative_error, training_text
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import Ranks
from tests.support.delayed import train_replicas

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn
from text import batches

LOSSES = Path(__file__).with_name("losses.json")
ROWS = 8
RECIPES = ("local:1", "local:4", "geo:4", "diloco:4")
CURVES = ("ddp", "local:8", "geo:8", "diloco:8")
CURVE_STEPS, RANKS, LR, SMOOTHED = 480, 4, 4e-3, 20


# --- exactness


def small_model() -> GPT:
    """A GPT of two layers in float64."""
    return GPT(GPTConfig(seq_len=16, layers=2, heads=4, width=32)).double()


def on_ranks(recipe: str, optimizer: str) -> tuple[dict[str, Tensor], float]:
    """This rank's parameters after the meeting behind the last step, and the bytes that it sent a step."""
    given = random_batches(ROWS)
    model = autopar.compile(
        small_model(), loss_fn=loss_fn, mesh={"dp": dist.get_world_size()}, recipe=recipe, example_inputs=given[0]
    )
    inner = optimizer_of(optimizer, model)
    with torch.profiler.profile(record_shapes=True) as profile:
        for batch in given:
            model.step(*batch)
            inner.step()
            inner.zero_grad()
        model.meet()
    own = {name: x.detach().clone() for name, x in _local(model).items()}
    return own, _sent_bytes(profile) / len(given)


def _local(model: nn.Module) -> dict[str, Tensor]:
    parameters = getattr(model, "original", model).named_parameters()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in parameters}


def _sent_bytes(profile: torch.profiler.profile) -> float:
    """Bytes given to all-reduces that carry more than a few numbers (those of planning are broadcasts)."""
    shapes = [e.input_shapes for e in profile.events() if e.name == "gloo:all_reduce"]
    return 8.0 * sum(_elements(shape) for shape in shapes)


def _elements(shape: Any) -> int:
    if shape and isinstance(shape[0], (list, tuple)):
        return sum(_elements(each) for each in shape)
    return torch.Size(shape).numel() if shape else 0


def exact_rows(counts: tuple[int, ...]) -> list[tuple[str, ...]]:
    """A row for each number of ranks, recipe and optimizer."""
    rows: list[tuple[str, ...]] = []
    size_bytes = sum(p.nbytes for p in small_model().parameters())
    for count in counts:
        ranks = Ranks(count)
        for recipe, optimizer in itertools.product(("ddp", *RECIPES), OPTIMIZERS):
            found = ranks.run(on_ranks, recipe, optimizer)
            rule, _, steps = ("local:1" if recipe == "ddp" else recipe).partition(":")
            reference = _reference(1 if recipe == "ddp" else count, rule, int(steps), optimizer)
            error = max(_largest_error(own, reference) for own, _ in found)
            share = found[0][1] / size_bytes
            rows.append((str(count), recipe, optimizer, f"{error:.1e}", f"{share:.4f}"))
        ranks.stop()
    return rows


def _reference(replicas: int, rule: str, steps: int, optimizer: str) -> dict[str, Tensor]:
    models, _ = train_replicas(
        small_model(),
        random_batches(ROWS),
        lambda m, part: run_with_loss(m, part, {}, loss_fn),
        lambda m: optimizer_of(optimizer, m),
        replicas=replicas,
        steps=steps,
        rule=rule,
    )
    return dict(models[0].named_parameters())


def _largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], x) for name, x in expected.items())


# --- losses


def losses(recipe: str) -> list[float]:
    """The loss of every step, the mean over the replicas: each has a fourth of the batch."""
    text = training_text()
    model = autopar.compile(
        GPT(GPTConfig(seq_len=64, layers=2, heads=4, width=64), seed=0),
        loss_fn=loss_fn,
        mesh={"dp": dist.get_world_size()},
        recipe=recipe,
    )
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        inner, max_lr=LR, total_steps=CURVE_STEPS, pct_start=0.1, cycle_momentum=False
    )
    found = []
    for batch in itertools.islice(batches(text, batch_size=32, seq_len=64, seed=0), CURVE_STEPS):
        found.append(model.step(*batch).item())
        model.clip_grad_norm_(1.0)
        inner.step()
        inner.zero_grad()
        schedule.step()
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    return [sum(column) / len(column) for column in zip(*every, strict=True)]


def mean_losses(recipe: str) -> list[float]:
    """The loss of every point of the picture."""
    return smoothed(losses(recipe))


def smoothed(values: list[float]) -> list[float]:
    """Means of so many losses in a row, rounded to four digits."""
    cuts = range(0, len(values), SMOOTHED)
    return [round(sum(values[i : i + SMOOTHED]) / SMOOTHED, 4) for i in cuts]


# --- commands


@click.group()
def main() -> None:
    """Measures replicas that synchronise every K steps."""


@main.command()
@click.option("--ranks", default=(2, 4), multiple=True, type=int, help="Numbers of ranks.")
def exact(ranks: tuple[int, ...]) -> None:
    """Prints the table of benchmarks/results/replicas.md; exits with 1 where an error is 1e-9 or more."""
    rows = exact_rows(ranks)
    heads = ("ranks", "recipe", "optimizer", "largest relative error", "bytes sent a step, of the parameters'")
    print("\n".join(markdown_table(heads, rows, text_columns=3)))
    sys.exit(0 if all(float(row[3]) < 1e-9 for row in rows) else 1)


@main.command()
def curves() -> None:
    """Trains by every recipe and writes `losses.json`, from which `benchmarks.site.pictures` draws."""
    record_losses(LOSSES, mean_losses, CURVES, ranks=RANKS, steps_of_a_point=SMOOTHED)


if __name__ == "__main__":
    main()
