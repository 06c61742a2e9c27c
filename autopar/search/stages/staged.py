"""Cuts one plan of layouts into pipeline stages, with every schedule and recomputation that a request allows.

[Note: fewest blocks] Recomputing more blocks takes more time and less memory, so that bisection finds the fewest
blocks that fit. With several stages one block more can be faster, because it allows better cuts. One more block is
therefore tried as long as the step gets shorter.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.errors import AutoparError, PlanError, SearchError
from autopar.ir import Plan, pipeline_position
from autopar.ir.recompute import Recompute, RecomputeOption, Selection, is_saved_option
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import Simulation, simulate
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.pipeline.weight_stashing import with_versions
from autopar.search.exact.selection import PARTS, select
from autopar.search.stages.balance import Balance, balance, balance_of
from autopar.search.stages.pipeline_bounds import least_seconds, may_fit, shortest_seconds
from autopar.search.stages.pipeline_settings import Priced, Setting
from autopar.search.stages.shape import Shape


class SlowerError(SearchError):
    """Raised if no plan is faster than a known step, whether or not one fits."""


@dataclass(frozen=True)
class Overfull:
    """A setting that does not fit into memory.

    Attributes:
        table: costs of all possible stages.
        shape: ranks, chunks, schedule and micro-batches of the setting.
        bound_bytes: bound on the memory of a rank.
    """

    table: StageTable
    shape: Shape
    bound_bytes: float

    @cached_property
    def excess_bytes(self) -> float:
        """Bytes by which the fullest rank exceeds the bound, under the cuts for which this is least."""
        least = balance(self.table, self.shape, memory_bytes=self.bound_bytes)
        return max(least.rank_bytes) - self.bound_bytes

    @cached_property
    def seconds(self) -> float:
        """Estimated duration of a step if memory had no bound."""
        table, shape = self.table, self.shape
        slowest = balance(table, shape, memory_bytes=math.inf).seconds
        rest = float(table.forward_seconds[0, -1] + table.backward_seconds[0, -1]) - slowest
        return shape.micro_batches * slowest + max(0.0, rest) / shape.chunks


@dataclass
class Findings:
    """The intermediate results of a search for a pipeline.

    Attributes:
        bound_bytes: memory that tensors of a rank may take; infinite for no bound.
        known_seconds: seconds of a known step; settings that take as long are left out.
        priced: name of a setting that fits -> its price, and the plan of layouts that it was cut from.
        refused: name of an impossible setting -> the reason.
        overfull: settings that do not fit.
        has_slower: whether a setting was left out because it is no faster than a known step.
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
        return min(self.known_seconds, *(each.seconds for each, _ in self.priced.values()), math.inf)

    def add(self, priced: Priced, staged: StagedPlan) -> None:
        """Records a setting that fits; a better price of the same setting replaces a worse one."""
        if priced.seconds >= self.known_seconds:
            self.has_slower = True
            return
        name = str(priced.setting)
        if name not in self.priced or priced.key < self.priced[name][0].key:
            self.priced[name] = priced, staged

    def refuse(self, name: str, error: AutoparError) -> None:
        """Records why a setting is impossible; only the first reason is kept."""
        self.refused.setdefault(name, error)


