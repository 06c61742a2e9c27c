"""Time to capture, search and rewrite Llama-3 8B for a cluster, on one core and without weights.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_planning.py --mesh dp=8,tp=8

Says also how the search grows with depth: blocks are folded, so that 32 layers should cost what 8 do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.ir import Mesh
from autopar.planning.planning import make_plan, prepare_step
from autopar.program.program import build_program
from autopar.search.request.request import Request


class Llama(nn.Module):
    """Llama-3 8B of `transformers` with its loss, on the meta device."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
            rope_theta=5e5,
            use_cache=False,
        )
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config).to(torch.bfloat16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss  # type: ignore[no-any-return]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds it took."""
    start_seconds = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start_seconds


def measure(layers: int, mesh: Mesh, batch: int, sequence: int, recipe: str) -> dict[str, float]:
    """Seconds of each stage for one depth."""
    model = Llama(layers)
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    hardware = find_hardware("h100")
    prepared, capture_seconds = timed(lambda: prepare_step(model, (tokens, tokens)))
    plan, search_seconds = timed(lambda: make_plan(prepared, Request(hardware, mesh=mesh, recipe=recipe)))
    _, rewrite_seconds = timed(lambda: build_program(prepared.captured, prepared.analysis, plan))
    total = capture_seconds + search_seconds + rewrite_seconds
    return {"capture": capture_seconds, "search": search_seconds, "rewrite": rewrite_seconds, "total": total}


@click.command(context_settings={"show_default": True})
@click.option("--mesh", default="dp=8,tp=8", help="Axes of the mesh.")
@click.option("--layers", default="8,32", help="Depths to plan for, separated by commas.")
@click.option("--batch", default=8, help="Sequences of a global batch.")
@click.option("--sequence", default=4096, help="Tokens of a sequence.")
@click.option("--recipe", default="auto", help="Recipe of the search.")
@click.option("--repeat", default=3, help="Runs of each depth; the median is shown.")
def main(mesh: str, layers: str, batch: int, sequence: int, recipe: str, repeat: int) -> None:
    """Print seconds of every stage, and the growth of the search with depth."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, as promised
    table = Table(title=f"Llama-3 8B on {mesh}, recipe {recipe}, seconds (median of {repeat})")
    for column in ("layers", "capture", "search", "rewrite", "total"):
        table.add_column(column, justify="right")
    searches = []
    for depth in (int(text) for text in layers.split(",")):
        runs = [measure(depth, Mesh.parse(mesh), batch, sequence, recipe) for _ in range(repeat)]
        row = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
        table.add_row(str(depth), *(f"{seconds:.2f}" for seconds in row.values()))
        searches.append(row["search"])
    console = Console()
    console.print(table)
    if len(searches) > 1:
        console.print(f"search of the deepest over the shallowest: {searches[-1] / searches[0]:.2f}")


if __name__ == "__main__":
    main()
