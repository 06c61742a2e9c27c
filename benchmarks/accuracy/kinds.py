"""Two kinds of machines: the ways to share a step among them, by price.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/kinds.py [MODEL ...]

Every way is searched as `autopar explain` searches it (`autopar.explanation.kinds`): each kind alone, equal shares on
all ranks, and a pipeline across the kinds. Nothing of it was run: all seconds are prices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autopar.cost_model import find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.search.request.request import Request
from autopar.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.tables import markdown_table

CLUSTER = "h100x8x2+a100x8x2"


class Case(NamedTuple):
    """A model with the batch of a step and the tokens of a sequence."""

    model: str
    batch: int
    seq: int


CASES = (
    Case("bert-large", 512, 512),
    Case("gpt2-xl", 256, 1024),
    Case("llama3-8b", 128, 4096),
    Case("mixtral-8x7b", 128, 4096),
)
HEADS = ("model", "batch x seq", "H100 alone", "A100 alone", "equal shares", "pipeline across", "gain", "layers")
_WAYS = ("h100x8x2 alone", "a100x8x2 alone", "equal shares", "a pipeline across")


def row(case: Case, found: Explanation) -> Sequence[str]:
    """A row of the table: seconds of every way, and the gain of the fastest over the H100 alone."""
    seconds = {way: each.step_seconds for way in _WAYS for each in found.candidates if each.name.startswith(f"{way}:")}
    gain = seconds[_WAYS[0]] / found.step_seconds - 1
    return (
        case.model,
        f"{case.batch} x {case.seq}",
        *(format_seconds(seconds[way]) if way in seconds else "no plan" for way in _WAYS),
        f"{100 * gain:+.1f} %",
        _layers(found),
    )


def _layers(found: Explanation) -> str:
    """Layers of every pipeline rank; "" without stages."""
    run = found.simulated
    if run is None:
        return ""
    ranks = map(run.pipeline.stages_of, range(run.pipeline.ranks))
    return " + ".join(str(sum(run.stages[stage].layers for stage in own)) for own in ranks)


def answer(case: Case) -> Explanation:
    """The fastest way on both kinds."""
    cluster = with_eager_runs(find_cluster(CLUSTER))
    return Question(case.model, Request.on(cluster, batch=case.batch), case.seq).answer()


def _lines(cases: Sequence[Case]) -> Iterator[str]:
    rows, notes = [], []
    for case in cases:
        begin = time.perf_counter()
        found = answer(case)
        taken_seconds = time.perf_counter() - begin
        rows.append(row(case, found))
        chosen = next(each.name for each in found.candidates if each.chosen)
        notes += ["", f"{case.model}: {chosen} (searched in {taken_seconds:.0f} s)", ""]
        notes += [f"- {line}" for line in found.kind_lines[1:-1]]
        print(*rows[-1], sep=" | ", file=sys.stderr)
    yield from markdown_table(HEADS, rows, text_columns=2)
    yield from notes


if __name__ == "__main__":
    wanted = sys.argv[1:]
    print("\n".join(_lines([each for each in CASES if each.model in (wanted or [each.model])])))
