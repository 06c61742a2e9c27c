"""Seconds of searches, and what `autopar.planning.duration` says of them before they begin.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_questions.py --markdown benchmarks/results/questions.md

Towers are of layers that are alike, of which one is searched for all, of unlike ones whose widths come again, or of
ones whose widths are all apart.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import click
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from autopar.cost_model import find_cluster
from autopar.errors import AutoparError
from autopar.explanation.few_layers import capture_target
from autopar.ir import Graph, Mesh
from autopar.models.targets import resolve_target
from autopar.planning.duration import search_seconds
from autopar.planning.planning import Prepared, prepare_step, search_step
from autopar.search.exact.fold import fold
from autopar.search.request.request import Request
from benchmarks.tables import markdown_table

ROWS = 4096
# Model, cluster and mesh.
QUESTIONS = (
    ("8 alike", "h100x8", "dp=8"),
    ("8 alike", "h100x8", "dp=2,tp=4"),
    ("8 alike", "h100x8", None),
    ("8 alike", "h100x8x8", None),
    ("8 unlike", "h100x8", "dp=8"),
    ("8 unlike", "h100x8", "dp=2,tp=4"),
    ("8 unlike", "h100x8", "dp=2,tp=2,cp=2"),
    ("8 unlike", "h100x2", None),
    ("8 unlike", "h100x8", None),
    ("8 unlike", "h100x8x8", None),
    ("8 unlike", "h100x8x128", None),
    ("32 unlike", "h100x8", "dp=2,tp=2,cp=2"),
    ("32 unlike", "h100x8", None),
    ("40 apart", "h100x8x8", None),
    ("gpt2", "h100x8", "dp=2,tp=4"),
    ("gpt2", "h100x8", None),
    ("llama3-8b", "h100x8", None),
    ("llama3-8b", "h100x8x16", None),
)


def tower(layers: int, kind: str) -> nn.Module:
    """A model of so many layers of three modules."""
    further = {"alike": lambda i: 0, "unlike": lambda i: 64 * (7 * i % 11), "apart": lambda i: 16 * (i + 1)}[kind]
    widths = [256, *(256 + further(i) for i in range(layers - 1)), 256]
    return nn.Sequential(*(m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b))))


def captured(model: str) -> tuple[Prepared, Graph, int]:
    """A captured model, and the batch of its question."""
    layers, _, kind = model.partition(" ")
    if kind:
        with torch.device("meta"):
            own, x = tower(int(layers), kind), torch.ones(ROWS, 256)
        prepared = prepare_step(own, (x, x), loss_fn=nn.functional.mse_loss)
        return prepared, prepared.analysis.graph, ROWS
    return *capture_target(resolve_target(model, batch=128, seq=1024), precision=None), 128


def row(model: str, cluster: str, mesh: str | None) -> tuple[str, ...]:
    """A line of the table."""
    prepared, graph, batch = captured(model)
    own = find_cluster(cluster)
    request = Request.on(own, batch=batch, refines=True, mesh=Mesh.parse(mesh) if mesh else None)
    classes, begin = len(fold(graph).classes), time.process_time()
    try:
        search_step(prepared, request)
        said = ""
    except AutoparError:
        said = ", no plan"
    seconds = time.process_time() - begin
    expected = search_seconds(classes, own.ranks, request.mesh)
    return model, cluster, mesh or "open", str(classes), f"{expected:.1f}", f"{seconds:.1f}{said}"


@click.command()
@click.option("--only", default="", help="Only models with this word in their name.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Page to write.")
def main(only: str, markdown: Path | None) -> None:
    """Measures searches."""
    captured("8 alike")  # what is imported at the first capture
    rows = []
    for question in QUESTIONS:
        if only in question[0]:
            rows.append(row(*question))
            print(*rows[-1], flush=True)
    heads = ("model", "cluster", "mesh", "different ops", "said, s", "measured, s of a processor")
    if markdown:
        command = "By `python benchmarks/speed/bench_questions.py`:"
        markdown.write_text("\n".join(["# Seconds of a search", "", command, "", *markdown_table(heads, rows), ""]))


if __name__ == "__main__":
    main()
