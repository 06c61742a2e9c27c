"""One plan of a stage's mesh, cut into stages in every way that is asked for, and what was found by that.

[Note: fewest blocks] More blocks that run again take more time and less memory, so that the fewest that fit
are found by bisection. Of several stages one more can be faster, where it lets cuts be moved: then one more
is tried, as long as that gains.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.errors import AutoparError, PlanError, SearchError
from autopar.ir import PIPELINE_AXIS, Plan
from autopar.ir.recompute import PARTITIONED, Recompute, RecomputeWish
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import Simulation, simulate
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.pipeline.versions import with_versions
from autopar.search.balance import (
    Balance,
    balance_of,
    can_fit,
    least_overfull,
    least_seconds,
    mean_bytes,
    never_waiting_seconds,
)
from autopar.search.pipeline_settings import KeptWhole, Priced, Setting
from autopar.search.selection import Frontier
from autopar.search.shape import Shape


class SlowerError(SearchError):
    """No plan is faster than a step that is known, though some may fit."""


@dataclass(frozen=True)
class Overfull:
    """A setting that does not fit.

    Attributes:
        table: the stages of the setting.
        shape: the setting's shape.
        bound_bytes: the bound on the memory of a rank.
    """

    table: StageTable
    shape: Shape
    bound_bytes: float

    @cached_property
    def excess_bytes(self) -> float:
        """Bytes that the fullest rank has too much, under the cuts that miss by least."""
        least = least_overfull(self.table, self.shape, memory_bytes=self.bound_bytes)
        return max(least.rank_bytes) - self.bound_bytes

    @cached_property
    def seconds(self) -> float:
        """Duration of a step if a rank had room for anything."""
        table, shape = self.table, self.shape
        slowest = least_overfull(table, shape, memory_bytes=math.inf).seconds
        rest = float(table.forward_seconds[0, -1] + table.backward_seconds[0, -1]) - slowest
        return shape.micro_batches * slowest + max(0.0, rest) / shape.chunks


@dataclass
class Findings:
    """What a search for a pipeline knows so far.

    Attributes:
        bound_bytes: memory that tensors of a rank may take; infinite for no bound.
        known_seconds: seconds of a known step; settings that take as long are left out.
        priced: name of a setting that fits -> its price, and the plan of a stage's mesh that it was cut from.
        refused: name of a setting -> why it cannot be.
        overfull: settings that do not fit.
        has_slower: whether a setting was left out because it is no faster than what is known.
    """

    bound_bytes: float
    known_seconds: float = math.inf
    priced: dict[str, tuple[Priced, StagedPlan]] = field(default_factory=dict)
    refused: dict[str, AutoparError] = field(default_factory=dict)
    overfull: list[Overfull] = field(default_factory=list)
    has_slower: bool = False

    def __bool__(self) -> bool:
        """Whether a setting fits."""
        return bool(self.priced)

    @property
    def ranked(self) -> list[tuple[Priced, StagedPlan]]:
        """All settings that fit, best first."""
        return sorted(self.priced.values(), key=lambda each: each[0].key)

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest step that is known."""
        return min(
            self.known_seconds, *(each.seconds for each, _ in self.priced.values()), math.inf
        )

    def add(self, priced: Priced, staged: StagedPlan) -> None:
        """Notes a setting that fits; of several prices of one setting the best stays."""
        if priced.seconds >= self.known_seconds:
            self.has_slower = True
            return
        name = str(priced.setting)
        if name not in self.priced or priced.key < self.priced[name][0].key:
            self.priced[name] = priced, staged

    def refuse(self, name: str, error: AutoparError) -> None:
        """Notes why a setting cannot be; the first reason stays."""
        self.refused.setdefault(name, error)


