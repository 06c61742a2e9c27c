"""Ten steps of AdamW on real Gloo ranks, every recipe, against the same training in one process.

OMP_NUM_THREADS=1 python benchmarks/parity/recipes.py --markdown benchmarks/results/recipes.md

Some of the rows, in fewer minutes:

OMP_NUM_THREADS=1 python benchmarks/parity/recipes.py --only serve,zero3-offload
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

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
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero-offload",
    "zero3-offload",
    "zero-infinity",
    "zero-infinity-nvme",
    "data-parallel",
    "parameter-server",
    "serve",
    "tp",
    "tp+sp",
    "cp",
    "auto",
)
TWO_AXES = (
    "dp:ddp,tp:tp",
    "dp:zero1,tp:tp",
    "dp:zero2,tp:tp+sp",
    "dp:zero3,tp:tp+sp",
    "dp:zero3-offload,tp:tp",
    "dp:zero-infinity,tp:tp",
    "dp:zero-infinity-nvme,tp:tp",
    "dp:parameter-server,tp:tp",
    "auto",
)
WITH_CP = ({"dp": 2, "cp": 2}, "dp:zero3,cp:cp"), ({"cp": 2, "tp": 2}, "cp:cp,tp:tp")
BLOCKS = ({"x": 2, "y": 2}, "x,y:2d")
SERVERS = tuple(({"ps": 2, "dp": 2}, f"ps:serve,dp:{inside}") for inside in ("ddp", "zero1"))
STEPS = 10
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class Case(NamedTuple):
    """A row: what is asked of `autopar.compile`.

    Attributes:
        mesh: axes and their sizes.
        recipe: recipe of all axes.
        recompute: recomputation and storage of saved activations; "" for what the search chooses.
    """

    mesh: dict[str, int]
    recipe: str
    recompute: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Mesh and recipe as the table shows them."""
        recompute = f" recompute={self.recompute}" if self.recompute else ""
        return str(autopar.Mesh.of(self.mesh)), self.recipe + recompute

    def is_among(self, only: Sequence[str]) -> bool:
        """Whether the recipe, or the recipe of one axis, or the recomputation is among some names; () are all."""
        parts = (part.rpartition(":")[2] for part in self.recipe.split(","))
        return not only or not {*parts, self.recipe, self.recompute}.isdisjoint(only)


def cases(ranks: int, only: Sequence[str]) -> list[Case]:
    """The rows for a number of ranks, of the recipes in `only` (all for none)."""
    found = [Case({"x": ranks}, recipe) for recipe in ONE_AXIS]
    found.append(Case({"tp": ranks}, "tp", "partitioned"))
    if ranks == 4:
        found += [Case({"dp": 2, "tp": 2}, recipe) for recipe in TWO_AXES]
        found += [Case(*each) for each in (*WITH_CP, BLOCKS, *SERVERS)]
    return [case for case in found if case.is_among(only)]


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


def work(rank: int, ranks: int, port: int, path: str, only: Sequence[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for case in cases(ranks, only):
        for dtype in TOLERANCES:
            files = {"nvme": Path(path).parent} if "nvme" in case.recipe else {}
            model = autopar.compile(
                model_of(dtype),
                loss_fn=loss_fn,
                mesh=case.mesh,
                recipe=case.recipe,
                recompute=case.recompute or None,
                **files,
            )  # type: ignore[arg-type]
            found[*case.key, dtype] = losses(model, model.step)
    if rank == 0:
        torch.save(found, path)
    dist.destroy_process_group()


def worst(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of the losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def rows(only: Sequence[str]) -> list[tuple[str, ...]]:
    """Trains everything, or only some recipes; a row per mesh and recipe."""
    expected = {dtype: in_one_process(dtype) for dtype in TOLERANCES}
    result = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            path = str(Path(folder) / f"{ranks}.pt")
            mp.spawn(work, (ranks, get_free_port(), path, only), ranks)
            found = torch.load(path, weights_only=True)
            for case in cases(ranks, only):
                errors = [worst(found[*case.key, d], expected[d]) for d in TOLERANCES]
                passed = all(e < t for e, t in zip(errors, TOLERANCES.values(), strict=True))
                cells = [f"{error:.1e}" for error in errors]
                result.append((*case.key, *cells, "yes" if passed else "NO"))
    return result


COLUMNS = ("mesh", "recipe", "float64 (1e-9)", "float32 (1e-4)", "within")


@click.command()
@click.option("--only", default="", help="Recipes (of an axis, or whole) and recomputations, separated by commas.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(only: str, path: Path | None) -> None:
    """Print the largest relative difference of ten losses for every recipe; exit 1 if one is too large."""
    found = rows([name for name in only.split(",") if name])
    if not found:
        raise click.ClickException(f"No row has one of {only}.")
    table = Table(title="Ten AdamW steps on Gloo ranks against one process: worst loss difference")
    for column in COLUMNS:
        table.add_column(column)
    for row in found:
        table.add_row(*row)
    Console(width=100).print(table)
    if path is not None:
        lines = [" | ".join(COLUMNS), "|".join(["---"] * len(COLUMNS)), *(" | ".join(r) for r in found)]
        head = (
            "# Recipes on real ranks\n\nTen AdamW steps of a two-layer GPT on Gloo ranks, clipped gradients, "
            "against one process: the largest relative\ndifference of the ten losses. Made by "
            "`OMP_NUM_THREADS=1 python benchmarks/parity/recipes.py --markdown benchmarks/results/recipes.md`.\n\n"
        )
        path.write_text(head + "\n".join(f"| {line} |" for line in lines) + "\n")
    sys.exit(0 if all(row[-1] == "yes" for row in found) else 1)


if __name__ == "__main__":
    main()
