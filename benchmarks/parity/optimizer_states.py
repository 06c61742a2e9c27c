"""The demo trained with plain and with 8-bit AdamW, over several seeds.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.parity.optimizer_states

prints, for every seed, the mean loss of the last steps with each, and their difference; below, the spread that
the seeds alone make. torchao compiles its optimizers, which is left out here (`force_eager`): it takes a minute
for each start and changes nothing but rounding.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import click
import torch
import torch.distributed as dist

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig, loss_fn
from text import batches, read_source, standard_library
from train_gpt import STATES, mean_of_last, train

TEXT_BYTES, BATCH, SEQ, LR = 4_000_000, 32, 64, 4e-3  # those of the demo


def final_loss(states: str, seed: int, steps: int, recipe: str) -> float:
    """Mean loss of the last 20 steps of the demo, in nats per byte."""
    text = read_source(standard_library(), limit_bytes=TEXT_BYTES)
    config = GPTConfig(seq_len=SEQ, layers=4, heads=4, width=128)
    data = list(
        batch for batch, _ in zip(batches(text, batch_size=BATCH, seq_len=SEQ, seed=seed), range(steps), strict=False)
    )
    model = autopar.compile(
        GPT(config, seed=seed),
        example_inputs=data[0],
        loss_fn=loss_fn,
        mesh={"dp": dist.get_world_size()},
        recipe=recipe,
        training_state=states,
    )
    losses, _ = train(
        model, model.step, data, steps=steps, planned=steps, lr=LR, states=states, watch=lambda number, loss: None
    )
    return mean_of_last(losses)


@click.command(context_settings={"show_default": True})
@click.option("--seeds", default=4, help="Number of seeds of weights and batches.")
@click.option("--steps", default=150, help="Training steps of a run.")
@click.option("--recipe", default="zero3", help="Recipe of the data-parallel axis.")
def main(seeds: int, steps: int, recipe: str) -> None:
    """Compare the final losses of the demo with plain and with 8-bit AdamW."""
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    rows = []
    for seed in range(seeds):
        rows.append([final_loss(states, seed, steps, recipe) for states in STATES])
        if dist.get_rank() == 0:
            plain, small = rows[-1]
            print(f"seed {seed}: {plain:.4f} {small:.4f} {small - plain:+.4f}", flush=True)
    if dist.get_rank() == 0:
        plain, small = zip(*rows, strict=True)
        print(f"{dist.get_world_size()} ranks, {recipe}, {steps} steps, {seeds} seeds")
        print(f"mean of adamw {statistics.mean(plain):.4f}, of adamw8bit {statistics.mean(small):.4f}")
        print(f"standard deviation over seeds of adamw {statistics.stdev(plain):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