class StagedPlan:
    """A plan of a stage's mesh, of which stages are cut.

    Args:
        tables: what its stages cost.
        share: fraction of the memory of all stages under which its layouts were searched.
        step_seconds: seconds of a step that no setting changes, on every rank.
        findings: where prices and refusals are noted.
    """

    def __init__(
        self, tables: StageTables, share: float, step_seconds: float, findings: Findings
    ) -> None:
        self.tables, self.share, self.step_seconds = tables, share, step_seconds
        self.plan: Plan = tables.blocks.plan
        self.findings, self.bound = findings, findings.bound_bytes
        self._frontier = Frontier(lambda: tables.selectable)
        # Ops have names of their own where all layers were captured, and can be selected then.
        self._selects = not tables.repetition.groups

    def price_shape(self, shape: Shape, wish: RecomputeWish | None) -> None:
        """Prices a shape with the recomputation that is asked for, or with as little as fits.

        Raises PlanError where the schedule does not run so many micro-batches.
        """
        if isinstance(wish, float):
            blocks = self._fewest(shape, partial(self._is_within, wish, shape))
            for recompute in (*((self._frontier.at(wish),) if self._selects else ()), blocks):
                self.price(Setting(shape, recompute))
        elif wish is not None:
            assert wish != PARTITIONED, "the outer search asks for all blocks"
            self.price(Setting(shape, wish))
        elif not self._affords(shape, "none"):
            self.findings.has_slower = True
        elif not self.findings or self._may_fit(shape):
            self._price_least(shape)

    def price(self, setting: Setting, *, executed: bool = False) -> Priced | None:
        """Balances and executes one setting, unless it cannot be better than what was found.

        Args:
            setting: the setting.
            executed: whether its cuts are balanced by executing the schedule.
        """
        if not self._affords(setting.shape, setting.recompute):
            self.findings.has_slower = True
            return None
        cuts = self._balanced(setting, executed=executed)
        if cuts is None:
            return None
        table = self.tables.at(setting.recompute)
        if max(cuts.rank_bytes) > self.bound:
            self.findings.overfull.append(Overfull(table, setting.shape, self.bound))
            return None
        if least_seconds(table, setting.shape, cuts.cuts) >= self.findings.best_seconds:
            self.findings.has_slower = True
            return None
        try:
            priced = self._priced(setting, cuts)
        except PlanError as error:
            self.findings.refuse(str(setting), error)
            return None
        self.findings.add(priced, self)
        return priced

    def kept_whole(self, best: Priced) -> KeptWhole | None:
        """Figures of a setting if it recomputed nothing; None where it recomputes nothing."""
        if best.setting.recompute == "none":
            return None
        whole, shape = self.tables.at("none"), best.setting.shape
        held = balance_of(whole, shape, best.balance.cuts)
        _, quicker = self._executed(whole, shape, best.balance)
        return KeptWhole(quicker, max(held.rank_bytes))

    # --- recomputation

    def _price_least(self, shape: Shape) -> None:
        """Prices a shape without recomputation, and where that does not fit with the least that does."""
        missed = len(self.findings.overfull)
        if self._cannot_fit(shape, "none"):
            self.findings.overfull.append(Overfull(self.tables.at("none"), shape, self.bound))
        else:
            self.price(Setting(shape, "none"))
        if len(self.findings.overfull) > missed:
            if self._selects:
                self._price_selection(shape)
            self._price_fewest(shape)

    def _affords(self, shape: Shape, recompute: Recompute) -> bool:
        """Whether ranks that never wait would be faster than what was found."""
        whole = self.tables.whole(recompute)
        # A number of blocks is recomputed in every stage: a block after them is not.
        alone = self.tables.whole("none") if isinstance(recompute, int) else whole
        return never_waiting_seconds(whole, shape, alone) < self.findings.best_seconds

    def _may_fit(self, shape: Shape) -> bool:
        """Whether anything may fit: False where even the mean rank has too much.

        No recomputation keeps less than that of all blocks but one, or than that of all.
        """
        if math.isinf(self.bound):
            return True
        kinds: tuple[Recompute, ...] = ("none", "full", max(1, self.tables.repeating_blocks - 1))
        return any(mean_bytes(self.tables.whole(each), shape) <= self.bound for each in kinds)

    def _cannot_fit(self, shape: Shape, recompute: Recompute) -> bool:
        """Whether even the mean rank has too much; False also where it cannot be cut into such a shape."""
        try:
            least_bytes = mean_bytes(self.tables.whole(recompute), shape)
        except PlanError:
            return False
        return least_bytes > self.bound and shape.stages <= len(self.tables.parts)

    def _price_selection(self, shape: Shape) -> None:
        """Prices the selection of ops with the largest memory that fits."""
        parts, at = self._frontier.parts, self._frontier.at
        first = bisect.bisect_left(parts, True, key=lambda part: self._fits(shape, at(part)))
        if first < len(parts):
            self.price(Setting(shape, at(parts[first])))

    def _price_fewest(self, shape: Shape) -> None:
        """See [Note: fewest blocks]. Nothing is priced where the most that would still be faster does not fit."""
        if math.isfinite(self.findings.best_seconds) and not any(
            self._fits(shape, each) for each in self._most(shape)
        ):
            if not self.findings:  # then it is said whether something slower fits
                self.price(Setting(shape, "full"))
            return
        best = math.inf
        for again in self._from(shape, self._fewest(shape, partial(self._fits, shape))):
            priced = self.price(Setting(shape, again))
            if shape.stages == 1 or priced is None or priced.seconds >= best:
                return
            best = priced.seconds

    def _most(self, shape: Shape) -> tuple[Recompute, ...]:
        """The most recomputed blocks of which ranks that never wait would be faster than what was found.

        All blocks may take a little more memory than all but one, which stand beside them then.
        """
        counts = self._counts(shape)
        if self._affords(shape, "full"):
            return ("full", *counts[-1:])
        fewer = bisect.bisect_left(counts, True, key=lambda n: not self._affords(shape, n))
        return (fewer,) if fewer else ()

    def _counts(self, shape: Shape) -> range:
        """The numbers of recomputed blocks that are worth a price of their own.

        All blocks are the word "full", and a stage cannot recompute more blocks than it can have.
        """
        largest = len(self.tables.parts) - (shape.stages - 1)
        return range(1, min(self.tables.repeating_blocks, largest + 1))

    def _fewest(self, shape: Shape, is_enough: Callable[[Recompute], bool]) -> Recompute:
        """The fewest blocks that are enough; "full" is all of them, and taken where no fewer are.

        Bisected without "full", which may take a little more memory than all blocks but one: the last then
        runs again beside what entered all.
        """
        counts = self._counts(shape)
        at = bisect.bisect_left(counts, True, key=is_enough)
        return counts[at] if at < len(counts) else "full"

    def _from(self, shape: Shape, fewest: Recompute) -> Iterator[Recompute]:
        """This many blocks that run again, and more, up to all."""
        if isinstance(fewest, int):
            yield from range(fewest, self._counts(shape).stop)
        yield "full"

    # --- cuts and prices

    def _fits(self, shape: Shape, recompute: Recompute) -> bool:
        """Whether a setting fits; False, with the reason noted, where it cannot be."""
        setting = Setting(shape, recompute)
        try:
            return can_fit(self.tables.at(recompute), shape, memory_bytes=self.bound)
        except (PlanError, SearchError) as error:
            self.findings.refuse(str(setting), error)
            return False

    def _is_within(self, part: float, shape: Shape, recompute: Recompute) -> bool:
        """Whether every stage keeps at most a part of what recomputation can save; see `check_wish`."""
        cuts = self._balanced(Setting(shape, recompute))
        if cuts is None:
            return False
        edges = itertools.pairwise((0, *cuts.cuts, len(self.tables.parts)))
        least, now, all_of_it = (
            self.tables.at(each).saved_bytes for each in ("full", recompute, "none")
        )
        return all(
            now[edge] - least[edge] <= part * (all_of_it[edge] - least[edge]) for edge in edges
        )

    def _balanced(self, setting: Setting, *, executed: bool = False) -> Balance | None:
        """The cuts of a setting; None, with the reason noted, where it cannot be."""
        table = self.tables.at(setting.recompute)
        try:
            return least_overfull(table, setting.shape, memory_bytes=self.bound, executed=executed)
        except (PlanError, SearchError) as error:
            self.findings.refuse(str(setting), error)
            return None

    def _priced(self, setting: Setting, cuts: Balance) -> Priced:
        """A setting with its cuts, executed; blocks are named "full" where no stage has more."""
        table = self.tables.at(setting.recompute)
        run, seconds = self._executed(table, setting.shape, cuts)
        again = setting.recompute
        if isinstance(again, int) and again >= table.most_repeating(cuts.cuts):
            setting = replace(setting, recompute="full")
        names = [table.starts[block] for block in cuts.cuts]
        position = self.tables.blocks.world.index(PIPELINE_AXIS)
        pipeline = setting.shape.cut(names, position)
        plan = replace(self.plan, recompute=setting.recompute, pipeline=pipeline)
        return Priced(setting, plan, seconds, run, cuts, self.share)

    def _executed(self, table: StageTable, shape: Shape, cuts: Balance) -> tuple[Simulation, float]:
        """The schedule as it runs, and the seconds of a step."""
        lists, waits = actions(shape.blank, shape.micro_batches), waits_for_sends(shape.schedule)
        costs = with_versions(table.stages(cuts.cuts), shape.blank, shape.micro_batches)
        run = simulate(lists, costs, waits_for_sends=waits)
        return run, run.step_seconds + self._once_seconds(table, shape, cuts)

    def _once_seconds(self, table: StageTable, shape: Shape, cuts: Balance) -> float:
        """What the slowest rank does once a step after its schedule, all its stages together."""
        if shape.blank.update_every:  # the schedule has its updates
            return self.step_seconds
        ranks = [0.0] * shape.ranks
        for stage, edge in enumerate(itertools.pairwise((0, *cuts.cuts, table.blocks))):
            ranks[shape.blank.rank_of(stage)] += float(table.once_seconds[edge])
        return max(ranks) + self.step_seconds
