"""Ten steps of AdamW on real Gloo ranks, every recipe, against the same training in one process.

OMP_NUM_THREADS=1 python benchmarks/parity/recipes.py --markdown docs/recipes.md
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn

ONE_AXIS = (
    "ddp", "zero1", "zero2", "zero3", "zero-offload", "zero3-offload", "zero-infinity", "zero-infinity-nvme",
    "data-parallel", "parameter-server", "serve", "tp", "tp+sp", "cp", "auto",
)  # fmt: skip
TWO_AXES = (
    "dp:ddp,tp:tp", "dp:zero1,tp:tp", "dp:zero2,tp:tp+sp", "dp:zero3,tp:tp+sp", "dp:zero3-offload,tp:tp",
    "dp:zero-infinity,tp:tp", "dp:zero-infinity-nvme,tp:tp", "dp:parameter-server,tp:tp", "auto",
)  # fmt: skip
WITH_CP = ({"dp": 2, "cp": 2}, "dp:zero3,cp:cp"), ({"cp": 2, "tp": 2}, "cp:cp,tp:tp")
BLOCKS = ({"x": 2, "y": 2}, "x,y:2d")
SERVERS = tuple(({"ps": 2, "dp": 2}, f"ps:serve,dp:{inside}") for inside in ("ddp", "zero1"))
STEPS = 10
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}


def cases(ranks: int) -> list[tuple[dict[str, int], str]]:
    """(mesh, recipe) for a number of ranks."""
    found = [({"x": ranks}, recipe) for recipe in ONE_AXIS]
    if ranks == 4:
        found += [({"dp": 2, "tp": 2}, recipe) for recipe in TWO_AXES]
        found += (*WITH_CP, BLOCKS, *SERVERS)
    return found


def model_of(dtype: torch.dtype) -> GPT:
    return GPT(GPTConfig(seq_len=32, layers=2, heads=4, width=64)).to(dtype)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (STEPS, 8, 33), generator=generator)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in text]


def losses(model: nn.Module, step: Callable[..., Tensor]) -> list[float]:
    """The training loop, the same for one process and for many."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in batches():
        found.append(step(*batch).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def in_one_process(dtype: torch.dtype) -> list[float]:
    model = model_of(dtype)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return losses(model, step)


def work(rank: int, ranks: int, port: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for mesh, recipe in cases(ranks):
        for dtype in TOLERANCES:
            model = autopar.compile(
                model_of(dtype), loss_fn=loss_fn, mesh=mesh, recipe=recipe, nvme=Path(path).parent
            )
            found[str(autopar.Mesh.of(mesh)), recipe, dtype] = losses(model, model.step)
    if rank == 0:
        torch.save(found, path)
    dist.destroy_process_group()


def worst(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of the losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def rows() -> list[tuple[str, ...]]:
    """Trains everything; a row per mesh and recipe."""
    expected = {dtype: in_one_process(dtype) for dtype in TOLERANCES}
    result = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            path = str(Path(folder) / f"{ranks}.pt")
            mp.spawn(work, (ranks, get_free_port(), path), ranks)
            found = torch.load(path, weights_only=True)
            for mesh, recipe in cases(ranks):
                name = str(autopar.Mesh.of(mesh))
                errors = [worst(found[name, recipe, d], expected[d]) for d in TOLERANCES]
                passed = all(e < t for e, t in zip(errors, TOLERANCES.values(), strict=True))
                cells = [f"{error:.1e}" for error in errors]
                result.append((name, recipe, *cells, "yes" if passed else "NO"))
    return result


COLUMNS = ("mesh", "recipe", "float64 (1e-6)", "float32 (1e-4)", "within")


@click.command()
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(path: Path | None) -> None:
    """Print the largest relative difference of ten losses for every recipe; exit 1 if one is too large."""
    found = rows()
    table = Table(title="Ten AdamW steps on Gloo ranks against one process: worst loss difference")
    for column in COLUMNS:
        table.add_column(column)
    for row in found:
        table.add_row(*row)
    Console(width=100).print(table)
    if path is not None:
        lines = [
            " | ".join(COLUMNS),
            "|".join(["---"] * len(COLUMNS)),
            *(" | ".join(r) for r in found),
        ]
        head = (
            "# Recipes on real ranks\n\nTen AdamW steps of a two-layer GPT on Gloo ranks, clipped gradients, "
            "against one process: the largest relative\ndifference of the ten losses. Made by "
            "`OMP_NUM_THREADS=1 python benchmarks/parity/recipes.py --markdown docs/recipes.md`.\n\n"
        )
        path.write_text(head + "\n".join(f"| {line} |" for line in lines) + "\n")
    sys.exit(0 if all(row[-1] == "yes" for row in found) else 1)


if __name__ == "__main__":
    main()
