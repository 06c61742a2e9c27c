"""Time of the host for calls of operators: by overloads of torch.ops, and by the Python functions of torch.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_bindings.py [--rounds 9]

Every operator runs 50 times in a graph, on tensors of 16 numbers, whose kernels take next to no time; the two ways take
turns, and the least time of all rounds counts.
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
from torch import Tensor, fx, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar._torch import BINDINGS

CALLS = 50
_REPEATS = 20  # runs of the graph in a round

aten = torch.ops.aten
X, ROW = torch.rand(4, 4), torch.rand(4)
OPERANDS: dict[Any, tuple[Any, ...]] = {
    aten.add.Tensor: (X, X),
    aten.mul.Tensor: (X, 2.0),
    aten.linear.default: (X, X, ROW),
    aten.mm.default: (X, X),
    aten.layer_norm.default: (X, [4], ROW, ROW, 1e-5),
    aten.softmax.int: (X, -1),
    aten.gelu.default: (X,),
    aten.mean.dim: (X, [-1], True),
    aten.transpose.int: (X, 0, 1),
    aten.reshape.default: (X, [16]),
    aten.select.int: (X, 0, 1),
    aten.unsqueeze.default: (X, 0),
}


def graph_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> fx.GraphModule:
    """A graph that calls a function `CALLS` times on the same operands."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i, x in enumerate(operands) if isinstance(x, Tensor)]
    tensors = iter(given)
    arguments = tuple(next(tensors) if isinstance(x, Tensor) else x for x in operands)
    graph.output([graph.call_function(function, arguments) for _ in range(CALLS)])
    return fx.GraphModule(nn.Module(), graph)


def call_seconds(overload: Any, operands: tuple[Any, ...], rounds: int) -> tuple[float, float]:
    """Seconds of a call by the overload, and by the function of the table."""
    graphs = [graph_of(each, operands) for each in (overload, BINDINGS[overload])]
    tensors = [x.clone().requires_grad_() for x in operands if isinstance(x, Tensor)]
    least = [float("inf"), float("inf")]
    for _ in range(rounds):
        for position, graph in enumerate(graphs):
            start_seconds = time.perf_counter()
            for _ in range(_REPEATS):
                graph(*tensors)
            seconds = (time.perf_counter() - start_seconds) / (_REPEATS * CALLS)
            least[position] = min(least[position], seconds)
    return least[0], least[1]


@click.command(help=__doc__)
@click.option("--rounds", default=9, help="Rounds, in which the two ways take turns.")
def main(rounds: int) -> None:
    table = Table("operator", "overload, us", "function, us", "less by, us")
    for overload, operands in OPERANDS.items():
        slow, quick = call_seconds(overload, operands, rounds)
        cells = (f"{1e6 * each:.1f}" for each in (slow, quick, slow - quick))
        table.add_row(str(overload), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
