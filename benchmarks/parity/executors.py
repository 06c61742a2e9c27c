"""What the executors of a plan take: seconds a step, and seconds to compile.

    OMP_NUM_THREADS=1 python benchmarks/parity/executors.py --markdown table.md

The GPT of examples/gpt.py in float32 with AdamW, on Gloo ranks. The executors of a recipe train in turns,
step by step, so that what else the machine does meets all of them. To compile is what the first step of an
executor takes beyond its second; capture and plan are made before. Inductor starts with an empty cache on
disk for every row.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn

EXECUTORS = ("eager", "aot_eager", "inductor")
RECIPES = {"ddp": "dp", "zero3": "dp", "tp": "tp"}


def trainer(recipe: str, ranks: int, layers: int, width: int, executor: str) -> Callable[[], float]:
    """A step of training, which returns its loss."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=64, layers=layers, heads=4, width=width))
    tokens = torch.randint(0, 256, (8, 64))
    batch = (tokens, tokens.roll(-1, 1))
    compiled = autopar.compile(
        model,
        example_inputs=batch,
        loss_fn=loss_fn,
        mesh={RECIPES[recipe]: ranks},
        recipe=recipe,
        executor=executor,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.AdamW(compiled.parameters())

    def step() -> float:
        loss = compiled.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds that a step takes until the last rank has it, and its loss."""
    dist.barrier()
    start_seconds = time.perf_counter()
    loss = step()
    dist.barrier()
    return time.perf_counter() - start_seconds, loss


def row(recipe: str, ranks: int, layers: int, width: int, steps: int) -> str:
    """One line of the table."""
    made = {name: trainer(recipe, ranks, layers, width, name) for name in EXECUTORS}
    runs = {name: [timed(step), timed(step)] for name, step in made.items()}
    compile_seconds = {name: found[0][0] - found[1][0] for name, found in runs.items()}
    for _ in range(steps):
        for name, step in made.items():
            runs[name].append(timed(step))
    seconds = {n: statistics.median(s for s, _ in found[2:]) for n, found in runs.items()}
    off = max(abs(runs[n][-1][1] / runs["eager"][-1][1] - 1) for n in EXECUTORS)
    cells = [f"{seconds['eager'] * 1e3:.0f}"]
    cells += [f"{seconds[n] / seconds['eager']:.2f}" for n in EXECUTORS[1:]]
    cells += [f"{compile_seconds[n]:.1f}" for n in EXECUTORS[1:]]
    return f"| `{recipe}` | {layers} | {' | '.join(cells)} | {off:.0e} |"


def work(
    rank: int,
    ranks: int,
    port: int,
    recipes: list[str],
    layers: list[int],
    width: int,
    steps: int,
    path: str,
    cache: str,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for recipe in recipes:
        for count in layers:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{recipe}_{count}"
            line = row(recipe, ranks, count, width, steps)
            if rank == 0:
                print(line, flush=True)
                with Path(path).open("a") as file:
                    file.write(line + "\n")
    dist.destroy_process_group()


HEAD = """\
| recipe | layers | eager, ms a step | aot_eager : eager | inductor : eager | aot_eager, s to compile | inductor, s to compile | loss differs by |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=2, help="Processes.")
@click.option("--recipes", default="ddp,zero3,tp", help="Separated by commas.")
@click.option("--layers", default="2,6", help="Separated by commas.")
@click.option("--width", default=256)
@click.option("--steps", default=15, help="Steps of every executor that are timed.")
@click.option("--markdown", default="", help="File for the table.")
def main(ranks: int, recipes: str, layers: str, width: int, steps: int, markdown: str) -> None:
    """Print the table."""
    cache = tempfile.mkdtemp()
    path = markdown or f"{cache}/table"
    Path(path).write_text(HEAD)
    counts = [int(x) for x in layers.split(",")]
    try:
        arguments = (ranks, get_free_port(), recipes.split(","), counts, width, steps, path, cache)
        mp.spawn(work, arguments, ranks)
    finally:
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
