"""How far priced steps have been from measured ones: the spread that a new price deserves.

`history.csv` beside this file has, for every class of published runs, between which multiples of its price 80 % of the
steps took. `python -m benchmarks.accuracy.history` writes it: quantiles of measured over priced seconds, in which a
table of many runs weighs as one of ten. The runs are of other runtimes, whose efficiency was fitted to some of them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

SHARE = 0.8  # of the runs lies between the two quantiles
ANY = "any"
DENSE, ROUTED = "dense models", "mixtures of experts"
BANDS = (8, 64, 512)  # ranks at which a class ends; the last has no end
# First letters of a machine's name -> the generation of GPUs whose runs tell of it.
_GENERATIONS: Mapping[str, str] = MappingProxyType(
    {"v100": "V100", "a100": "A100", "h100": "H100", "h200": "H100", "h20": "H100"}
    | dict.fromkeys(("b200", "b300", "gb200", "gb300"), "B200")
    | dict.fromkeys(("mi300", "mi325", "mi350", "mi355"), "MI300")
)


class RunClass(NamedTuple):
    """A class of runs.

    Attributes:
        models: "dense models", or "mixtures of experts".
        gpu: generation of GPUs, such as "H100"; "any" for all.
        ranks: number of GPUs, such as "9 to 64"; "any" for all.
    """

    models: str
    gpu: str
    ranks: str

    def __str__(self) -> str:
        gpu = "any GPU" if self.gpu == ANY else self.gpu
        count = "" if self.ranks == ANY else f", {self.ranks} of them"
        return f"{self.models} on {gpu}{count}"


class Spread(NamedTuple):
    """Between which multiples of its price a step took in 80 % of the runs of a class.

    Attributes:
        low, high: the 10 % and the 90 % quantile of measured over priced seconds.
        runs, tables: number of runs, and of published tables that they stand in.
        group: the class.
    """

    low: float
    high: float
    runs: int
    tables: int
    group: RunClass


def generation_of(name: str) -> str:
    """The generation of a machine's GPUs by its name; "any" for one without runs.

    >>> generation_of("gb200"), generation_of("h100-efa"), generation_of("l40s")
    ('B200', 'H100', 'any')
    """
    return next((found for start, found in _GENERATIONS.items() if name.lower().startswith(start)), ANY)


def band_of(ranks: int) -> str:
    """The class of a number of ranks.

    >>> [band_of(ranks) for ranks in (1, 8, 9, 8192)]
    ['1 to 8', '1 to 8', '9 to 64', 'more than 512']
    """
    first = 1
    for last in BANDS:
        if ranks <= last:
            return f"{first} to {last}"
        first = last + 1
    return f"more than {BANDS[-1]}"


@cache
def history() -> Mapping[RunClass, Spread]:
    """The spreads of the file, by class."""
    text = resources.files("autopar.cost_model").joinpath("history.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for row in csv.DictReader(lines):
        group = RunClass(row["models"], row["gpu"], row["ranks"])
        found[group] = Spread(float(row["low"]), float(row["high"]), int(row["runs"]), int(row["tables"]), group)
    return found


def spread_of(name: str, ranks: int, *, is_routed: bool) -> Spread | None:
    """The spread of the narrowest class with runs that a step belongs to; None where nothing was measured.

    Nothing of the sort is known of processors, nor of models of a kind of which no run was priced.

    Args:
        name: name of the machine.
        ranks: number of ranks.
        is_routed: whether the model is a mixture of experts.
    """
    if name.lower().startswith("cpu"):
        return None
    models, gpu, band = ROUTED if is_routed else DENSE, generation_of(name), band_of(ranks)
    classes = (
        RunClass(models, gpu, band),
        RunClass(models, gpu, ANY),
        RunClass(models, ANY, band),
        RunClass(models, ANY, ANY),
    )
    return next((history()[each] for each in classes if each in history()), None)
