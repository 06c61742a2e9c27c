"""How fast the cost model is: building the expressions of a folded Llama-3 405B, pricing one plan, and
pricing ten thousand configurations of it at once.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_pricing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from autopar.cost_model.machines.cluster import find_cluster
from autopar.cost_model.steps.run import Run, total
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.explanation.few_layers import training_state_of
from autopar.search import search
from autopar.search.request.request import Request

CONFIGURATIONS = 10_000


@click.command()
@click.option("--target", default="llama3-405b", help="A preset or configuration.")
@click.option("--repeat", default=5, help="Times of which the least is kept.")
def main(target: str, repeat: int) -> None:
    """Print seconds of every part beside its goal."""
    cluster = find_cluster("h100x8x64")
    seconds, (_, graph) = _timed(lambda: Question(target, Request.on(cluster), seq=8192).captured(64), 1)
    _row("capture, few layers for all", seconds, None)
    plan = search(
        graph, {"dp": 64, "tp": 8}, hardware=cluster.hardware, recipe="dp:zero3,tp:tp+sp", memory_bytes=10**18
    )

    def explain() -> Explanation:
        run = Run(micro_batches=4, training_state=training_state_of(graph))
        return Explanation(graph, plan, cluster, run)

    def build() -> Explanation:
        made = explain()
        made.at()  # compiled too
        return made

    seconds, e = _timed(build, 1)
    _row("expressions built and compiled", seconds, 5.0)
    seconds, _ = _timed(lambda: _price(e, 64.0), repeat)
    _row("one plan priced", seconds, 5e-3)
    batches = 64.0 * np.arange(1, CONFIGURATIONS + 1)
    seconds, _ = _timed(lambda: _price(e, batches), repeat)
    _row(f"{CONFIGURATIONS} configurations priced", seconds, 2.0)


def _price(e: Explanation, batch: Any) -> tuple[Any, Any]:
    step = e.at(batch=batch)
    return step.seconds(), total(step.memory("first"))


def _timed(work: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    least, result = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        least = min(least, time.perf_counter() - start)
    return least, result


def _row(name: str, seconds: float, goal: float | None) -> None:
    beside = "" if goal is None else f"  (goal {goal:g} s)"
    click.echo(f"{name:36} {seconds:10.5f} s{beside}")


if __name__ == "__main__":
    main()
