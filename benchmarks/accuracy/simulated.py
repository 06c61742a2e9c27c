"""Pipelines of published runs executed action by action, beside the closed form of `Step.time`.

The actions are those of torch's schedules, and what they cost is what the closed form adds up. As there,
a message takes the time of the rank that sends it: the runtimes of these tables wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from autopar.cost_model.arith import Quantity
from autopar.cost_model.cuts import Cuts
from autopar.cost_model.items import COMPUTE, Region
from autopar.cost_model.steps.run import REGIONS, total
from autopar.cost_model.steps.step import Step
from autopar.errors import PlanError
from autopar.ir.pipeline import Pipeline
from autopar.pipeline.schedules import actions, check_micro_batches, waits_for_sends
from autopar.pipeline.simulation import StageCosts, simulate
from benchmarks.accuracy.rows import Row, Skip

# What tables call a schedule -> ours; a table that does not say means 1F1B.
SCHEDULES: Mapping[str, str] = MappingProxyType({"": "1f1b", "1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1P": "zb"})
# Those whose time the closed form gives.
CLOSED = frozenset({"", "1F1B", "1F1B-I"})
# The share of an op's backward that makes gradients of weights: one of a linear map's two products.
OF_WEIGHTS = {"aten.linear": 0.5, "aten.embedding": 1.0, "accumulate": 1.0}


def pipeline_of(row: Row) -> Pipeline:
    """The pipeline that torch would run. Raises Skip for a schedule that it has not, or refuses."""
    name = row.schedule.upper()
    if name not in SCHEDULES:
        raise Skip(f"torch has no schedule {row.schedule}")
    cuts = tuple(f"op{i}" for i in range(1, row.pp * row.chunks))
    try:
        found = Pipeline(row.pp, "interleaved" if row.chunks > 1 else SCHEDULES[name], cuts)
        check_micro_batches(found, row.grad_accum)
    except PlanError as error:
        raise Skip("more stages or chunks than torch's schedule takes micro-batches for") from error
    return found


class Simulated:
    """The steps of rows that were priced together.

    Args:
        step: the step of all rows.
        rows: the rows, with pipeline stages or without.
    """

    def __init__(self, step: Step, rows: Sequence[Row]) -> None:
        self.rows = rows
        terms = step.time()
        names = [term.name for term in terms]
        self.once = self._of_rows(total(terms[names.index("stage boundaries") + 1 :]))
        self.send = self._of_rows(step.send_seconds())
        self.cuts = np.array([self._of_rows(each) for each in step.cuts])
        self.parts = {region: np.array([self._of_rows(each) for each in _parts(step, region)]) for region in REGIONS}

    def _of_rows(self, value: Quantity) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=float), len(self.rows))

    def seconds(self, index: int) -> float:
        """Predicted duration of a row's step."""
        row = self.rows[index]
        pipeline = pipeline_of(row)
        order, waits = actions(pipeline, row.grad_accum), waits_for_sends(pipeline.schedule)
        run = simulate(order, list(self._costs(index)), waits_for_sends=waits)
        return float(self.once[index]) + run.step_seconds

    def _costs(self, index: int) -> Iterator[StageCosts]:
        row, send = self.rows[index], float(self.send[index])
        layers = layers_of(row, Cuts(*self.cuts[:, index]))
        last = len(layers) - 1
        for stage, count in enumerate(layers):
            shares: dict[Region, float] = {"before": stage == 0, "layers": count / row.layers, "after": stage == last}
            forward, backward, weights = sum(
                (share * self.parts[region][:, index] for region, share in shares.items()), start=np.zeros(3)
            ).tolist()
            yield StageCosts(forward + send * (stage < last), backward + send * (stage > 0), weights)


def _parts(step: Step, region: Region) -> tuple[Quantity, Quantity, Quantity]:
    """Seconds of a region: forward, backward with what runs again, and the share of weights in it."""
    forward, backward, weights = 0.0, 0.0, 0.0
    for resource in (COMPUTE, *step.axes):
        for item, times in step.runs(region, resource):
            seconds, first = item.count * item.seconds, item.phase == "forward"
            forward += seconds * first
            backward += seconds * (times - first)
            weights += seconds * (not first) * OF_WEIGHTS.get(item.kind, 0.0)
    whole = step.region_seconds(region) / np.maximum(forward + backward, 1e-12)
    return forward * whole, backward * whole, weights * whole


def layers_of(row: Row, cuts: Cuts) -> list[float]:
    """Layers of every stage, chunk by chunk; the chunks at both ends make room for what stands there."""
    middle = _shared(row.layers - cuts.first - cuts.last, row.pp - 2)
    full = cuts.middle if row.pp > 2 else max(cuts.first, cuts.last)
    found = [each / row.chunks for each in (full, *middle, full)] * row.chunks
    found[0] -= full - cuts.first
    found[-1] -= full - cuts.last
    return found


def _shared(layers: float, stages: int) -> list[float]:
    """Whole layers, as equally as they go."""
    least, more = divmod(layers, max(1, stages))
    return [least + (i < more) for i in range(stages)]
