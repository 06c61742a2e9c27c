"""Trains a byte-level GPT on the Python standard library, with a plan that was searched.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

The model in `gpt.py` is single-device code; `autopar.compile` below is all that makes it parallel.
The first losses are checked against the same model trained in one process, and the folder `--out`
receives the plan, a checkpoint and a picture of the loss.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, loss_fn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import batches, read_source, standard_library, unigram_entropy
from torch import Tensor, nn

import autopar
from autopar.runtime.checkpoint.checkpoint import save_checkpoint

Batches = Iterable[tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor], Tensor]  # tokens, targets -> loss; leaves the gradients behind
Watch = Callable[[int, float], None]  # told the number of a step and its loss

TOLERANCE = 1e-4  # relative; float32 sums in another order, amplified by ten steps of AdamW
STATES = ("adamw", "adamw8bit")  # training states of autopar.compile
ENOUGH_STEPS = 100  # fewer do not get there
MARGIN_NATS = 0.5  # "well below" the unigram entropy: bytes were predicted from bytes before them
TIMEOUT = timedelta(minutes=5)  # a rank that waits longer than this for another ends with an error


def train(
    model: nn.Module,
    step: Step,
    data: Batches,
    *,
    steps: int,
    planned: int,
    lr: float,
    watch: Watch,
    states: str = "adamw",
) -> tuple[list[float], torch.optim.Optimizer]:
    """The training loop, the same for one process and for many.

    Args:
        model: its parameters are trained.
        step: runs forward and backward of one global batch.
        data: global batches.
        steps: how many to make.
        planned: steps that the learning-rate schedule is laid out for, at least `steps`.
        lr: the highest learning rate.
        watch: called after every step.
        states: what AdamW keeps, one of `STATES`.

    Returns:
        The loss of every step, in nats per byte, and the optimizer.
    """
    optimizer = adamw(states, model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=planned, pct_start=0.1, cycle_momentum=False
    )
    losses = []
    for number, (tokens, targets) in enumerate(itertools.islice(data, steps), start=1):
        loss = step(tokens, targets)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        watch(number, losses[-1])
    return losses, optimizer


def adamw(states: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """AdamW with moments in float32, or in 8 bits, which needs the package torchao."""
    if states == "adamw":
        return torch.optim.AdamW(parameters, **options)
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, **options)


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Clips gradients by their norm over the whole model, of which a rank may hold a part."""
    if isinstance(model, autopar.CompiledModule):
        model.clip_grad_norm_(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def single_process_step(model: nn.Module) -> Step:
    """What `model.step` of a compiled model stands for: forward and backward of a whole batch."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return step


def losses_in_one_process(
    model: nn.Module, data: Batches, *, steps: int, planned: int, lr: float, states: str = "adamw"
) -> list[float]:
    """The losses to expect: the same loop over the same batches, without autopar."""

    def watch(number: int, loss: float) -> None:
        pass

    step = single_process_step(model)
    return train(model, step, data, steps=steps, planned=planned, lr=lr, watch=watch, states=states)[0]


def worst_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference over the steps of `reference`; nan if any loss is."""
    expected = torch.tensor(reference, dtype=torch.float64)
    found = torch.tensor(losses[: len(reference)], dtype=torch.float64)
    return ((found - expected).abs() / expected.abs()).max().item()


def loss_bar(console: Console) -> Progress:
    """A bar with room for the loss and the speed; silent where the console is."""
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,
    )


def watch_on(progress: Progress, *, steps: int, tokens_per_step: int) -> Watch:
    """Shows every step on the bar, and every 50th on a line of its own."""
    task = progress.add_task("training", total=steps, loss=float("nan"), speed=0.0)
    start_seconds = time.perf_counter()

    def watch(number: int, loss: float) -> None:
        speed = number * tokens_per_step / (time.perf_counter() - start_seconds)
        progress.update(task, completed=number, loss=loss, speed=speed)
        if number % 50 == 0:
            progress.console.print(f"step {number:4}  loss {loss:.3f}  {speed:8,.0f} tokens/s")

    return watch


def draw_losses(losses: list[float], entropy_nats: float, path: Path) -> None:
    """The loss curve, and the entropy a model without context could reach at best."""
    from matplotlib.figure import Figure  # here: only rank 0 draws, and it draws once

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, label="training loss")
    axes.axhline(entropy_nats, color="gray", linestyle="--", label="byte-unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Byte-level GPT on the Python standard library")
    axes.legend()
    figure.savefig(path, dpi=150)


