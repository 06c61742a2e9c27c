"""Losses outside of the model, `criterion(model(x), y)`, on real Gloo ranks under every recipe, against one process.

OMP_NUM_THREADS=1 python benchmarks/parity/outside_losses.py

It writes a line for each case to benchmarks/parity/outside_losses.jsonl. With `--only ctc,pp` it runs some losses or
recipes, and writes nothing.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as between_ranks
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor

import autopar

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.stored import stored

RECIPES = ("ddp", "zero3", "tp", "tp+sp", "cp", "pp")
RESULTS = Path(__file__).with_suffix(".jsonl")
STEPS, TOLERANCE = 10, 1e-9
ROWS, LENGTH, CLASSES = 8, 8, 64

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One loss under one recipe.

    Attributes:
        name: loss, recipe and number of ranks.
        losses: largest relative difference of ten losses.
        gradients: largest difference of the gradients of ten steps, relative to the largest of each parameter's.
        parameters: largest difference of the parameters after ten steps of SGD, relative likewise.
        evaluated: largest difference of the loss under `torch.no_grad()` after them.
        refused: first line of the error; "" where there is none.
    """

    name: str
    losses: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    evaluated: float = 0.0
    refused: str = ""

    @property
    def words(self) -> str:
        """The row as a line."""
        numbers = self.losses, self.gradients, self.parameters, self.evaluated
        return f"{self.name}: {self.refused or ' '.join(f'{each:.1e}' for each in numbers)}"

    @property
    def passes(self) -> bool:
        """Whether all differences are below the tolerance; False for what was refused."""
        found = (self.losses, self.gradients, self.parameters, self.evaluated)
        return not self.refused and all(each < TOLERANCE for each in found)


# --- losses: what a user's loop computes of a model, tokens [ROWS, LENGTH] and targets of the same shape


