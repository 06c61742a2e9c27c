"""The search for a pipeline: depth, chunks, schedule, micro-batches and recomputation, around the others.

    for every plan of a stage's mesh                    `autopar.search.search`, memory relaxed by the stages
        for every number of micro-batches               tables of what stages cost
            for every schedule and number of chunks
                with as few blocks run again as fit     balance the cuts, execute the schedule's actions

and the fastest that fits wins; of those as fast, the one that takes less memory. A setting whose ranks could
not win even if they never idled is not executed. The layouts are those of the whole model on the mesh of
one stage, so that every stage has the same kinds of layouts, and choosing them does not depend on the cuts.

[Note: memory of a stage] The search inside knows no stages: its memory is that of the whole model with one
micro-batch. A rank of p holds about one part in p of what is kept, and of a micro-batch in flight. So it may
first take p times the memory of a rank. Where nothing fits then, or what does not would be faster than what
does, half of that and a quarter are tried too, which leads to plans that shard more.

[Note: fewest blocks] More blocks that run again take more time and less memory, so that the fewest that fit
are found by bisection. Of several stages one more can be faster, where it lets cuts be moved: then one more
is tried, as long as that gains.

[Note: other micro-batches] The graph is captured for one number of micro-batches. Others are priced on the
same graph at another batch (`batches.with_batch`) and, where its sizes still divide, with the same plan.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, SearchError
from autopar.ir import (
    PIPELINE_AXIS,
    Graph,
    ParameterPlan,
    Plan,
    without_pipeline,
)
from autopar.ir.batches import captured_batch, fits_graph, with_batch
from autopar.ir.recompute import (
    Recompute,
)
from autopar.pipeline.recomputable import Memory
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import Simulation, simulate
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.search.balance import (
    Balance,
    balance,
    balance_of,
    least_overfull,
    least_seconds,
    mean_bytes,
)
from autopar.search.pipeline_notes import notes_of, of_layouts
from autopar.search.pipeline_settings import KeptWhole, PipelineFound, Priced, Setting, shapes_of
from autopar.search.recipes import format_recipe
from autopar.search.request import Request
from autopar.search.search import MeshSearch
from autopar.search.selection import Frontier
from autopar.search.shape import Shape
from autopar.units import counted

_SHARES = (1.0, 0.5, 0.25)  # of all stages' memory together, see [Note: memory of a stage]
_WIDER = (1.0, 2.0, 4.0, 8.0, math.inf)  # where not even all of it is enough
_WORTH = 0.995  # of the best time so far: what promises less than this gain is not searched for
_EXECUTED, _NEAR = 3, 1.15  # settings balanced by execution, of those within 15 % of the fastest
_EXECUTABLE = 1024  # stages times micro-batches: balancing executes a schedule hundreds of times
_MOST_MICRO_BATCHES = 16  # for each pipeline rank: the bubble of 1F1B is 6 % then


def search_pipeline(
    graph: Graph,
    request: Request,
    *,
    captured_micro_batches: int = 1,
    fingerprint: str = "",
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
    faster_than_seconds: float = math.inf,
) -> PipelineFound:
    """Finds the fastest plan with pipeline stages that fits into memory.

    Args:
        graph: the captured model with all its layers, at the size of a micro-batch.
        request: the question, with a mesh that has the axis `pp`. An open schedule is chosen among
            `SEARCHED_SCHEDULES`, open chunks among `searched_chunks`, an open number of micro-batches
            among the divisors of the batch; open recomputation is that of the fewest blocks that fit.
        captured_micro_batches: number of captured batches that make a step.
        fingerprint, fixed_storage: as in `search`.
        faster_than_seconds: seconds of a known step; settings that take as long are left out.

    Raises MeshError for a mesh without `pp`, RecipeError for a pin that cannot hold, PlanError for
    micro-batches that the schedule refuses, SearchError with more stages than blocks and where no plan
    fits, or none is faster than the known step.
    """
    if not request.has_stages:
        raise MeshError(
            f"The mesh {request.mesh} has no axis {PIPELINE_AXIS!r} for the stages of a pipeline."
        )
    found = _Search(
        graph, request, captured_micro_batches, fingerprint, fixed_storage, faster_than_seconds
    ).run()
    plan = replace(found.plan, recipe=format_recipe(request.recipe))
    return replace(found, best=replace(found.best, plan=plan))


class _Inner(NamedTuple):
    """A plan of a stage's mesh, and with which share of all stages' memory it was searched."""

    plan: Plan
    share: float


@dataclass(frozen=True)
class _Overfull:
    """A setting that does not fit: by how much, and the seconds it would take if it did."""

    excess_bytes: float
    seconds: float
    tables: StageTables
    setting: Setting


class _Search:
    """One search: a mesh, and all that is open on it."""

    def __init__(
        self, graph: Graph, request: Request, captured: int, fingerprint: str,
        fixed_storage: Mapping[str, ParameterPlan] | None, faster_than_seconds: float = math.inf,
    ) -> None:  # fmt: skip
        assert request.mesh is not None, "a mesh with stages"
        self.graph, self.request, self.captured = graph, request, captured
        self.mesh, self.hardware = request.mesh, request.hardware
        self.fingerprint, self.fixed_storage = fingerprint, fixed_storage
        self.known_seconds = faster_than_seconds
        bound = request.search_bound_bytes
        # Tables of stages know nothing of the memory that no tensor can have.
        self.bound: float = math.inf if bound is None else bound - self.hardware.reserved_bytes
        self.asked_micro_batches = request.chosen_micro_batches
        self.position = self.mesh.index(PIPELINE_AXIS)
        self.ranks = self.mesh.sizes[self.position]
        self.stage_mesh = without_pipeline(self.mesh)
        self.graphs: dict[int, Graph] = {}
        self.inside: dict[int, MeshSearch] = {}
        self.found: dict[str, Priced] = {}
        self.tables: dict[
            str, tuple[_Inner, StageTables]
        ] = {}  # that found settings were priced with
        self.refused: dict[str, AutoparError] = {}
        self.overfull: list[_Overfull] = []

    def run(self) -> PipelineFound:
        self._search_shares()
        if self.found:
            self._search_again()
        self._search_recipes()
        if not self.found:
            raise self._nothing()
        self._execute_nearest()
        ranked = sorted(self.found.values(), key=lambda each: each.key)
        refused = {
            name: str(error) for name, error in self.refused.items() if name not in self.found
        }
        best = replace(ranked[0], kept_whole=self._kept_whole(ranked[0]))
        notes = (*of_layouts(best.plan.notes), *notes_of(best, ranked[1:]))
        best = replace(best, plan=replace(best.plan, notes=notes))
        return PipelineFound(best, tuple(ranked[1:]), refused)

    def _search_shares(self) -> None:
        """Prices plans for less and less memory; see [Note: memory of a stage]."""
        seen = 0
        for share in self._shares():
            promised = min((each.seconds for each in self.overfull[seen:]), default=math.inf)
            if self.found and promised >= _WORTH * self._best_seconds():
                break
            seen = len(self.overfull)
            inside = self._inside(self.asked_micro_batches or self.captured)
            self._price_plan(self._stage_plan(share, inside))

    def _search_recipes(self) -> None:
        """Prices the plans of all recipes for the open axes, as far as one may be faster than what was found."""
        if not self.found and not self._may_hold_state():
            return
        inside = self._inside(self._best_micro_batches())
        for seconds, under in inside.named():
            if seconds < self.ranks * self._best_seconds():
                try:
                    inner = self._stage_plan(1.0, under)
                except (RecipeError, SearchError):
                    continue  # the recipe cannot hold here, or nothing under it fits
                self._price_plan(inner)

    def _price_plan(self, inner: _Inner | None) -> None:
        """Prices a plan of a stage's mesh with every number of micro-batches."""
        if inner is None:
            return
        for micro_batches in self._micro_batches():
            self._price_all(inner, micro_batches)

    def _shares(self) -> tuple[float, ...]:
        """Parts of all stages' memory to search under.

        On one rank the fastest plan comes first: recomputation may make room for it.
        """
        if not self._may_hold_state():
            return _SHARES[:1]
        may_recompute = self.request.recompute != "none" and math.isfinite(self.bound)
        return (math.inf, *_SHARES) if self.ranks == 1 and may_recompute else _SHARES

    def _may_hold_state(self) -> bool:
        """Whether parameters and what training keeps of them may fit; if not, no recomputation helps."""
        problem = self._inside(self.asked_micro_batches or self.captured).problem
        state_bytes = problem.least_state_bytes - self.hardware.reserved_bytes
        return state_bytes <= self.ranks * self.bound

    def _execute_nearest(self) -> None:
        """Balances the fastest settings that have several stages a rank anew, by what they really take."""
        ranked = sorted(self.found.items(), key=lambda pair: pair[1].key)
        near = [
            (name, each)
            for name, each in ranked
            if each.setting.shape.chunks > 1 and each.seconds <= _NEAR * ranked[0][1].seconds
            if each.setting.shape.stages * each.plan.micro_batches <= _EXECUTABLE
        ]
        for name, each in near[:_EXECUTED]:
            self._price(*self.tables[name], each.setting, executed=True)

    def _best_seconds(self) -> float:
        """Seconds of the fastest step that is known."""
        return min((each.seconds for each in self.found.values()), default=self.known_seconds)

    def _stage_plan(self, share: float, inside: MeshSearch) -> _Inner | None:
        """The plan of a stage's mesh; None where less than all of the memory is too little for any.

        Where all of it is too little, one of the smallest: layers that run again may still fit.
        """
        for wider in _WIDER if share == 1 else (1.0,):
            relaxed = self.ranks * self.bound * share * wider + self.hardware.reserved_bytes
            try:
                found = inside.within(int(relaxed) if math.isfinite(relaxed) else None)
                return _Inner(found.plan, share)
            except SearchError:
                if math.isinf(relaxed):
                    raise
        return None

    def _inside(self, micro_batches: int) -> MeshSearch:
        """The search on the mesh of one stage."""
        if micro_batches not in self.inside:
            self.inside[micro_batches] = MeshSearch.of(
                self._graph(micro_batches), self.stage_mesh, hardware=self.hardware,
                micro_batches=micro_batches, recipe=self.request.inside,
                pins=self.request.pins, fixed_storage=self.fixed_storage,
                fingerprint=self.fingerprint, software=self.request.software,
                training_state=self.request.training_state,
            )  # fmt: skip
        return self.inside[micro_batches]

    def _graph(self, micro_batches: int) -> Graph:
        if micro_batches == self.captured:
            return self.graph
        if micro_batches not in self.graphs:
            rows = captured_batch(self.graph) * self.captured
            if rows % micro_batches:
                raise SearchError(
                    f"A batch of {rows} cannot be divided into {micro_batches} micro-batches; give a number "
                    f"among {', '.join(map(str, _divisors(rows)))}."
                )
            self.graphs[micro_batches] = with_batch(self.graph, rows // micro_batches)
        return self.graphs[micro_batches]

    def _micro_batches(self) -> Sequence[int]:
        if self.asked_micro_batches is not None:
            return (self.asked_micro_batches,)
        rows = captured_batch(self.graph) * self.captured
        most = _MOST_MICRO_BATCHES * self.ranks
        return [m for m in _divisors(rows) if m <= max(most, self.captured)]

    def _price_all(self, inner: _Inner, micro_batches: int) -> None:
        graph, plan = self._graph(micro_batches), inner.plan
        if micro_batches != plan.micro_batches and not fits_graph(plan, graph):
            self._refuse(
                counted(micro_batches, "micro-batch"),
                SearchError(f"the mesh {self.stage_mesh} does not divide so small micro-batches"),
            )
            return
        own = inner._replace(plan=replace(plan, micro_batches=micro_batches))
        tables = StageTables(
            graph, own.plan, self.hardware, world=self.mesh,
            training_state=self.request.training_state, software=self.request.software,
        )  # fmt: skip
        frontier = Frontier(lambda: tables.selectable)
        for shape in shapes_of(self.request, self.ranks, micro_batches, len(tables.parts)):
            try:
                self._price_shape(own, tables, shape, frontier)
            except PlanError as error:  # a schedule that does not run so many micro-batches
                self._refuse(f"{shape.schedule}, {counted(micro_batches, 'micro-batch')}", error)

    def _price_shape(
        self, inner: _Inner, tables: StageTables, shape: Shape, frontier: Frontier[Memory]
    ) -> None:
        """A shape with the recomputation that is asked for, or with as little as fits."""
        wish = self.request.recompute
        if isinstance(wish, float):
            blocks = _fewest(tables, partial(self._is_within, wish, tables, shape))
            choices = () if tables.repetition.groups else (frontier.at(wish),)
            for recompute in (*choices, blocks):
                self._price(inner, tables, Setting(shape, recompute))
        elif wish is not None:
            self._price(inner, tables, Setting(shape, wish))
        elif not self.found or (
            self._affords(tables, shape, "none") and self._may_fit(tables, shape)
        ):
            missed = len(self.overfull)
            self._price(inner, tables, Setting(shape, "none"))
            if len(self.overfull) > missed:
                if not tables.repetition.groups:  # ops are named where all layers were captured
                    self._price_selection(inner, tables, shape, frontier)
                self._price_fewest(inner, tables, shape)

    def _may_fit(self, tables: StageTables, shape: Shape) -> bool:
        """Whether anything may fit: False where even the mean rank has too much.

        No recomputation keeps less than that of all blocks but one, or than that of all.
        """
        if math.isinf(self.bound):
            return True
        kinds: tuple[Recompute, ...] = ("none", "full", max(1, tables.repeating_blocks - 1))
        return any(mean_bytes(tables.at(each), shape) <= self.bound for each in kinds)

    def _price_selection(
        self, inner: _Inner, tables: StageTables, shape: Shape, frontier: Frontier[Memory]
    ) -> None:
        """The selection of ops with the largest memory that fits."""
        at = bisect.bisect_left(
            frontier.parts, True, key=lambda part: self._fits(tables, shape, frontier.at(part))
        )
        if at < len(frontier.parts):
            self._price(inner, tables, Setting(shape, frontier.at(frontier.parts[at])))

    def _affords(self, tables: StageTables, shape: Shape, recompute: Recompute) -> bool:
        """Whether ranks that never wait would be faster than what was found."""
        return self._least_seconds(tables.at(recompute), shape) < self._best_seconds()

    def _price_fewest(self, inner: _Inner, tables: StageTables, shape: Shape) -> None:
        """See [Note: fewest blocks]. Nothing is priced where the most that would still be faster does not fit."""
        if self.found and not self._fits(tables, shape, self._most(tables, shape)):
            return
        best = math.inf
        for again in _from(_fewest(tables, partial(self._fits, tables, shape)), tables):
            priced = self._price(inner, tables, Setting(shape, again))
            if shape.stages == 1 or priced is None or priced.seconds >= best:
                return
            best = priced.seconds

    def _most(self, tables: StageTables, shape: Shape) -> Recompute:
        """The most recomputed blocks of which ranks that never wait would be faster than what was found."""
        if self._affords(tables, shape, "full"):
            return "full"
        counts = range(1, tables.repeating_blocks)
        fewer = bisect.bisect_left(counts, True, key=lambda n: not self._affords(tables, shape, n))
        return fewer or "none"

    def _fits(self, tables: StageTables, shape: Shape, recompute: Recompute) -> bool:
        cuts = self._balanced(tables, Setting(shape, recompute))
        return cuts is not None and max(cuts.rank_bytes) <= self.bound

    def _is_within(
        self, part: float, tables: StageTables, shape: Shape, recompute: Recompute
    ) -> bool:
        """Whether every stage keeps at most a part of what recomputation can save; see `check_wish`."""
        cuts = self._balanced(tables, Setting(shape, recompute))
        if cuts is None:
            return False
        edges = itertools.pairwise((0, *cuts.cuts, len(tables.parts)))
        least, now, all_of_it = (
            tables.at(each).saved_bytes for each in ("full", recompute, "none")
        )
        return all(
            now[edge] - least[edge] <= part * (all_of_it[edge] - least[edge]) for edge in edges
        )

    def _balanced(
        self, tables: StageTables, setting: Setting, *, executed: bool = False
    ) -> Balance | None:
        """The cuts of a setting; None, with the reason noted, where it cannot be."""
        table = tables.at(setting.recompute)
        try:
            return least_overfull(table, setting.shape, memory_bytes=self.bound, executed=executed)
        except (PlanError, SearchError) as error:
            self._refuse(str(setting), error)
            return None

    def _price(
        self, inner: _Inner, tables: StageTables, setting: Setting, *, executed: bool = False
    ) -> Priced | None:
        """Balances and executes one setting, unless it cannot be better than what was found."""
        if not self._affords(tables, setting.shape, setting.recompute):
            return None
        cuts = self._balanced(tables, setting, executed=executed)
        if cuts is None:
            return None
        if max(cuts.rank_bytes) > self.bound:
            self.overfull.append(self._overfull(tables, setting, cuts))
            return None
        least = least_seconds(tables.at(setting.recompute), setting.shape, cuts.cuts)
        if least >= self._best_seconds():
            return None
        try:
            priced = self._priced(inner, tables, setting, cuts)
        except PlanError as error:
            self._refuse(str(setting), error)
            return None
        name = str(priced.setting)
        known = self.found.get(name)
        if known is None or priced.key < known.key:
            self.found[name], self.tables[name] = priced, (inner, tables)
        return priced

    def _priced(
        self, inner: _Inner, tables: StageTables, setting: Setting, cuts: Balance
    ) -> Priced:
        """A setting with its cuts, executed; blocks are named "full" where no stage has more."""
        table = tables.at(setting.recompute)
        run, seconds = self._executed(table, setting.shape, cuts)
        again = setting.recompute
        if isinstance(again, int) and again >= table.most_repeating(cuts.cuts):
            setting = replace(setting, recompute="full")
        plan = self._cut(replace(inner.plan, recompute=setting.recompute), table, setting, cuts)
        return Priced(setting, plan, seconds, run, cuts, inner.share)

    def _kept_whole(self, best: Priced) -> KeptWhole | None:
        """What the best plan would take if it recomputed nothing; None where it recomputes nothing."""
        if best.setting.recompute == "none":
            return None
        _, tables = self.tables[str(best.setting)]
        whole, shape = tables.at("none"), best.setting.shape
        held = balance_of(whole, shape, best.balance.cuts)
        _, quicker = self._executed(whole, shape, best.balance)
        return KeptWhole(quicker, max(held.rank_bytes))

    def _executed(self, table: StageTable, shape: Shape, cuts: Balance) -> tuple[Simulation, float]:
        """The schedule as it runs, and the seconds of a step."""
        lists, waits = actions(shape.blank, shape.micro_batches), waits_for_sends(shape.schedule)
        run = simulate(lists, table.stages(cuts.cuts), waits_for_sends=waits)
        return run, run.step_seconds + self._once_seconds(table, shape, cuts)

    def _overfull(self, tables: StageTables, setting: Setting, cuts: Balance) -> _Overfull:
        """What does not fit, with the time it would take if a rank had room for anything."""
        table, shape = tables.at(setting.recompute), setting.shape
        slowest = least_overfull(table, shape, memory_bytes=math.inf).seconds
        rest = float(table.forward_seconds[0, -1] + table.backward_seconds[0, -1]) - slowest
        seconds = shape.micro_batches * slowest + max(0.0, rest) / shape.chunks
        return _Overfull(max(cuts.rank_bytes) - self.bound, seconds, tables, setting)

    def _refuse(self, name: str, error: AutoparError) -> None:
        self.refused.setdefault(name, error)

    @staticmethod
    def _least_seconds(table: StageTable, shape: Shape) -> float:
        """Seconds of a step in which no rank ever waits: of equal ranks, and of one with the largest block."""
        whole = float(table.forward_seconds[0, -1] + table.backward_seconds[0, -1])
        blocks = (
            float(table.forward_seconds[i, i + 1] + table.backward_seconds[i, i + 1])
            for i in range(table.blocks)
        )
        return shape.micro_batches * max(whole / shape.ranks, *blocks)

    def _once_seconds(self, table: StageTable, shape: Shape, cuts: Balance) -> float:
        """What the slowest rank does once a step, all its stages together."""
        edges = [0, *cuts.cuts, table.blocks]
        ranks = [0.0] * shape.ranks
        for stage in range(shape.stages):
            rank = shape.blank.rank_of(stage)
            ranks[rank] += float(table.once_seconds[edges[stage], edges[stage + 1]])
        return max(ranks) + self.request.software.step_seconds

    def _cut(self, plan: Plan, table: StageTable, setting: Setting, cuts: Balance) -> Plan:
        names = [table.starts[block] for block in cuts.cuts]
        return replace(plan, pipeline=setting.shape.cut(names, self.position))

    def _best_micro_batches(self) -> int:
        """The number of micro-batches of the best plan so far; the captured one where nothing is found."""
        if not self.found:
            return self.asked_micro_batches or self.captured
        best = min(self.found.values(), key=lambda each: each.key)
        return best.setting.shape.micro_batches

    def _search_again(self) -> None:
        """Prices the best number of micro-batches with a plan made for them."""
        best = min(self.found.values(), key=lambda each: each.key)
        m = best.setting.shape.micro_batches
        if m != (self.asked_micro_batches or self.captured):
            inner = self._stage_plan(best.share, self._inside(m))
            if inner is not None:
                self._price_all(inner, m)

    def _nothing(self) -> AutoparError:
        """Why no setting has a plan: the one that misses by least, or what was refused first."""
        if math.isfinite(self.known_seconds):
            return SearchError(
                f"No plan on the mesh {self.mesh} is faster than {self.known_seconds:.6g} s."
            )
        if self.overfull:
            least = min(self.overfull, key=lambda each: each.excess_bytes)
            try:
                table = least.tables.at(least.setting.recompute)
                balance(table, least.setting.shape, memory_bytes=self.bound)
            except SearchError as error:
                return error
        if not self.refused:
            return SearchError(
                f"No schedule that is searched runs chunks={self.request.chunks} on "
                f"{counted(self.ranks, 'pipeline rank')}; name a schedule, or leave chunks out."
            )
        first = next(iter(self.refused.values()))
        if len({str(error) for error in self.refused.values()}) == 1:
            return first
        lines = [f"{name}: {error}" for name, error in self.refused.items()]
        return type(first)("\n".join([f"No pipeline on the mesh {self.mesh} has a plan.", *lines]))


def _fewest(tables: StageTables, is_enough: Callable[[Recompute], bool]) -> Recompute:
    """The fewest blocks that are enough; "full" is all of them, and taken where no fewer are.

    Bisected without "full", which may take a little more memory than all blocks but one: the last then
    runs again beside what entered all.
    """
    counts = range(1, tables.repeating_blocks)
    at = bisect.bisect_left(counts, True, key=is_enough)
    return counts[at] if at < len(counts) else "full"


def _from(fewest: Recompute, tables: StageTables) -> Iterator[Recompute]:
    """This many blocks that run again, and more, up to all."""
    if isinstance(fewest, int):
        yield from range(fewest, tables.repeating_blocks)
    yield "full"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