def complaints(losses: list[float], reference: list[float], entropy_nats: float, *, enough_steps: int = 0) -> list[str]:
    """What is wrong with a run, in sentences; empty if nothing is. A run of too few steps need not have learned."""
    found = []
    if reference and not worst_difference(losses, reference) <= TOLERANCE:  # nor nan
        found.append(f"The losses differ from one process by more than {TOLERANCE:g} (relative).")
    is_long = len(losses) >= enough_steps
    if is_long and not mean_of_last(losses) < entropy_nats - MARGIN_NATS:
        found.append(f"The loss did not fall {MARGIN_NATS} nats below the byte-unigram entropy.")
    return found


def report(console: Console, losses: list[float], reference: list[float], entropy_nats: float, out: Path) -> None:
    """Says how the run went."""
    if reference:
        console.print(
            f"The first {len(reference)} losses equal those of one process "
            f"within {worst_difference(losses, reference):.1e} (relative)."
        )
    console.print(f"Byte-unigram entropy: {entropy_nats:.3f} nats per byte.")
    console.print(f"Loss of the last steps: {mean_of_last(losses):.3f} nats per byte.")
    console.print(f"Plan, checkpoint and loss curve are in {out}/.")


def mean_of_last(losses: list[float], count: int = 20) -> float:
    """The mean of the last losses: single batches scatter."""
    return sum(losses[-count:]) / len(losses[-count:])


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=300, help="Training steps.")
@click.option("--check-steps", default=10, help="Steps to compare with one process.")
@click.option("--batch-size", default=32, help="Passages in a global batch.")
@click.option("--seq-len", default=64, help="Bytes in a passage.")
@click.option("--layers", default=4, help="Blocks of the GPT.")
@click.option("--heads", default=4, help="Attention heads of a block.")
@click.option("--width", default=128, help="Width of the residual stream.")
@click.option("--lr", default=4e-3, help="Highest learning rate.")
@click.option("--seed", default=0, help="Of the initial weights and of the batches.")
@click.option("--text-mb", default=4, help="Megabytes of source to train on.")
@click.option("--mesh", metavar="AXES", help="Axes such as pp=2,dp=2; searched if left out.")
@click.option("--recipe", default="auto", metavar="R", help="Such as pp:1f1b,dp:zero1.")
@click.option("--states", default="adamw", type=click.Choice(STATES), help="What AdamW keeps.")
@click.option("--out", default="runs/demo", type=click.Path(path_type=Path), help="For results.")
def main(
    steps: int,
    check_steps: int,
    batch_size: int,
    seq_len: int,
    layers: int,
    heads: int,
    width: int,
    lr: float,
    seed: int,
    text_mb: int,
    mesh: str | None,
    recipe: str,
    states: str,
    out: Path,
) -> None:
    """Train a byte-level GPT on every rank that torchrun started."""
    if find_spec("matplotlib") is None:
        raise click.ClickException("The losses are drawn by matplotlib: pip install matplotlib.")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    on_first = dist.get_rank() == 0
    console = Console(quiet=not on_first)
    config = GPTConfig(seq_len=seq_len, layers=layers, heads=heads, width=width)
    text = read_source(standard_library(), limit_bytes=text_mb * 1_000_000)
    entropy_nats = unigram_entropy(text)

    def data() -> Batches:
        return batches(text, batch_size=batch_size, seq_len=seq_len, seed=seed)

    reference: list[float] = []
    if on_first:
        console.print(f"{check_steps} steps in one process, to compare with ...")
        reference = losses_in_one_process(
            GPT(config, seed=seed), data(), steps=min(check_steps, steps), planned=steps, lr=lr, states=states
        )

    model = autopar.compile(
        GPT(config, seed=seed),
        example_inputs=next(iter(data())),
        loss_fn=loss_fn,
        mesh=autopar.Mesh.parse(mesh) if mesh else None,
        recipe=recipe,
        training_state=states,
        cache=out / "plans",
    )
    console.print(model.explain())
    with loss_bar(console) as progress:
        watch = watch_on(progress, steps=steps, tokens_per_step=batch_size * seq_len)
        losses, optimizer = train(
            model, model.step, data(), steps=steps, planned=steps, lr=lr, watch=watch, states=states
        )

    out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(out / "trained", model, optimizer, steps=steps)
    if on_first:
        model.plan.save(out / "plan.json")
        draw_losses(losses, entropy_nats, out / "loss.png")
    report(console, losses, reference, entropy_nats, out)
    dist.destroy_process_group()
    if on_first and (found := complaints(losses, reference, entropy_nats, enough_steps=ENOUGH_STEPS)):
        raise click.ClickException(" ".join(found))


if __name__ == "__main__":
    main()
