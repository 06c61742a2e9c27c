"""What torch.export cannot capture, through torch.compile(backend="autopar") on two real ranks over Gloo."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.proof.comparison import comparable
from autopar.units import counted
from benchmarks.zoo.examine import make, one_line
from benchmarks.zoo.rows import BEYOND, PASSED, SEARCHED, SPLIT_BY_BACKEND, Row, write
from benchmarks.zoo.small import Small

RANKS = 2
WAIT = timedelta(seconds=300)  # of one rank for the other, on a busy machine; the process's bound comes before
# That of float32 for every model: what a model's code casts inside is unknown here. The page shows the errors.
TOLERANCE_FLOAT32 = 2e-5


def serve(row: Row, rank: int, folder: Path, scratch: Path) -> None:
    """One of two ranks; the first writes the row, with outcomes, to `scratch` after each plan."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=WAIT)
    small = make(row.name, masked="attention mask" in row.note)
    if small.draws:  # eager code and compiled code would draw different numbers
        small.step.eval()
    expected = _run(small.step, small.step, small.args)
    for plan in SPLIT_BY_BACKEND:
        row.backend[plan] = _together(_outcome(small, expected, plan))
        if rank == 0:
            write(row, scratch)
    dist.destroy_process_group()


def _together(outcome: str) -> str:
    """What both ranks say: the first that did not pass, if one did not."""
    said: list[str] = [""] * RANKS
    dist.all_gather_object(said, outcome)
    return next((x for x in said if not x.startswith(PASSED)), said[0])


def _outcome(small: Small, expected: dict[str, Tensor], plan: str) -> str:
    mesh, recipe, _ = SEARCHED[plan]
    try:
        found, graphs = _compiled(small, "autopar", {"mesh": mesh, "recipe": recipe})
        error = _error(found, expected)
        if error <= TOLERANCE_FLOAT32:
            return f"{PASSED}, {counted(graphs, 'graph')}, error {error:.0e}"
        dynamo, _ = _compiled(small, "eager", {})
    except Exception as error:
        return one_line(error)
    return (
        f"{BEYOND}: error {error:.1e} in {counted(graphs, 'graph')}; by torch.compile(backend='eager') "
        f"{_error(dynamo, expected):.1e}, and {_error(found, dynamo):.1e} from that"
    )


def _compiled(small: Small, backend: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Loss and gradients by torch.compile, and how many graphs it made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(small.step, backend=backend, **({"options": options} if options else {}))
    found = _run(small.step, compiled, small.args)
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _run(step: nn.Module, runs: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Loss and gradients of the step, run by `runs`."""
    step.zero_grad()
    loss = runs(*args)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **gradients}


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The worst relative error of the loss and every gradient; one that there is not counts as zeros."""
    gradients = [g for name, g in expected.items() if name and g.numel()]
    largest = max((g.abs().max().item() for g in gradients), default=0.0)
    errors = []
    for name, like in {**found, **expected}.items():
        x, y = (gradient.get(name, torch.zeros_like(like)) for gradient in (found, expected))
        scale = comparable(y, largest if name else 0.0) or 1.0
        errors.append((x - y).abs().max().item() / scale if like.numel() else 0.0)
    return max(errors)
