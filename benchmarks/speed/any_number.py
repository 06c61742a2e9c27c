"""Whether some numbers of GPUs are slow: tokens per second and rank of the best plan, with the batch of a rank held.

    python benchmarks/speed/any_number.py --results RESULTS.jsonl --markdown benchmarks/results/any_number.md

A number between two powers of two is compared with the better of these. Up to 8 GPUs are one node; more are nodes of 8,
or of fewer where 8 does not divide the number. 11 or 13 GPUs are no whole nodes. A number whose result is stored is
not asked again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from autopar.cost_model.machines.cluster import find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.explanation.advice import Question
from autopar.explanation.pages import page_of
from autopar.search.request.request import Request
from benchmarks.stored import store, stored
from benchmarks.tables import between_marks, markdown_table

# Model -> sequences of a rank, tokens of a sequence.
MODELS = {"gpt2-xl": (8, 1024), "llama3-8b": (2, 4096)}
NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 24, 32, 40, 48, 56, 64, 96, 128)
SMALLEST_NODE = 3
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


@dataclass(frozen=True)
class Answer:
    """The best plan of a model on a number of GPUs.

    Attributes:
        name: model and number, such as `gpt2-xl 24`.
        tokens_per_second: rate of all ranks together, by the price.
        plan: the plan in a line.
        seconds: duration of the search by the clock.
    """

    name: str
    tokens_per_second: float
    plan: str
    seconds: float


def cluster_of(gpus: int) -> str:
    """The cluster of so many H100, in equal nodes as large as can be.

    >>> cluster_of(5), cluster_of(24), cluster_of(15)
    ('h100x5x1', 'h100x8x3', 'h100x5x3')
    """
    node = next(size for size in range(min(gpus, 8), 0, -1) if gpus % size == 0)
    assert gpus <= 8 or node >= SMALLEST_NODE, f"{gpus} GPUs are no whole nodes"
    return f"h100x{node}x{gpus // node}"


def asked(model: str, gpus: int) -> Answer:
    """Searches everything that is open."""
    batch, seq = MODELS[model]
    start = time.perf_counter()
    cluster = with_eager_runs(find_cluster(cluster_of(gpus)))
    found = Question(model, Request.on(cluster, batch=batch * gpus), seq).answer()
    tokens = batch * gpus * seq / found.step_seconds
    plan = page_of(found, model).subtitle.replace(f" on {cluster_of(gpus)}", "")
    return Answer(f"{model} {gpus}", tokens, plan, time.perf_counter() - start)


def fall(rates: Mapping[int, float], gpus: int) -> float | None:
    """How far a number's tokens per rank lie below the better of the powers of two beside it; None for a power.

    >>> fall({2: 10.0, 3: 9.5, 4: 9.0}, 3), fall({2: 10.0}, 2)
    (0.05, None)
    """
    below = 2 ** (gpus.bit_length() - 1)
    beside = [rates[each] for each in (below, 2 * below) if each in rates]
    return None if gpus == below or not beside else round(1 - rates[gpus] / max(beside), 4)


def table(found: Mapping[str, Answer]) -> Iterator[str]:
    """The rows of all models."""
    for model in MODELS:
        known = {gpus: found[f"{model} {gpus}"] for gpus in NUMBERS if f"{model} {gpus}" in found}
        rates = {gpus: each.tokens_per_second / gpus for gpus, each in known.items()}
        rows = [
            (
                model,
                cluster_of(gpus),
                f"{rates[gpus]:,.0f}",
                "" if (by := fall(rates, gpus)) is None else f"{by:.1%}",
                each.plan,
            )
            for gpus, each in known.items()
        ]
        yield from markdown_table(("model", "cluster", "tokens/s of a rank", "below", "plan"), rows)
        yield ""


@click.command()
@click.option("--results", type=click.Path(path_type=Path), required=True, help="File that keeps answers.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Page whose table is written.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="By default all.")
def main(results: Path, markdown: Path | None, models: tuple[str, ...]) -> None:
    """Ask for plans of models on many numbers of GPUs."""
    for model in models or MODELS:
        for gpus in NUMBERS:
            if f"{model} {gpus}" not in stored(results, Answer):
                store(results, asked(model, gpus))
                click.echo(f"{model} on {cluster_of(gpus)}")
    lines = list(table(stored(results, Answer)))
    print("\n".join(lines))
    if markdown is not None:
        markdown.write_text(between_marks(markdown.read_text(), BEGIN, END, lines))


if __name__ == "__main__":
    main()