class StagedPlan:
    """A plan of layouts with the costs of all its possible stages; `price` cuts it into stages.

    Args:
        tables: costs of all possible stages.
        share: bound under which the layouts were searched, as a part of the memory of all pipeline ranks.
        step_seconds: seconds per step that are the same for every setting.
        findings: results of the search, to which prices and reasons are added.
    """

    def __init__(self, tables: StageTables, share: float, step_seconds: float, findings: Findings) -> None:
        self.tables, self.share, self.step_seconds = tables, share, step_seconds
        self.plan: Plan = tables.blocks.plan
        self.findings, self.bound = findings, findings.bound_bytes
        self._selected = functools.cache(lambda part: select(tables.selectable, part))
        # Single ops can be selected for recomputation only if every layer was captured, and so has named ops.
        self._selects = not tables.repetition.groups

    def check_wish(self, wish: RecomputeOption | None) -> None:
        """Raises PlanError for a wish of single ops where one captured layer stands for several."""
        if isinstance(wish, Selection) and not self._selects:
            raise PlanError(
                f"recompute={wish} names single ops, which takes a graph of all {self.tables.repeating_blocks} layers, "
                "and few were captured. Take recompute=full or a number of layers here, or name the ops to "
                "autopar.compile, which captures all layers."
            )

    def price_shape(self, shape: Shape, wish: RecomputeOption | None) -> None:
        """Prices a shape with the recomputation that the user asks for; with None, with as little as fits.

        Raises PlanError if the schedule cannot run this number of micro-batches.
        """
        if isinstance(wish, float):
            blocks = self._fewest(shape, partial(self._is_within, wish, shape))
            for recompute in (*((self._selected(wish),) if self._selects else ()), blocks):
                self.price(Setting(shape, recompute))
        elif wish is not None:
            assert not is_saved_option(wish), "the outer search asks for all blocks"
            self.price(Setting(shape, wish))
        elif not self._affords(shape, "none"):
            self.findings.has_slower = True
        elif not self.findings or self._may_fit(shape):
            self._price_least(shape)

    def price(self, setting: Setting, *, executed: bool = False) -> Priced | None:
        """Balances the cuts of one setting and simulates its schedule, unless it cannot be faster than the best one.

        Args:
            setting: the setting.
            executed: whether the cuts are balanced by simulating the schedule.
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

    def without_recomputation(self, best: Priced) -> Priced | None:
        """The setting with its cuts and without its recomputation; None if it has none."""
        if best.setting.recompute == "none":
            return None
        shape = best.setting.shape
        return self._priced(Setting(shape, "none"), balance_of(self.tables.at("none"), shape, best.balance.cuts))

    # --- recomputation

    def _price_least(self, shape: Shape) -> None:
        """Prices a shape without recomputation; if it does not fit, with the least recomputation that fits."""
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
        """Whether a shape may be faster than the best setting under some cuts."""
        whole = self.tables.whole(recompute)
        # A number of blocks is recomputed in every stage; the blocks after them are not recomputed.
        alone = self.tables.whole("none") if isinstance(recompute, int) else whole
        return shortest_seconds(whole, shape, alone) < self.findings.best_seconds

    def _may_fit(self, shape: Shape) -> bool:
        """Whether a shape may fit with some recomputation, by the bytes of all blocks together.

        The least memory is that with all blocks recomputed, or with all but one.
        """
        if math.isinf(self.bound):
            return True
        kinds: tuple[Recompute, ...] = ("none", "full", max(1, self.tables.repeating_blocks - 1))
        return any(may_fit(self.tables.whole(each), shape, self.bound) for each in kinds)

    def _cannot_fit(self, shape: Shape, recompute: Recompute) -> bool:
        """Whether no cuts can fit, by the bytes of all blocks together; False for a shape that cannot run."""
        if shape.stages > len(self.tables.parts):
            return False
        try:
            return not may_fit(self.tables.whole(recompute), shape, self.bound)
        except PlanError:
            return False

    def _price_selection(self, shape: Shape) -> None:
        """Prices recomputation of single ops: the selection that fits and recomputes least."""
        first = bisect.bisect_left(PARTS, True, key=lambda part: self._fits(shape, self._selected(part)))
        if first < len(PARTS):
            self.price(Setting(shape, self._selected(PARTS[first])))

    def _price_fewest(self, shape: Shape) -> None:
        """Prices recomputation of blocks, see [Note: fewest blocks].

        Nothing is priced if the numbers of blocks that fit are slower than the best setting.
        """
        if math.isfinite(self.findings.best_seconds) and not any(self._fits(shape, each) for each in self._most(shape)):
            if not self.findings:  # the price tells whether something slower fits
                self.price(Setting(shape, "full"))
            return
        best = math.inf
        for again in self._from(shape, self._fewest(shape, partial(self._fits, shape))):
            priced = self.price(Setting(shape, again))
            if shape.stages == 1 or priced is None or priced.seconds >= best:
                return
            best = priced.seconds

    def _most(self, shape: Shape) -> tuple[Recompute, ...]:
        """The largest numbers of recomputed blocks with which a shape may be faster than the best setting.

        With "full" the list also has all blocks but one, because they may take a little less memory than all.
        """
        counts = self._counts(shape)
        if self._affords(shape, "full"):
            return ("full", *counts[-1:])
        fewer = bisect.bisect_left(counts, True, key=lambda n: not self._affords(shape, n))
        return (fewer,) if fewer else ()

    def _counts(self, shape: Shape) -> range:
        """The numbers of recomputed blocks to price, without all blocks, which are "full".

        A stage cannot recompute more blocks than it can have.
        """
        largest = len(self.tables.parts) - (shape.stages - 1)
        return range(1, min(self.tables.repeating_blocks, largest + 1))

    def _fewest(self, shape: Shape, is_enough: Callable[[Recompute], bool]) -> Recompute:
        """The fewest recomputed blocks for which `is_enough` holds; "full" if no number of blocks is enough.

        The bisection leaves "full" out, because it may take a little more memory than all blocks but one: the inputs of
        all blocks and the activations of the last block then exist at once.
        """
        counts = self._counts(shape)
        at = bisect.bisect_left(counts, True, key=is_enough)
        return counts[at] if at < len(counts) else "full"

    def _from(self, shape: Shape, fewest: Recompute) -> Iterator[Recompute]:
        """This number of recomputed blocks, and all larger ones."""
        if isinstance(fewest, int):
            yield from range(fewest, self._counts(shape).stop)
        yield "full"

    # --- cuts and prices

    def _fits(self, shape: Shape, recompute: Recompute) -> bool:
        """Whether a setting fits; False if it is impossible, and the reason is recorded."""
        # All blocks together are the only stage, or recompute as much as they do in any stages.
        is_bound = recompute == "full" or (shape.stages == 1 and isinstance(recompute, int))
        if is_bound and self._cannot_fit(shape, recompute):
            return False
        cuts = self._balanced(Setting(shape, recompute))
        return cuts is not None and max(cuts.rank_bytes) <= self.bound

    def _is_within(self, part: float, shape: Shape, recompute: Recompute) -> bool:
        """Whether every stage keeps at most this part of what recomputation can free; see `check_wish`."""
        cuts = self._balanced(Setting(shape, recompute))
        if cuts is None:
            return False
        edges = itertools.pairwise((0, *cuts.cuts, len(self.tables.parts)))
        least, now, all_of_it = (self.tables.at(each).saved_bytes for each in ("full", recompute, "none"))
        return all(now[edge] - least[edge] <= part * (all_of_it[edge] - least[edge]) for edge in edges)

    def _balanced(self, setting: Setting, *, executed: bool = False) -> Balance | None:
        """The best cuts of a setting; None if it is impossible, and the reason is recorded."""
        table = self.tables.at(setting.recompute)
        try:
            return balance(table, setting.shape, memory_bytes=self.bound, executed=executed)
        except (PlanError, SearchError) as error:
            self.findings.refuse(str(setting), error)
            return None

    def _priced(self, setting: Setting, cuts: Balance) -> Priced:
        """The price of a setting with these cuts. A number of blocks becomes "full" if no stage has more blocks."""
        table = self.tables.at(setting.recompute)
        run, seconds = self._executed(table, setting.shape, cuts)
        again = setting.recompute
        if isinstance(again, int) and again >= table.most_repeating(cuts.cuts):
            setting = replace(setting, recompute="full")
        names = [table.starts[block] for block in cuts.cuts]
        position = pipeline_position(self.tables.blocks.world)
        pipeline = setting.shape.cut(names, position)
        plan = replace(self.plan, recompute=setting.recompute, pipeline=pipeline)
        return Priced(setting, plan, seconds, run, cuts)

    def _executed(self, table: StageTable, shape: Shape, cuts: Balance) -> tuple[Simulation, float]:
        """The simulated schedule, and the seconds of a step."""
        lists, waits = actions(shape.blank, shape.micro_batches), waits_for_sends(shape.schedule)
        costs = self.tables.costs(table.recompute, cuts.cuts, shape.blank)
        costs = with_versions(costs, shape.blank, shape.micro_batches)
        run = simulate(lists, costs, waits_for_sends=waits)
        return run, run.step_seconds + self._once_seconds(table, shape, cuts)

    def _once_seconds(self, table: StageTable, shape: Shape, cuts: Balance) -> float:
        """Seconds of the work that the slowest rank does once per step after its schedule, for all its stages."""
        if shape.blank.update_every:  # updates are part of the schedule
            return self.step_seconds
        ranks = [0.0] * shape.ranks
        for stage, edge in enumerate(itertools.pairwise((0, *cuts.cuts, table.blocks))):
            rank = shape.blank.rank_of(stage)
            ranks[rank] += float(table.on(rank).once_seconds[edge])
        return max(ranks) + self.step_seconds
