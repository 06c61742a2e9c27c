"""Replicas that exchange with an asynchronous server, on real Gloo ranks: exactness, waits and losses.

OMP_NUM_THREADS=1 python -m benchmarks.async_server.run exact     against replays of the recorded orders
OMP_NUM_THREADS=1 python -m benchmarks.async_server.run waits     seconds of a step where ranks take turns in being slow
OMP_NUM_THREADS=1 python -m benchmarks.async_server.run rows      bytes of an embedding of which few rows change
OMP_NUM_THREADS=1 python -m benchmarks.async_server.run curves    losses of a small GPT, for the picture
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.ir.order import Order
from benchmarks.delayed import EXACT_STEPS, OPTIMIZERS, optimizer_of, random_batches, record_losses, relative_error
from benchmarks.local_steps.run import RANKS, ROWS, SMOOTHED, mean_losses, small_model
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import loss_fn

LOSSES = Path(__file__).with_name("losses.json")
RECIPES = ("async-server:0", "async-server:2")
CURVES = ("ddp", *RECIPES)
VOCABULARY, WIDTH, TOKENS = 16_000, 256, 256  # of an embedding, and looked up by a rank in a step
PAUSE_SECONDS, WAIT_RECIPES = 0.05, ("ddp", *(f"async-server:{s}" for s in (0, 1, 2, 4, 8)))


# --- exactness


def on_ranks(recipe: str, optimizer: str) -> tuple[str, dict[str, Tensor]]:
    """The order of the exchanges, and this rank's parameters after the meeting behind the last step."""
    given = random_batches(ROWS)
    model = autopar.compile(
        small_model(), loss_fn=loss_fn, mesh={"dp": dist.get_world_size()}, recipe=recipe, example_inputs=given[0]
    )
    inner, pauses = optimizer_of(optimizer, model), random.Random(dist.get_rank())
    for batch in given:
        model.step(*batch)
        inner.step()
        inner.zero_grad()
        time.sleep(pauses.random() * PAUSE_SECONDS)
    order = model.meet()
    return str(order), {name: x.detach().clone() for name, x in _local(model).items()}


def _local(model: nn.Module) -> dict[str, Tensor]:
    parameters = getattr(model, "original", model).named_parameters()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in parameters}


def exact_rows(counts: tuple[int, ...]) -> list[tuple[str, ...]]:
    """A row for each number of ranks, recipe and optimizer."""
    rows: list[tuple[str, ...]] = []
    for count in counts:
        ranks = Ranks(count)
        for recipe, optimizer in itertools.product(RECIPES, OPTIMIZERS):
            found = ranks.run(on_ranks, recipe, optimizer)
            order = Order.parse(count, found[0][0])
            (reference, *_) = autopar.replay(
                small_model(),
                random_batches(ROWS),
                order,
                replicas=count,
                loss_fn=loss_fn,
                optimizer_of=lambda own, name=optimizer: optimizer_of(name, own),  # type: ignore[misc]
            )
            expected = dict(reference.named_parameters())
            error = max(relative_error(own[n], x) for _, own in found for n, x in expected.items())
            rows.append((str(count), recipe, optimizer, str(order.staleness), f"{error:.1e}"))
        ranks.stop()
    return rows


# --- waits


def step_seconds(recipe: str, steps: int) -> float:
    """Mean seconds of a step, in which every rank pauses for a random time of the mean `PAUSE_SECONDS`."""
    batch = random_batches(ROWS)[0]
    model = autopar.compile(
        small_model(), loss_fn=loss_fn, mesh={"dp": dist.get_world_size()}, recipe=recipe, example_inputs=batch
    )
    inner, pauses = optimizer_of("sgd", model), random.Random(dist.get_rank())
    model.step(*batch)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        model.step(*batch)
        inner.step()
        inner.zero_grad()
        time.sleep(pauses.expovariate(1 / PAUSE_SECONDS))
    model.meet()
    return (time.perf_counter() - begin) / steps


# --- rows


def sent_bytes(optimizer: str, steps: int) -> tuple[int, int]:
    """Bytes of a model with a large embedding, and the bytes that this rank sends in an exchange."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))
    size_bytes = sum(p.nbytes for p in model.parameters())
    made = autopar.compile(
        model, loss_fn=lambda y: y.square().mean(), mesh={"dp": dist.get_world_size()}, recipe="async-server:2"
    )
    inner = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adamw": torch.optim.AdamW}
    update = inner[optimizer](made.parameters(), lr=1e-2)
    for number in range(steps):
        torch.manual_seed(number)
        made.step(torch.randint(VOCABULARY, (dist.get_world_size() * TOKENS,)))
        update.step()
        update.zero_grad()
    made.meet()
    return size_bytes, made._meetings.sent_bytes // steps  # type: ignore[union-attr]


# --- commands


@click.group()
def main() -> None:
    """Measures replicas that exchange with an asynchronous server."""


@main.command()
@click.option("--ranks", default=(2, 4), multiple=True, type=int, help="Numbers of ranks.")
def exact(ranks: tuple[int, ...]) -> None:
    """Prints the server's errors of benchmarks/results/replicas.md; exits with 1 where an error is 1e-9 or more."""
    rows = exact_rows(ranks)
    heads = ("ranks", "recipe", "optimizer", "ahead at most", "largest relative error")
    print("\n".join(markdown_table(heads, rows, text_columns=3)))
    sys.exit(0 if all(float(row[4]) < 1e-9 for row in rows) else 1)


@main.command()
@click.option("--steps", default=5 * EXACT_STEPS, help="Number of steps.")
def waits(steps: int) -> None:
    """Prints the server's waits of benchmarks/results/replicas.md."""
    ranks = Ranks(RANKS)
    rows = []
    for recipe in WAIT_RECIPES:
        slowest = max(ranks.run(step_seconds, recipe, steps))
        rows.append((recipe, f"{1e3 * slowest:.0f}"))
    ranks.stop()
    print("\n".join(markdown_table(("recipe", "ms a step"), rows, text_columns=1)))


@main.command()
def rows() -> None:
    """Prints the server's rows of benchmarks/results/replicas.md."""
    ranks, found = Ranks(RANKS), []
    for optimizer in ("sgd", "adagrad", "adamw"):
        (size_bytes, owner), *others = ranks.run(sent_bytes, optimizer, EXACT_STEPS)
        pushed = max(sent for _, sent in others)
        found.append((optimizer, *(f"{x / 1e6:.2f}" for x in (size_bytes, pushed, owner / 3))))
    ranks.stop()
    heads = ("optimizer", "parameters, MB", "a push, MB", "an answer, MB")
    print("\n".join(markdown_table(heads, found, text_columns=1)))


@main.command()
def curves() -> None:
    """Trains by every recipe and writes `losses.json`, from which `benchmarks.site.pictures` draws."""
    record_losses(LOSSES, mean_losses, CURVES, ranks=RANKS, steps_of_a_point=SMOOTHED)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
