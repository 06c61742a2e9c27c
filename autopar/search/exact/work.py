"""The seconds of a step as maxima of sums of work, any mixture of which is a lower bound.

Of messages that take S seconds and compute that takes C, a step hides a part h of the shorter one; and it takes as long
as the device or as the host, whichever is slower (`autopar.cost_model.steps.step`):

    C + S - h min(S, C) = max(C + S - h S, C + S - h C)

So the seconds are a sum over *groups*, each the largest of a few *pieces*, and a piece is a sum over the kinds of work
of a plan. The largest piece is no less than any mean of them: at weights that add up to 1 the sum of work takes no
longer than the step, under any plan. In the same way a price of memory counts the memory that is there for a moment at
any mean over its moments (`Step._transient`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.items import COMPUTE, MemoryItem, Region, WorkItem, kind_of_work, runs_every_time
from autopar.cost_model.steps.run import REGIONS
from autopar.search.exact.problem import Problem
from autopar.search.exact.solver import MixedIntegerProgram

Numbers = NDArray[np.float64]

_KINDS = ("compute", "stored", "activation", "move", "waits", "issue")
_AT = {each: n for n, each in enumerate((region, kind) for region in REGIONS for kind in _KINDS)}
_ONCE, _REDUCED, _BACKWARD, _BYTES, _MOMENTS = range(len(_AT), len(_AT) + 5)
_LEAST_PART = 2e-3  # of the memory bound; a higher price than a whole step for so many bytes is not tried


class Multipliers(NamedTuple):
    """Seconds that a lower bound counts for every kind of work.

    Attributes:
        of_work: seconds for a second or a byte of every kind.
        constant_seconds: seconds that are added for every plan.
    """

    of_work: Numbers
    constant_seconds: float


class StepPieces:
    """The kinds of work of a search's steps, by which choices and plans are vectors.

    Args:
        problem: the search's data for one mesh, with the figures of machine and runtime.
        memory_bytes: bound on the peak memory of a rank; None for no bound.

    Attributes:
        size: number of kinds of work.
    """

    def __init__(self, problem: Problem, memory_bytes: float | None = None) -> None:
        self._step = problem.prices.step
        self._room_bytes = None if memory_bytes is None else memory_bytes - problem.constant_bytes
        self.size = _MOMENTS + 2 * len(problem.prices.blocks)
        hides, batches = problem.most_hidden, float(self._step.run.micro_batches)
        self._base = np.zeros(self.size)
        self._base[[_ONCE, _REDUCED]] = 1.0
        regions = [batches * self._of_region(each, hides) for each in REGIONS]
        reductions = np.zeros((2, self.size))
        reductions[0, _REDUCED] = reductions[1, _BACKWARD] = -hides
        self._groups = [*regions, reductions]
        self._fixed_seconds = float(self._step.software.step_seconds + self._step.hardware.step_seconds)

    def _of_region(self, region: Region, hides: float) -> Numbers:
        """The pieces of a region: the device, with either side of what overlaps hidden, and the host."""
        device, host = np.zeros((2, self.size))
        device[[_AT[region, kind] for kind in _KINDS[:-1]]] = 1.0
        host[_AT[region, "issue"]] = 1.0
        pieces = [device]
        for kind, part in (("stored", hides), ("activation", self._step.software.hides_activations)):
            ways = (kind, "compute") if part else (kind,)
            pieces = [each - part * self._unit(_AT[region, way]) for each in pieces for way in ways]
        return np.array([*pieces, host])

    def _unit(self, at: int) -> Numbers:
        found = np.zeros(self.size)
        found[at] = 1.0
        return found

    # --- work

    def of(self, items: Iterable[WorkItem]) -> Numbers:
        """The work of items: of a micro-batch, or of a step if they run once."""
        found = np.zeros(self.size)
        for item in items:
            self._add(found, item)
        return found

    def _add(self, found: Numbers, item: WorkItem) -> None:
        count, seconds, kind = float(item.count), float(item.seconds), kind_of_work(item)
        if not runs_every_time(item):
            found[_REDUCED if item.phase == "reduce" and kind == "stored" else _ONCE] += count * seconds
            return
        issued_seconds = float(self._step.issue_seconds(item))
        found[_AT[item.region, kind]] += count * seconds
        found[_AT[item.region, "issue"]] += count * issued_seconds
        if item.kernels and not self._step.software.runs_ahead:
            found[_AT[item.region, "waits"]] += count * max(0.0, issued_seconds - seconds)
        if item.resource == COMPUTE and item.phase == "backward":
            found[_BACKWARD] += count * seconds

    def stored(self, optimizer_seconds: float, holdings: Iterable[MemoryItem]) -> Numbers:
        """The optimizer's work on a parameter, and the bytes that stay on the device."""
        held_bytes = sum(float(h.bytes) for h in holdings if h.tier == "device")
        return optimizer_seconds * self._unit(_ONCE) + self.saved(held_bytes)

    def saved(self, size_bytes: float) -> Numbers:
        """Bytes that stay on the device."""
        return size_bytes * self._unit(_BYTES)

    def moment(self, block: int, kind: str, size_bytes: float) -> Numbers:
        """Bytes that are "working" or "gathered" only while a kind of block runs."""
        return size_bytes * self._unit(_MOMENTS + 2 * block + (kind == "gathered"))

    @property
    def forbidden(self) -> Numbers:
        """The work of what no plan may do."""
        found = np.zeros(self.size)
        found[_ONCE] = np.inf
        return found

    # --- lower bounds

    def hiding(self) -> Multipliers:
        """The multipliers of a step in which all messages hide that can, without a price of memory."""
        hidden = np.array([pieces[0] for pieces in self._groups]).sum(axis=0)
        return Multipliers(self._base + hidden, self._fixed_seconds)

    def highest(self, works: Sequence[Numbers], scale_seconds: float) -> tuple[Multipliers, float]:
        """The multipliers under which the fastest of some plans takes longest, and the seconds it then takes.

        These are no less than any lower bound, and the highest one if no other plan takes less under these multipliers
        (cutting planes; Kelley 1960).

        Args:
            works: the work of plans.
            scale_seconds: seconds that no lower bound exceeds.
        """
        program = MixedIntegerProgram()
        bound = program.continuous(seconds=-1.0)
        weights = [[program.continuous() for _ in pieces] for pieces in self._groups]
        price, *moments = priced = [program.continuous() for _ in range(_BYTES, self.size)]
        for columns in weights:
            program.row(columns, lower=1.0, upper=1.0)
        program.row(moments, [price], lower=-1.0, upper=0.0)
        for work in works:
            seconds = np.concatenate([*(pieces @ work for pieces in self._groups), self._priced(work, scale_seconds)])
            terms = dict(zip([*itertools.chain(*weights), *priced], (-seconds / scale_seconds).tolist(), strict=True))
            left = (self._fixed_seconds + float(self._base @ work)) / scale_seconds
            program.weighted_row({bound: 1.0, **terms}, lower=-math.inf, upper=left)
        solution = program.solve()
        assert solution is not None, "a bound of no seconds is always one"
        values = np.clip(solution.values, 0.0, 1.0)
        means = [values[columns] / values[columns].sum() for columns in weights]
        return self._mixed(means, self._most_price(scale_seconds) * values[priced]), scale_seconds * float(
            values[bound]
        )

    def _mixed(self, means: Sequence[Numbers], byte_seconds: Numbers) -> Multipliers:
        """The multipliers of means of the pieces, at prices of the bytes that stay and of those of every moment."""
        mixed = [mean @ pieces for mean, pieces in zip(means, self._groups, strict=True)]
        of_work = self._base + np.array(mixed).sum(axis=0)
        of_work[_MOMENTS:] = byte_seconds[1:]
        of_work[_BYTES] = max(byte_seconds[0], byte_seconds[1:].sum())  # of the largest moment, no mean is more
        return Multipliers(of_work, self._fixed_seconds - of_work[_BYTES] * (self._room_bytes or 0.0))

    def _priced(self, work: Numbers, scale_seconds: float) -> Numbers:
        """Seconds of the bytes of a plan that exceed the bound, and of those of every moment, at the highest price."""
        found = work[_BYTES:].copy()
        found[0] -= self._room_bytes or 0.0
        return self._most_price(scale_seconds) * found

    def _most_price(self, scale_seconds: float) -> float:
        """The highest price of a byte; none without a bound on memory."""
        room = self._room_bytes
        return 0.0 if room is None else scale_seconds / max(_LEAST_PART * room, 1.0)
