"""The plan for a given mesh, with or without pipeline stages, and with recomputation if it is needed or faster."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autopar.errors import MemoryBoundError, MeshError, PlanError, RecipeError, SearchError, StateError, both
from autopar.ir import Graph, Plan, Tier, with_pipeline
from autopar.ir.note import without_prices
from autopar.ir.recompute import SAVED_TIERS, Recompute, RecomputeOption, is_saved_option
from autopar.ir.saved import words_of_saved
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.composed import Composed, composed
from autopar.pipeline.parts import is_whole
from autopar.pipeline.saved_values import SavedValues
from autopar.search.exact.least_memory import least_bytes
from autopar.search.exact.search import Found, MeshSearch
from autopar.search.request.recipes import is_open, resolve
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.dims import starts, words_of_dims
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_settings import Priced
from autopar.search.stages.staged import SlowerError
from autopar.units import format_bytes

_NEARER = 4  # searches for parameters beside activations on the host


class Planned(NamedTuple):
    """A plan with its price.

    Attributes:
        plan: the plan.
        graph: the model, at the size of one of the plan's micro-batches.
        price: time and memory of a step under the plan.
        others: other schedules, micro-batches and recomputation on the same mesh, fastest first.
        is_tight: whether a bound on memory may have ruled out a faster plan.
    """

    plan: Plan
    graph: Graph
    price: Composed
    others: tuple[Priced, ...] = ()
    is_tight: bool = True

    @property
    def key(self) -> tuple[float, float]:
        """Sort key, smaller is better: seconds to nine digits, then bytes."""
        return float(f"{self.price.step_seconds:.9g}"), self.price.peak_bytes

    def noted(self, note: str) -> Planned:
        """The same plan with one more note."""
        return self._replace(plan=replace(self.plan, notes=(*self.plan.notes, note)))

    def priced(self, plan: Plan, price: Composed) -> Planned:
        """A change of this plan with its own price, and without the notes on the price before."""
        return self._replace(plan=replace(plan, notes=without_prices(plan.notes)), price=price)


@dataclass(frozen=True)
class GivenMesh:
    """A search for the plan of one given mesh, with or without pipeline stages.

    Attributes:
        case: the model with the request, which has the mesh.
        faster_than_seconds: duration of a known step. With stages only a shorter one counts; without them a longer one
            is not searched where it is known to be.
    """

    case: Case
    faster_than_seconds: float = math.inf

    @property
    def request(self) -> Request:
        """What the user asks for."""
        return self.case.request

    @property
    def graph(self) -> Graph:
        """The model, at the size of one captured batch."""
        return self.case.graph

    def search(self) -> Planned:
        """The fastest plan that fits. Raises MeshError, RecipeError, PlanError or SearchError for none."""
        try:
            found = self._search()
        except SearchError:
            is_open = self.case.fixed_storage is None and self.request.recompute in (None, "none", "full")
            sliced = self._that_fit_in_slices() if is_open and self._is_sliced else []
            if not sliced:
                raise
            return min(sliced, key=lambda each: each.key)
        if is_saved_option(self.request.recompute) or not self._is_sliced or found.plan.saved:
            return found
        return self._sliced(found)

    @property
    def cannot_fit(self) -> bool:
        """Whether it is known without a search that no plan without pipeline stages fits, whatever it recomputes."""
        request, bound = self.request, self.request.search_bound_bytes
        is_free = self.case.fixed_storage is None and not request.has_lone_ops
        if bound is None or request.has_stages or not is_free or not is_open(request.recipe):
            return False
        if not has_blocks(self.graph):
            return self._layouts.exceeds(bound)
        may_offload = bool(request.offload) and is_whole(self.graph)  # else they have no names
        may_offload = may_offload or request.recompute == "offloaded"
        return least_bytes(self._layouts.problem, may_offload=may_offload) > bound

    @property
    def flat_seconds(self) -> float:
        """Seconds of the fastest step without pipeline stages, recomputation and a bound on memory."""
        return self._but(must_fit=False)._flat().cost.seconds

    @property
    def _is_sliced(self) -> bool:
        """Whether a recipe asks for slices of a plan's saved activations, and the plan can have them."""
        request = self.request
        whole = not request.has_stages and is_whole(self.graph)
        if request.mesh is None or not whole or request.has_lone_ops:
            return False
        return any(row.saves_slices for row in resolve(request.inside, request.mesh))

    def _search(self) -> Planned:
        request = self.request
        if is_saved_option(request.recompute):
            return self._partitioned(SAVED_TIERS[request.recompute])
        if request.has_stages:
            return self._staged(request)
        if self.case.fixed_storage is None:
            _refuse_no_blocks(self.graph, request.recompute)
        is_fixed = self.case.fixed_storage is not None or request.has_lone_ops
        if is_fixed or not has_blocks(self.graph):
            return self._kept(self._flat())
        if request.recompute == "none":
            return self._that_keeps()
        return self._that_fits() if request.recompute is None else self._recomputing()

    def _flat(self) -> Found:
        """The plan without pipeline stages and without recomputation."""
        return self._layouts.within(self.request.search_bound_bytes)

    @property
    def _layouts(self) -> MeshSearch:
        """The search of layouts without pipeline stages."""
        request = self.request
        assert request.mesh is not None, "a mesh was given"
        return self.case.layouts(request.mesh, request.recipe, request.hardware, request.micro_batches or 1)

    def _kept(self, flat: Found) -> Planned:
        """A plan without recomputation, with its time and memory."""
        return Planned(flat.plan, self.graph, flat.cost.price, is_tight=flat.is_tight)

    def _priced(self, plan: Plan) -> Planned:
        """A plan without stages, with the time and memory of its step."""
        request = self.request
        price = composed(self.graph, plan, **request.figures)
        return Planned(plan, self.graph, price)

    def _staged(self, request: Request) -> Planned:
        """The plan with pipeline stages."""
        found = search_pipeline(replace(self.case, request=request), self.faster_than_seconds)
        best, graph = found.best, self.case.at(found.plan.micro_batches).graph
        peak_bytes = max(best.simulation.peak_bytes) + request.hardware.reserved_bytes
        return Planned(found.plan, graph, Composed(best.seconds, peak_bytes), found.others)

    def _recomputing(self) -> Planned:
        """A plan without stages but with recomputation, searched as a pipeline of a single rank under 1F1B."""
        request = self.request
        assert request.mesh is not None, "a mesh was given"
        whole = request.but(
            mesh=with_pipeline(request.mesh, 1, 0), schedule="1f1b", micro_batches=request.micro_batches or 1
        )
        return self._priced(replace(self._staged(whole).plan, pipeline=None))

    def _but(self, **changes: Any) -> GivenMesh:
        """The same search with some of the request changed."""
        return replace(self, case=self.case.but(**changes))

    def _partitioned(self, tier: Tier) -> Planned:
        """The fastest plan found that recomputes all blocks and saves their inputs in slices of a tier.

        Layouts are searched under the bound, without one, and (if the host may store) with the room that the slices
        make; the slices may make each of them fit.
        """
        errors, found = list[SearchError](), list[Planned]()
        for must_fit in (True, False):
            try:
                whole = self._but(recompute="full", must_fit=must_fit)._search()
                found.append(self._sliced(whole, tier))
            except SearchError as error:
                errors.append(error)
        if tier == "host" and self.request.offload:
            found += self._that_fit_beside_activations()
        if self.request.must_fit:
            bound = self.request.bound_bytes
            found = [each for each in found if each.price.peak_bytes <= bound]
        if not found:
            raise errors[0]
        return min(found, key=lambda each: each.key)

    def _sliced(self, found: Planned, tier: Tier = "device") -> Planned:
        """The plan with slices in place of the replicated activations that its blocks save.

        Each rank saves a slice along the axes that replicate them, and moves it to a tier until backward: P_a and
        P_a+cpu of ZeRO-R (Rajbhandari et al. 2020, section 6.1). The price has the all-gathers in backward, the copies
        and the saved memory. Raises PlanError if only some of the model's layers were captured, because then the others
        have no names, and AutoparError if the machine has no figures of the tier.
        """
        graph, plan = found.graph, found.plan
        if not is_whole(graph):
            raise PlanError(
                f"recompute={self.request.recompute!r} needs the inputs of every layer, but only a few layers of this "
                "model were captured, as for every preset and config.json. Give the model itself (on the command line "
                "a function that returns it, package.module:function), or ask for recompute='full'."
            )
        sliced = replace(plan, saved=SavedValues(graph, plan).partitioned(tier))
        whole, price = (composed(graph, each, **self.request.figures) for each in (plan, sliced))
        less = format_bytes(max(0, round(whole.peak_bytes - price.peak_bytes)))
        slower = 1e3 * (price.step_seconds - whole.step_seconds)
        says = (
            f"{words_of_saved(sliced.saved, plan.mesh)}: {less} less on the fullest rank for {slower:.3f} ms more a "
            "step"
            if sliced.saved
            else "the inputs of a block are kept in their layout: no axis that replicates them could split them"
        )
        return found.priced(sliced, price).noted(says)

    def _that_fit_in_slices(self) -> list[Planned]:
        """The fastest plan without a bound, with slices and with no or all blocks recomputed, if it then fits.

        Slices lie on the device or, where the request lets the host store, in its memory.
        """
        if not is_whole(self.graph):
            return []
        plan = self._but(must_fit=False)._flat().plan
        every: tuple[Recompute, ...] = ("none", "full")
        words = [word for word in every if self.request.recompute in (None, word)]
        plans = [self._priced(replace(plan, recompute=word)) for word in words]
        tiers: tuple[Tier, ...] = ("device", "host") if self.request.offload else ("device",)
        found = [self._sliced(each, tier) for each in plans for tier in tiers]
        bound = self.request.bound_bytes
        return [each for each in found if each.plan.saved and each.price.peak_bytes <= bound]

    def _that_fit_beside_activations(self) -> list[Planned]:
        """The plan that keeps the inputs of recomputed blocks on the host, and also parameters, if it then fits.

        Parameters are placed as if the device had the memory that these inputs leave. What they leave differs between
        layouts, and tables of stages overstate the memory of a step a little: the room is made smaller where the plan
        does not fit, and larger where there is none.
        """
        bound = self.request.bound_bytes
        if bound <= self.request.hardware.reserved_bytes:
            return []
        whole = self._but(recompute="full", must_fit=False, offload=False)._search()
        room = int(whole.price.peak_bytes - self._sliced(whole, "host").price.peak_bytes)
        has_shrunk = False
        for _ in range(_NEARER):
            try:
                near = self._but(recompute="full", memory_bytes=bound + room)._search()
            except SearchError:
                if has_shrunk:
                    return []
                room += bound // 16
                continue
            found = self._sliced(near, "host")
            missing = math.ceil(found.price.peak_bytes - bound)
            if missing <= 0:
                return [found]
            room, has_shrunk = room - missing, True
        return []

    def _that_keeps(self) -> Planned:
        """The fastest plan that fits without recomputation."""
        try:
            flat = self._flat()
        except SearchError as error:
            found = [] if isinstance(error, StateError) else self._in_dims(None)
            if not found:
                raise
        else:
            found = [self._kept(flat)]
            found += self._in_dims(found[0].price.step_seconds) if flat.is_tight else []
        return min(found, key=lambda each: each.key)

    def _in_dims(self, best_seconds: float | None) -> list[Planned]:
        """Plans in two or three dims (`autopar.search.stages.dims`) that fit and promise less than a known plan.

        Args:
            best_seconds: seconds of the fastest plan that fits so far; None without one.
        """
        mesh, request = self.request.mesh, self.request
        if mesh is None or not request.must_fit or not is_whole(self.graph):
            return []
        named = dict(zip(mesh.names, (row.name for row in resolve(request.inside, mesh)), strict=True))
        found = list[Planned]()
        for recipe in starts(named, mesh):
            best = min([math.inf if best_seconds is None else best_seconds, *(e.price.step_seconds for e in found)])
            under = self._but(recipe=recipe)
            try:
                if under.flat_seconds < best:
                    made = under.search()
                    note = words_of_dims(made.plan, best_seconds, made.price.step_seconds)
                    found.append(made.noted(note))
            except (MeshError, PlanError, RecipeError, SearchError):
                continue  # the recipe splits nothing along an axis, or contradicts a pin
        return found

    def _that_fits(self) -> Planned:
        """The fastest plan that fits: without recomputation, with recomputed blocks, or with activations saved in
        slices or on the host.

        The latter two are searched only if the fastest plan does not fit into memory. Raises SlowerError where plans
        fit, but none is faster than the known step.
        """
        found, keeps_slower = list[Planned](), self._keeps_slower
        again: SearchError | None = None
        if keeps_slower:
            again = SlowerError(
                f"No plan on the mesh {self.request.mesh} is faster than {self.faster_than_seconds:.6g} s."
            )
        elif self._may_keep_all:
            with suppress(SearchError):
                flat = self._flat()
                found.append(self._kept(flat))
                if not flat.is_tight:
                    return found[0]
        try:
            found.append(self._recomputing())
        except SearchError as error:
            again = again or error
        if self._may_hold_state:
            found += self._that_fit_in_slices()
            known = self.faster_than_seconds if keeps_slower else None
            found += self._in_dims(min((each.price.step_seconds for each in found), default=known))
        may_move = not keeps_slower and self.request.offload and is_whole(self.graph)
        if not found and may_move:
            found += self._that_fit_beside_activations()
        if not found:
            assert again is not None, "recomputation has found no plan"
            if isinstance(again, SlowerError):
                raise again
            raise both(self._refusal(), again, "with blocks recomputed")
        return min(found, key=lambda each: each.price.step_seconds)

    @property
    def _may_keep_all(self) -> bool:
        """Whether a plan without recomputation may fit; if not, it is not searched, unless for words of an error."""
        bound = self.request.search_bound_bytes
        return bound is None or not self._layouts.exceeds(bound)

    @property
    def _keeps_slower(self) -> bool:
        """Whether plans without recomputation fit, and it is known without a search that none is faster."""
        bound = self.request.search_bound_bytes
        if bound is None or self.request.is_priced_again:
            return False
        return self._layouts.has_only_slower(bound, self.faster_than_seconds)

    @property
    def _may_hold_state(self) -> bool:
        """Whether parameters, gradients, optimizer states and buffers alone may fit."""
        bound = self.request.search_bound_bytes
        return bound is None or not self._layouts.state_exceeds(bound)

    def _refusal(self) -> SearchError:
        """The error of the search without recomputation, where no plan fits.

        It is searched for its words, which say what would help; nobody reads them beside a known step.
        """
        if math.isfinite(self.faster_than_seconds) and not self._may_keep_all:
            kind = MemoryBoundError if self._may_hold_state else StateError
            return kind(f"No plan on the mesh {self.request.mesh} fits into memory without recomputation.")
        try:
            self._flat()
        except SearchError as error:
            return error
        raise AssertionError("a plan fits without recomputation")


def _refuse_no_blocks(graph: Graph, recompute: RecomputeOption | None) -> None:
    if recompute not in (None, "none") and not has_blocks(graph):
        raise PlanError(
            f"recompute={recompute!r} was asked for, but nothing can be recomputed: of {len(graph.ops)} ops "
            "none takes a parameter. Leave recompute out."
        )
