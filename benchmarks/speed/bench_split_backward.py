"""Time of the host for a backward in two halves, beyond that of a whole backward.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_split_backward.py [--rounds 60] [--device cpu]

Layers of a Transformer of width 16 run on 8 tokens, so that kernels take next to no time. The two ways take turns; the
lower quartile of the rounds counts. A kernel is an op of the whole backward that is no view. What the price expects
(`autopar.pipeline.split_seconds`) stands beside what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar import _torch
from autopar.pipeline.split_seconds import AGAIN_KERNELS, WALK_KERNELS
from autopar.runtime.pipeline.split_backward import SplitBackward, WholeBackward

WIDTH, TOKENS = 16, 8
WEIGHTED = 8  # ops of a layer with parameters: six products and two norms


class Layer(nn.Module):
    """A layer of a Transformer, with queries, keys and values apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, (*made, out) = self.norms[0](x), self.projections
        heads = [m(y).view(1, TOKENS, 4, -1).transpose(1, 2) for m in made]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + out(attended.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class _Kernels(TorchDispatchMode):
    """Counts ops that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "detach" not in str(func)
        return func(*args, **(kwargs or {}))


def kernels_of_backward(model: nn.Module) -> int:
    """Number of kernels of a whole backward."""
    result = _forward(model)[0].sum()
    with _Kernels() as kernels:
        result.backward()
    return kernels.count


def seconds_of(model: nn.Module, rounds: int) -> tuple[float, float, float]:
    """Seconds of a whole backward, and of the first and the second half of one in two halves."""
    found: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        result, gradient, x = _forward(model)
        found[0].append(_timed(lambda: WholeBackward([result], [gradient], [x]), x.device))  # noqa: B023
        result, gradient, x = _forward(model)
        halves: list[SplitBackward] = []
        first = lambda: halves.append(SplitBackward([result], [gradient], [x]))  # noqa: B023, E731
        found[1].append(_timed(first, x.device))
        found[2].append(_timed(halves[0].run_weights, x.device))
    whole, first, second = (sorted(each)[rounds // 4] for each in found)
    return whole, first, second


def _forward(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    device = next(model.parameters()).device
    x = torch.rand(1, TOKENS, WIDTH, requires_grad=True, device=device)
    result = model(x)
    _torch.synchronize(device)
    return result, torch.ones_like(result), x


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds until the host has issued all kernels; those of an accelerator are issued by another thread."""
    clock = time.perf_counter if _torch.is_accelerator(device) else time.thread_time
    start_seconds = clock()
    call()
    return clock() - start_seconds


@click.command(help=__doc__)
@click.option("--rounds", default=60, help="Rounds, in which the two ways take turns.")
@click.option("--device", default="cpu", help="Where the layers run; the host's time is measured.")
def main(rounds: int, device: str) -> None:
    table = Table("layers", "whole, ms", "first half", "second half", "beyond, kernels a layer", "priced")
    for layers in (1, 2, 4, 8, 16):
        model = nn.Sequential(*[Layer() for _ in range(layers)]).to(device)
        kernels = kernels_of_backward(model)
        whole, first, second = seconds_of(model, rounds)
        beyond = (first + second - whole) / (whole / kernels) / layers
        priced = WALK_KERNELS * kernels / layers + AGAIN_KERNELS * WEIGHTED
        cells = (f"{1e3 * each:.2f}" for each in (whole, first, second))
        table.add_row(str(layers), *cells, f"{beyond:.0f}", f"{priced:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