class Head(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return entropy(logits * self.scale, y)


def entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


def mean(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    return model(x).square().mean()


def masked_mean(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    mask = y.flatten() % 3 > 0
    return (entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()


def weighted(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    return entropy(model(x), y, weight=torch.linspace(0.5, 2, CLASSES, dtype=torch.float64))


def contrastive(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    one, other = (F.normalize(model(each).mean(1), dim=-1) for each in (x, x.flip(1)))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


def ctc(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    log_probabilities = model(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(x),), LENGTH), torch.full((len(x),), 3)
    return F.ctc_loss(log_probabilities, y[:, :3] % (CLASSES - 1) + 1, *lengths)


def summed(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    return entropy(model(x), y, reduction="sum") / 100


def summed_over_ranks(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    """The same from every rank's own rows; in one process all rows are its own."""
    logits = model(x)
    if not isinstance(model, autopar.CompiledModule):
        return entropy(logits, y, reduction="sum") / 100
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return between_ranks.all_reduce(entropy(logits[own], y[own], reduction="sum") / 100)


def two_losses(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    logits = model(x)
    first, second = entropy(logits, y), logits.logsumexp(-1).square().mean() / 100
    if torch.is_grad_enabled():
        second.backward(retain_graph=True)
    return first


def own_parameters(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    return head(model(x), y)


def ignoring(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    return entropy(model(x), y.where(y % 4 > 0, -100), ignore_index=-100)


def distilled(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    with torch.no_grad():
        taught = TEACHER(x)
    return F.kl_div(
        (model(x) / 2).log_softmax(-1), (taught / 2).log_softmax(-1), log_target=True, reduction="batchmean"
    )


def focal(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    each = entropy(model(x), y, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


def penalized(model: Model, x: Tensor, y: Tensor, head: Head) -> Tensor:
    loss = entropy(model(x), y)
    if not torch.is_grad_enabled():
        return loss
    parameters = list(model.parameters())  # type: ignore[attr-defined]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return loss + 0.1 * torch.stack([whole(g).square().sum() for g in gradients]).sum()


LOSSES = (
    mean,
    masked_mean,
    weighted,
    contrastive,
    ctc,
    summed,
    summed_over_ranks,
    two_losses,
    own_parameters,
    ignoring,
    distilled,
    focal,
    penalized,
)


# --- training


class Block(nn.Module):
    """Attention by hand, which has second derivatives, and two linear maps."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Reader(nn.Module):
    """A small transformer: tokens [ROWS, LENGTH] to logits [ROWS, LENGTH, CLASSES]."""

    def __init__(self, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def fresh(ranks: int, seed: int = 0) -> Reader:
    torch.manual_seed(seed)
    return Reader(ranks).double()


TEACHER = fresh(2, seed=1).requires_grad_(False)


def batches(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(CLASSES, (steps, 2, ROWS, LENGTH), generator=generator))


@dataclass
class Found:
    """What a training gave: by step, and after it.

    Attributes:
        losses: loss of each step.
        gradients: gradients of each step, by name.
        parameters: parameters after the last step, by name.
        evaluated: loss under no_grad after the last step.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    evaluated: float


def trained(model: nn.Module, loss_of: Callable[..., Tensor], steps: int = STEPS) -> Found:
    """Steps of SGD, the same loop for one process and for many."""
    head = Head()
    named = {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    losses, gradients = [], []
    for x, y in batches(steps):
        loss = loss_of(model, x, y, head)
        loss.backward()
        losses.append(loss.item())
        present = {n: p.grad for n, p in named.items() if p.grad is not None}
        gradients.append({n: whole(g).clone() for n, g in present.items()})
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = loss_of(model, *batches()[0], head).item()
    return Found(losses, gradients, {n: whole(p.detach()).clone() for n, p in named.items()}, evaluated)


def compiled(ranks: int, recipe: str) -> autopar.CompiledModule:
    options: dict[str, Any] = {"mesh": {"x": ranks}, "recipe": recipe}
    if recipe == "pp":
        options = {"mesh": {"pp": ranks}}
    return autopar.compile(fresh(ranks), **options)


def row(name: str, found: Found, expected: Found, own: Sequence[str]) -> Row:
    """The differences, of the parameters that this rank has."""

    def apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        wanted = {n: x for n, x in others.items() if n in own}
        some = {n: x for n, x in some.items() if n in own}
        if some.keys() != wanted.keys():
            return float("inf")
        return max(_apart(some[n], x) for n, x in wanted.items())

    pairs = zip(found.gradients, expected.gradients, strict=True)
    return Row(
        name,
        max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True)),
        max(apart(*pair) for pair in pairs),
        apart(found.parameters, expected.parameters),
        abs(found.evaluated - expected.evaluated) / abs(expected.evaluated),
    )


def _apart(some: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, against the largest value."""
    far = (some - other).abs().max().item() / max(other.abs().max().item(), 1e-6)
    return far if far == far else float("inf")


def work(rank: int, ranks: int, port: int, path: str, losses: list[str], recipes: list[str]) -> None:
    """Every loss under every recipe on this rank; the worst row of all ranks is saved by the first."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    wanted = [loss_of for loss_of in LOSSES if loss_of.__name__ in losses]
    expected = {loss_of: trained(fresh(ranks), loss_of) for loss_of in wanted}
    rows = []
    for recipe in recipes:
        model = compiled(ranks, recipe)
        first = copy.deepcopy(fresh(ranks).state_dict())
        for loss_of in wanted:
            name = f"{loss_of.__name__} {recipe} {ranks}"
            model.load_state_dict(first, strict=recipe != "pp")
            model.zero_grad()
            try:
                found = trained(model, loss_of)
                own = [*dict(model.named_parameters()), "head.scale"]
                rows.append(row(name, found, expected[loss_of], own))
            except ValueError as error:
                rows.append(Row(name, refused=re.split(r"[;\n]", str(error))[0]))
            if rank == 0:
                click.echo(rows[-1].words, err=True)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, rows)
    if rank == 0:
        Path(path).write_text(json.dumps([asdict(worst(each)) for each in zip(*every, strict=True)]))
    dist.destroy_process_group()


def worst(rows: Sequence[Row]) -> Row:
    """The largest differences of one case over all ranks."""
    refused = {each.refused for each in rows}
    assert len(refused) == 1, rows
    if refused != {""}:
        return rows[0]
    numbers = ("losses", "gradients", "parameters", "evaluated")
    return Row(rows[0].name, *(max(getattr(each, n) for each in rows) for n in numbers))


def write(rows: Sequence[Row]) -> None:
    """Puts rows into the file of results, in place of earlier ones of the same cases."""
    known = {**stored(RESULTS, Row), **{each.name: each for each in rows}}
    RESULTS.write_text("".join(json.dumps(asdict(each)) + "\n" for each in known.values()))


@click.command()
@click.option("--only", default="", help="Losses and recipes, separated by commas.")
@click.option("--ranks", default="2,4", help="Numbers of ranks, separated by commas.")
def main(only: str, ranks: str) -> None:
    """Print the differences of every case from one process; exit 1 if one is neither equal nor refused."""
    asked, known = only.split(","), [each.__name__ for each in LOSSES]
    losses = [n for n in known if n in asked] or known
    recipes = [n for n in RECIPES if n in asked] or list(RECIPES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, ranks.split(",")):
            path = Path(folder) / f"{count}.json"
            mp.spawn(work, (count, get_free_port(), str(path), losses, recipes), count)
            found = [Row(**each) for each in json.loads(path.read_text())]
            if not only:
                write(found)
            rows += found
    for each in rows:
        click.echo(each.words)
    sys.exit(0 if all(each.passes or each.refused for each in rows) else 1)


if __name__ == "__main__":
    main()
