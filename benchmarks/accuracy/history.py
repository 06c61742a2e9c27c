"""Writes how far priced steps were from measured ones, by class: the table `autopar/cost_model/history.csv`.

    python -m benchmarks.accuracy.history --data DIR [--data DIR] [--output PATH]

Runs are those that `cost_model_accuracy.py` uses. For every class (dense models or mixtures of experts, generation of
GPUs, number of GPUs) with at least `FEWEST` runs, the line has the 10 % and the 90 % quantile of measured over priced
seconds. A table weighs as many runs as it has in the class, and `FEWEST` at most, so that no long sweep of one cluster
speaks for all. The tables of DIR are named in `--help` of
`cost_model_accuracy.py`; without DIR nothing is written.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from autopar.cost_model.history import ANY, DENSE, SHARE, RunClass, band_of, generation_of
from benchmarks.accuracy.cost_model_accuracy import Source, read

FEWEST = 10  # runs of a class, so that a tenth of them is one
OUTPUT = Path(__file__).parents[2] / "cost_model" / "history.csv"
HEAD = "models,gpu,ranks,tables,runs,low,high"


def ratios(sources: Sequence[Source]) -> dict[RunClass, dict[str, list[float]]]:
    """Class -> table -> measured over priced seconds of its runs, in every class that a run belongs to."""
    found: dict[RunClass, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source in sources:
        for run in source.outcomes:
            if run.measured_seconds is not None and not run.failed:
                ratio = run.measured_seconds / run.predicted_seconds
                for group in itertools.product((DENSE,), {generation_of(run.gpu), ANY}, (band_of(run.ranks), ANY)):
                    found[RunClass(*group)].setdefault(source.name, []).append(ratio)
    return found


def quantile(tables: Sequence[Sequence[float]], part: float) -> float:
    """The quantile of values, of which those of one table weigh `FEWEST` together at most.

    >>> quantile([[1.0, 2.0, 3.0, 4.0, 5.0]], 0.5), quantile([[1.0] * 10, [2.0] * 1000], 0.5)
    (3.0, 1.0)
    """
    weighed = sorted((value, min(1.0, FEWEST / len(table))) for table in tables for value in table)
    reached = list(itertools.accumulate(weight for _, weight in weighed))
    return next(
        value for (value, _), upto in zip(weighed, reached, strict=True) if upto >= part * reached[-1] * (1 - 1e-9)
    )


def lines(sources: Sequence[Source]) -> list[str]:
    """The lines of the file, widest classes last."""
    found = ["# Written by python -m benchmarks.accuracy.history; see its docstring for what the columns mean.", HEAD]
    for group, tables in sorted(ratios(sources).items(), key=lambda each: [(name == ANY, name) for name in each[0]]):
        runs = sum(map(len, tables.values()))
        if runs >= FEWEST and (group.gpu != ANY or len(tables) > 1):
            low, high = (quantile(list(tables.values()), part) for part in ((1 - SHARE) / 2, (1 + SHARE) / 2))
            found.append(f"{','.join(group)},{len(tables)},{runs},{low:.3f},{high:.3f}")
    return found


@click.command(help=__doc__)
@click.option("--data", "folders", required=True, multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", default=OUTPUT, show_default=True, type=click.Path(path_type=Path))
def main(folders: Sequence[Path], output: Path) -> None:
    output.write_text("\n".join(lines([source for each in folders for source in read(each)[0]])) + "\n")


if __name__ == "__main__":
    main()
