"""How far predictions are off, and how well they rank: the figures of one source."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Outcome:
    """One run: what was measured and what was predicted, None where a table does not say.

    `group` is the (model, number of GPUs) within which configurations compete. `failed` marks a run
    that crashed or ran out of memory. `worst_bytes` are those of the fullest rank, which decide
    whether a run fits; None where that is the measured one. `stages` are those of its pipeline. It ran on `ranks` GPUs
    of the catalogue's name `gpu`.
    """

    group: Hashable
    predicted_seconds: float
    measured_seconds: float | None = None
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    capacity_bytes: float | None = None
    failed: bool = False
    worst_bytes: float | None = None
    stages: int = 1
    gpu: str = ""
    ranks: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank stays within its memory; None where that is unknown."""
        found = self.predicted_bytes if self.worst_bytes is None else self.worst_bytes
        if found is None or self.capacity_bytes is None:
            return None
        return found <= self.capacity_bytes


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Errors and regrets as fractions; None where a source has nothing to compare."""
    timed = [o for o in outcomes if o.measured_seconds is not None and not o.failed]
    errors = [abs(o.predicted_seconds / _measured(o) - 1) for o in timed]
    regrets = [regret(group) for group in groups(timed)]
    taus = [tau for group in groups(timed) if (tau := kendall(group)) is not None]
    memory = [
        abs(o.predicted_bytes / o.measured_bytes - 1)
        for o in outcomes
        if o.predicted_bytes is not None and o.measured_bytes is not None and not o.failed
    ]
    return {
        "time_error_median": _median(errors),
        "time_error_mean": statistics.fmean(errors) if errors else None,
        "time_bias_median": _median([o.predicted_seconds / _measured(o) - 1 for o in timed]),
        "spearman": spearman(timed),
        "tau_mean": statistics.fmean(taus) if taus else None,
        "regret_mean": statistics.fmean(regrets) if regrets else None,
        "regret_median": _median(regrets),
        "regret_worst": max(regrets, default=None),
        "memory_error_median": _median(memory),
        "oom_accuracy": oom_accuracy(outcomes),
    }


def groups(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Runs that compete with each other, where there are at least two."""
    found: dict[Hashable, list[Outcome]] = {}
    for each in outcomes:
        found.setdefault(each.group, []).append(each)
    return [group for group in found.values() if len(group) > 1]


def regret(group: Sequence[Outcome]) -> float:
    """Measured time of the run predicted fastest, over that of the fastest, less 1."""
    chosen = min(group, key=lambda o: o.predicted_seconds)
    return _measured(chosen) / min(map(_measured, group)) - 1


class Ranked(NamedTuple):
    """How well the plans of a group were ranked.

    Attributes:
        group: what its runs have in common.
        plans: number of plans.
        chosen_seconds, best_seconds: measured time of the plan priced as the fastest, and of the fastest.
    """

    group: Hashable
    plans: int
    chosen_seconds: float
    best_seconds: float

    @property
    def regret(self) -> float:
        """The first over the second, less 1."""
        return self.chosen_seconds / self.best_seconds - 1


def rankings(outcomes: Iterable[Outcome]) -> list[Ranked]:
    """The ranking of every group with several plans; runs of one price are runs of one plan, which has their median."""
    found = []
    for group in groups(o for o in outcomes if o.measured_seconds is not None and not o.failed):
        measured: dict[float, list[float]] = {}
        for each in group:
            measured.setdefault(float(f"{each.predicted_seconds:.9g}"), []).append(_measured(each))
        if len(measured) > 1:
            medians = {price: statistics.median(seconds) for price, seconds in measured.items()}
            found.append(Ranked(group[0].group, len(medians), medians[min(medians)], min(medians.values())))
    return found


def kendall(group: Sequence[Outcome]) -> float | None:
    """Kendall's tau-b of a group; None where all measured or all predicted times are equal."""
    tau = stats.kendalltau([o.predicted_seconds for o in group], [_measured(o) for o in group])
    return None if math.isnan(tau.statistic) else float(tau.statistic)


def spearman(outcomes: Sequence[Outcome]) -> float | None:
    """Spearman's rank correlation over all runs of a source; None below three runs."""
    if len(outcomes) < 3:
        return None
    found = stats.spearmanr([o.predicted_seconds for o in outcomes], [_measured(o) for o in outcomes])
    return None if math.isnan(found.statistic) else float(found.statistic)


def oom_accuracy(outcomes: Sequence[Outcome]) -> float | None:
    """How well "does it fit?" tells runs that failed from runs that ran: the mean of both rates.

    None where all ran or all failed.
    """
    known = [o for o in outcomes if o.fits is not None]
    right = {True: 0, False: 0}
    count = {True: 0, False: 0}
    for o in known:
        count[o.failed] += 1
        right[o.failed] += o.fits != o.failed
    if not all(count.values()):
        return None
    return (right[True] / count[True] + right[False] / count[False]) / 2


def false_refusals(outcomes: Iterable[Outcome]) -> int:
    """Number of runs that are priced as not fitting into memory, and ran."""
    return sum(o.fits is False and not o.failed for o in outcomes)


def _measured(o: Outcome) -> float:
    assert o.measured_seconds is not None
    return o.measured_seconds


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
