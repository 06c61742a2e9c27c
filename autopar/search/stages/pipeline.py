"""The search for a pipeline on a given mesh: chunks, schedule, cuts, micro-batches and recomputation.

    for several plans of layouts                       `autopar.search.exact.search`, on the mesh of one stage
        for every number of micro-batches              compute tables of the costs of all possible stages
            for every schedule and number of chunks
                with as few recomputed blocks as fit   balance the cuts, simulate the schedule

The fastest setting that fits wins; of equally fast ones, the one that takes less memory. A setting that would be too
slow even if its ranks never waited is not simulated. The layouts are searched for the whole model on the mesh of
one stage, so that they do not depend on the cuts.

[Note: memory of a stage] The search of layouts knows no stages: it predicts the memory of the whole model with one
micro-batch. With p pipeline ranks, a rank holds about 1/p of the parameters, and of the activations of each
micro-batch in flight. The search of layouts is therefore bounded by p times the memory of a rank. If no stages then
fit, or if stages that do not fit would be faster than those that do, a half and a quarter of this bound are tried,
too; they lead to plans that shard more.

[Note: room by recomputation] The search of layouts keeps every activation. Recomputing blocks frees memory, in which
faster layouts fit, and parameters that the host would otherwise store. The best plan recomputes all blocks, none, or
some. With all blocks, the best layouts are the fastest ones within the memory of a rank plus the memory that all blocks
free. With some blocks, recomputing one block more or less exchanges seconds for bytes at a certain rate. The best
layouts are then those with the least sum of seconds and of bytes at this rate (a Lagrange multiplier: Everett
1963), whatever the memory of a rank is. Because parameters have fixed sizes, this is not exact, and the memory that
one block frees is tried as well.

[Note: other micro-batches] The graph is captured for one number of micro-batches. For other numbers, the same graph is
priced with another batch size (`autopar.ir.batches.with_batch`), with the same plan if its splits still divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from autopar.cost_model.machines.kinds import stage_machines, together
from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, SearchError
from autopar.ir import PIPELINE_AXIS, Plan, pipeline_position, without_pipeline
from autopar.ir.batches import fits_graph
from autopar.ir.note import without_prices
from autopar.pipeline.stage_costs import StageTables
from autopar.search.exact.search import MeshSearch
from autopar.search.request.recipes import format_recipe
from autopar.search.stages.balance import refusal
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline_bounds import mean_bytes
from autopar.search.stages.pipeline_settings import LEAN, PipelineFound, divisors, notes_of, shapes_of, wish_for
from autopar.search.stages.staged import Findings, SlowerError, StagedPlan
from autopar.units import counted

_SHARES = (1.0, 0.5, 0.25)  # of the memory of all ranks, see [Note: memory of a stage]
_WIDER = (1.0, 2.0, 4.0, 8.0, math.inf)  # multiples of this memory to try if no plan fits into it
_WORTH = 0.995  # another search must promise a step of less than this part of the best one
_EXECUTED, _NEAR = 3, 1.15  # settings always balanced by simulation, within 15 % of the fastest
# Limit on the work of balancing further settings by simulation, as the sum of (stages)^2 times micro-batches: balancing
# simulates all stages and micro-batches several times for each stage, and this limit takes one to three seconds.
_EXECUTED_WORK = 2**17
_EXECUTABLE = 1024  # stages times micro-batches: balancing simulates a schedule hundreds of times
_MOST_MICRO_BATCHES = 16  # for each pipeline rank: the bubble of 1F1B is 6 % then


def search_pipeline(case: Case, faster_than_seconds: float = math.inf) -> PipelineFound:
    """Finds the fastest plan with pipeline stages that fits into memory.

    Args:
        case: the model, with a request that has the axis `pp` in its mesh. What the user leaves open is searched: the
            schedule among those of `shapes_of`, the chunks among `searched_chunks`, the number of micro-batches among
            the divisors of the batch, and the recomputation of as few blocks as fit.
        faster_than_seconds: seconds of a known step; settings that take as long are left out.

    Raises MeshError for a mesh without `pp`, RecipeError for a pin that cannot be satisfied, PlanError for
    micro-batches that the schedule refuses, and SearchError if there are more stages than blocks, if no plan
    fits, or if none is faster than the known step.
    """
    request = case.request
    if not request.has_stages:
        raise MeshError(f"The mesh {request.mesh} has no axis {PIPELINE_AXIS!r} for the stages of a pipeline.")
    found = _Search(case, faster_than_seconds).run()
    plan = replace(found.plan, recipe=format_recipe(request.recipe))
    return replace(found, best=replace(found.best, plan=plan))


class _Inner(NamedTuple):
    """A plan of layouts on the mesh of one stage.

    Attributes:
        plan: the plan, without stages.
        share: bound under which the plan was searched, as a part of the memory of all pipeline ranks.
    """

    plan: Plan
    share: float


class _Freed(NamedTuple):
    """The memory of a rank that recomputation frees, and what it costs.

    Attributes:
        all_bytes: bytes that are free if all blocks are recomputed.
        one_bytes: bytes that are free if one block is recomputed.
        byte_seconds: seconds of a step that one block takes, for each byte that it frees on all pipeline ranks.
    """

    all_bytes: float
    one_bytes: float
    byte_seconds: float


class _Search:
    """The search of `search_pipeline`, with its intermediate results."""

    def __init__(self, case: Case, faster_than_seconds: float) -> None:
        self.case, self.request, request = case, case.request, case.request
        assert request.mesh is not None, "a mesh with stages"
        self.mesh = request.mesh
        # Layouts are searched on what the machines of all stages reach together, which bounds what stages take.
        machines = stage_machines(request.hardware, self.mesh)
        self.hardware, self.is_of_kinds = together(machines), any(each != machines[0] for each in machines)
        self.recompute = "none" if request.has_lone_ops else request.recompute
        bound = request.search_bound_bytes
        # Tables of stages leave out the memory that tensors cannot use.
        self.bound: float = math.inf if bound is None else bound - self.hardware.reserved_bytes
        self.found = Findings(self.bound, faster_than_seconds)
        self.asked_micro_batches = request.chosen_micro_batches
        self.captured = self.asked_micro_batches or case.captured  # of the first searches
        self.position = pipeline_position(self.mesh)
        self.ranks = dict(self.mesh.axes)[PIPELINE_AXIS]
        self.stage_mesh = without_pipeline(self.mesh)
        self.choices: list[Plan] = []
        self.tables: dict[int, tuple[Plan, StageTables]] = {}

    def run(self) -> PipelineFound:
        self._search_shares()
        if self.request.offload:
            self._price_smallest(self._inside(self.captured))
        if self.found:
            self._search_again()
        self._search_recipes()
        if not self.found:
            raise self._nothing()
        self._execute_nearest()
        (best, staged), *rest = self.found.ranked
        others = tuple(each for each, _ in rest)
        notes = *without_prices(best.plan.notes), *notes_of(best, staged.without_recomputation(best), others)
        best = replace(best, plan=replace(best.plan, notes=notes))
        return PipelineFound(best, others)

    def _search_shares(self) -> None:
        """Searches plans under smaller and smaller bounds, and prices them; see [Note: memory of a stage]."""
        seen = 0
        for plans in self._plans():
            new = [each for each in plans if each is None or self._is_new(each)]
            if new:
                seen = len(self.found.overfull)
            for each in new:
                self._price_plan(each)
            has_price = bool(self.found) or self.found.has_slower
            if has_price and not self._promises_more(seen):
                break  # tighter bounds give slower layouts

    def _promises_more(self, seen: int) -> bool:
        """Whether a setting that did not fit promises a faster step than the best; the first `seen` do not count."""
        limit_seconds = _WORTH * self.found.best_seconds
        return any(each.seconds < limit_seconds for each in self.found.overfull[seen:])

    def _search_recipes(self) -> None:
        """Prices the plans under all recipes for axes without one, if they may be faster than the best setting."""
        inside = self._inside(self._best_micro_batches())
        if not self._may_hold_state(inside):
            return
        for seconds, under in inside.named():
            # A recipe may contradict the pins, or split nothing, and then no plan is one under it.
            with suppress(RecipeError, SearchError):
                limit_seconds = self.ranks * self.found.best_seconds
                if seconds < limit_seconds and self._may_hold_state(under) and under.flat_seconds < limit_seconds:
                    self._price_under(under)

    def _price_under(self, recipe: MeshSearch) -> None:
        """Prices the fastest plan of layouts under a recipe, and the smallest where the host may have to help.

        Raises RecipeError or SearchError where the recipe has no plan.
        """
        inner = self._stage_plan(1.0, recipe)
        if inner is not None and self._is_new(inner):
            self._price_plan(inner)
        has_none = math.isinf(self.found.best_seconds)
        if self.request.streams or (self.request.offload and has_none):
            self._price_smallest(recipe)

    def _price_smallest(self, inside: MeshSearch) -> None:
        """Prices the plan of layouts that takes least memory."""
        smallest = _Inner(inside.smallest().plan, 0.0)
        if self._is_new(smallest):
            self._price_plan(smallest)

    def _price_plan(self, inner: _Inner | None) -> None:
        """Prices a plan of layouts with every number of micro-batches."""
        if inner is None:
            return
        for micro_batches in self._micro_batches():
            self._price_all(inner, micro_batches)

    def _is_new(self, inner: _Inner) -> bool:
        """Whether no plan with the same choices was priced yet; remembers this plan."""
        choices = replace(inner.plan, notes=(), recipe="")
        if choices in self.choices:
            return False
        self.choices.append(choices)
        return True

    def _shares(self, inside: MeshSearch) -> tuple[float, ...]:
        """Bounds under which layouts are searched, as parts of the memory of all pipeline ranks.

        On one pipeline rank, or if the host may store parameters, the first search has no bound, because recomputation
        may make room for the fastest plan. A bound of the memory that tensors cannot use leaves nothing to share.
        """
        if self.bound <= 0 or (not self.request.offload and not self._may_hold_state(inside)):
            return _SHARES[:1]
        may_recompute = self.recompute != "none" and math.isfinite(self.bound)
        is_first = self.request.offload or (self.ranks == 1 and may_recompute)
        return (math.inf, *_SHARES) if is_first else _SHARES

    def _plans(self) -> Iterator[Iterable[_Inner | None]]:
        """Plans of layouts under smaller and smaller bounds; None for a bound under which none fits.

        Plans that are yielded together are all priced before it is decided whether others are worth a search. Those
        that fit as they are belong to those that fit beside recomputation, since either may be the faster.
        """
        inside = self._inside(self.captured)
        shares = self._shares(inside)
        if math.isinf(shares[0]) and math.isfinite(self.bound):
            yield [self._stage_plan(shares[0], inside)]
            yield [*self._beside_recomputation(inside), self._stage_plan(shares[1], inside)]
            shares = shares[2:]
        for share in shares:
            yield [self._stage_plan(share, inside)]

    def _beside_recomputation(self, inside: MeshSearch) -> Iterator[_Inner | None]:
        """Plans of layouts that use the memory that recomputation frees; see [Note: room by recomputation]."""
        freed = self._freed(inside)
        if freed is None:
            return
        for freed_bytes in (freed.all_bytes, freed.one_bytes):
            yield self._stage_plan(1.0 + freed_bytes / self.bound, inside)
        found = inside.at_price(freed.byte_seconds)
        taken_bytes = found.cost.memory_bytes - self.hardware.reserved_bytes
        yield _Inner(found.plan, taken_bytes / (self.ranks * self.bound))

    def _freed(self, inside: MeshSearch) -> _Freed | None:
        """The memory that recomputation frees under the fastest layouts; None if it frees nothing, or is ruled out."""
        fastest, micro_batches = inside.within(None).plan, inside.problem.micro_batches
        tables = self._tables(fastest, micro_batches)
        shape = next(shapes_of(self.request, self.ranks, micro_batches, len(tables.parts)), None)
        if shape is None or self.recompute == "none":
            return None
        whole, one, every = (tables.whole(each) for each in ("none", 1, "full"))
        try:
            shape.check(len(tables.parts))
            kept_bytes, *less = (mean_bytes(each, shape) for each in (whole, one, every))
        except (PlanError, SearchError):
            return None  # the schedule does not run so many micro-batches, or has too many stages
        one_frees, all_free = (kept_bytes - each for each in less)
        if one_frees <= 0:
            return None
        seconds = micro_batches * (one.seconds - whole.seconds)
        return _Freed(all_free, one_frees, seconds / (self.ranks * one_frees))

    def _may_hold_state(self, inside: MeshSearch) -> bool:
        """Whether parameters, gradients and optimizer states may fit; if not, no recomputation helps."""
        state_bytes = inside.problem.least_state_bytes - self.hardware.reserved_bytes
        return state_bytes <= self.ranks * self.bound

    def _execute_nearest(self) -> None:
        """Balances the fastest settings with several stages per rank, or several kinds of machines, by their schedules.

        It may make a setting 15 % faster, so that all near ones are balanced where that takes little.
        """
        ranked = self.found.ranked
        near = [
            (each, staged)
            for each, staged in ranked
            if (each.setting.shape.chunks > 1 or self.is_of_kinds) and each.seconds <= _NEAR * ranked[0][0].seconds
            if each.setting.shape.stages * each.plan.micro_batches <= _EXECUTABLE
        ]
        work = 0
        for number, (each, staged) in enumerate(near):
            work += each.setting.shape.stages**2 * each.plan.micro_batches
            if number >= _EXECUTED and work > _EXECUTED_WORK:
                break
            staged.price(each.setting, executed=True)

    def _stage_plan(self, share: float, inside: MeshSearch) -> _Inner | None:
        """The fastest plan of layouts under a bound; None if no plan fits, or none promises a faster step.

        If none fits under the memory of all pipeline ranks (`share` 1), the bound is widened until one does, because it
        may fit with recomputation.
        """
        for wider in _WIDER if share == 1 else (1.0,):
            relaxed = self.ranks * self.bound * share * wider + self.hardware.reserved_bytes
            bound = int(relaxed) if math.isfinite(relaxed) else None
            if bound is not None and inside.exceeds(bound):
                continue
            if bound is not None and self._has_only_slower(inside, bound):
                self.found.has_slower = True
                return None
            try:
                return _Inner(inside.within(bound).plan, share)
            except SearchError:
                if math.isinf(relaxed):
                    raise
        return None

    def _has_only_slower(self, inside: MeshSearch, bound: int) -> bool:
        """Whether all layouts within a bound take as long as the best step, even if every rank is always busy.

        Recomputation only adds to their seconds. Layouts for another number of micro-batches have other bounds.
        """
        if self.asked_micro_batches is None or self.request.is_priced_again:
            return False
        return inside.has_only_slower(bound, self.ranks * self.found.best_seconds)

    def _inside(self, micro_batches: int) -> MeshSearch:
        """The search on the mesh of one stage."""
        case = self.case.at(micro_batches)
        return case.layouts(self.stage_mesh, self.request.inside, self.hardware, micro_batches)

    def _micro_batches(self) -> Sequence[int]:
        if self.asked_micro_batches is not None:
            return (self.asked_micro_batches,)
        most = max(_MOST_MICRO_BATCHES * self.ranks, self.captured)
        return [m for m in divisors(self.case.rows) if m <= most]

    def _price_all(self, inner: _Inner, micro_batches: int) -> None:
        """Prices a plan of layouts with every schedule and number of chunks; with `LEAN` where others do not fit."""
        plan = inner.plan
        if micro_batches != plan.micro_batches and not fits_graph(plan, self.case.at(micro_batches).graph):
            self.found.refuse(
                counted(micro_batches, "micro-batch"),
                SearchError(f"the mesh {self.stage_mesh} does not divide micro-batches that small"),
            )
            return
        tables = self._tables(plan, micro_batches)
        fixed_seconds = self.request.software.step_seconds + self.request.hardware.step_seconds
        staged = StagedPlan(tables, inner.share, fixed_seconds, self.found)
        staged.check_wish(self.recompute)
        fitted = len(self.found.overfull)
        for shape in shapes_of(self.request, self.ranks, micro_batches, len(tables.parts)):
            if shape.schedule in LEAN and len(self.found.overfull) == fitted and not self.request.chosen_schedule:
                continue
            name = f"{shape.schedule}, {counted(micro_batches, 'micro-batch')}"
            try:
                shape.check(len(tables.parts))
            except SearchError as error:
                self.found.refuse(name, error)
                continue
            try:
                staged.price_shape(shape, wish_for(self.request, shape, self.recompute))
            except PlanError as error:  # a schedule that does not run so many micro-batches
                self.found.refuse(name, error)

    def _tables(self, plan: Plan, micro_batches: int) -> StageTables:
        """The costs of all possible stages of a plan, with a number of micro-batches; the last ones are kept.

        The fastest layouts are priced, and tell what recomputation frees, one after the other.
        """
        known, tables = self.tables.get(micro_batches, (None, None))
        if tables is None or known is not plan:
            tables = StageTables(
                self.case.at(micro_batches).graph,
                replace(plan, micro_batches=micro_batches),
                self.request.hardware,
                world=self.mesh,
                training_state=self.request.training_state,
                software=self.request.software,
            )
            self.tables[micro_batches] = plan, tables
        return tables

    def _best_micro_batches(self) -> int:
        """The number of micro-batches of the best plan so far; the captured one where nothing is found."""
        if not self.found:
            return self.captured
        return self.found.ranked[0][0].setting.shape.micro_batches

    def _search_again(self) -> None:
        """Searches layouts for the best number of micro-batches, and prices them."""
        best, staged = self.found.ranked[0]
        m = best.setting.shape.micro_batches
        if m != self.captured:
            inner = self._stage_plan(staged.share, self._inside(m))
            if inner is not None:
                self._price_all(inner, m)

    def _nothing(self) -> AutoparError:
        """The error if no setting has a plan: about the setting that exceeds memory least, or the first one refused."""
        found = self.found
        if found.has_slower:
            return SlowerError(f"No plan on the mesh {self.mesh} is faster than {found.known_seconds:.6g} s.")
        if found.overfull:
            least = min(found.overfull, key=lambda each: each.excess_bytes)
            reserved_bytes = self.request.hardware.reserved_bytes
            return refusal(least.table, least.shape, memory_bytes=self.bound, reserved_bytes=reserved_bytes)
        if not found.refused:
            return SearchError(
                f"No schedule that is searched runs chunks={self.request.chunks} on "
                f"{counted(self.ranks, 'pipeline rank')}; name a schedule, or leave chunks out."
            )
        first = next(iter(found.refused.values()))
        if len({str(error) for error in found.refused.values()}) == 1:
            return first
        lines = [f"{name}: {error}" for name, error in found.refused.items()]
        return type(first)("\n".join([f"No pipeline on the mesh {self.mesh} has a plan.", *lines]))
