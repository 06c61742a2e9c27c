"""The outer search: chooses the mesh, the number of pipeline stages and the number of micro-batches.

A *setting* is one mesh with its stages and a number of micro-batches. The search has two levels:

    estimate all settings at once                    `candidates` of this folder, by closed-form formulas
    search the plan of one setting                   `one_setting`: layouts, cuts, schedule, chunks and recomputation

An estimate assumes equal stages and the schedule 1F1B. A setting's *promise* is this estimate with the smallest bubble
that any schedule may have, so that it is optimistic. The search takes settings in the order of the means of estimate
and promise, leaves out those that promise a surely slower step than the best plan, and stops after `MOST_EXACT` plans.
Then it tries other numbers of micro-batches on the best mesh. If the user names no recipe, each setting is searched
under the recipe of its estimate, and without a recipe where no plan of it fits; so are the best meshes with stages and
without.

If a graph or a recipe has no closed form, every mesh is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import MemoryBoundError, MeshError, PlanError, RecipeError, SearchError, StateError, both
from autopar.ir import Graph, Mesh, ParameterPlan
from autopar.ir.note import kind_of
from autopar.pipeline.composed import state_bytes
from autopar.pipeline.parts import is_whole
from autopar.search.candidates.one_setting import SettingSearch, note_of_parts
from autopar.search.candidates.proposals import Proposals, with_axis_as_two, without_context
from autopar.search.candidates.refined import Finer, of_given_mesh, words_of_heads
from autopar.search.candidates.trials import (
    MOST_EXACT,
    MOST_OPENED,
    MOST_SHOWN,
    WORTH_MOVING,
    Explored,
    Searched,
    Trial,
    Tried,
    best_of_each_kind,
    depth_of,
    explore,
    is_tight,
    parts_of,
)
from autopar.search.refine.buckets import usual_seconds
from autopar.search.refine.orders import best_order, words_of_order
from autopar.search.request.notes import note_of_unasked_stages
from autopar.search.request.recipes import is_open
from autopar.search.request.refusals import is_lack, refusal_of_all, with_recipe_open, words_of_reserved
from autopar.search.request.request import Progress, Request, silent
from autopar.search.stages.case import Case
from autopar.search.stages.dims import settings_in_dims, words_of_dims
from autopar.search.stages.given import GivenMesh, Planned
from autopar.search.stages.staged import SlowerError


def search_plan(
    graph: Graph,
    request: Request,
    *,
    captured_micro_batches: int = 1,
    fingerprint: str = "",
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
    progress: Progress = silent,
) -> Searched:
    """Finds the fastest plan that a request allows.

    Args:
        graph: the captured model.
        request: the user's wishes; the search decides what they leave open.
        captured_micro_batches: number of captured batches that make up a step, if the request names no batch.
        fingerprint: hash of the captured graph, which the plan records.
        fixed_storage: layouts of parameters that are placed already, by name.
        progress: function that is called with a line of text before each setting is searched.

    Unless the request forbids it, parameters may be stored in the host's memory: if no plan fits otherwise, or if the
    plan is then faster (for example because less is recomputed). They stay in the host's memory even during a step if
    no plan fits otherwise, or if the plan is then faster.

    Raises MeshError, PlanError, RecipeError or SearchError where there is no plan.
    """
    outer = _Outer(Case(graph, request, captured_micro_batches, fingerprint, fixed_storage), progress=progress)
    if words := words_of_reserved(request, outer.least_rank_bytes):
        raise StateError(words)
    try:
        return outer.best()
    except MemoryBoundError as error:
        raise with_recipe_open(error, request.recipe) from None


@dataclass(frozen=True)
class _Outer:
    """The search of a request. Stages of a given mesh must be faster than `faster_than_seconds`.

    Attributes:
        case: the model with the request.
        progress: function that is called with a line of text before each setting is searched.
    """

    case: Case
    faster_than_seconds: float = math.inf
    progress: Progress = silent

    @property
    def request(self) -> Request:
        """What the user asks for."""
        return self.case.request

    @property
    def graph(self) -> Graph:
        """The captured model."""
        return self.case.graph

    @property
    def _inside(self) -> SettingSearch:
        """The search for the plan of one setting."""
        return SettingSearch(self.case)

    @property
    def least_rank_bytes(self) -> float:
        """A lower bound on the memory of a rank under any plan that this search may find."""
        farthest = {"offload": True, "streams": True} if self.request.may_offload else {}
        return self._but(**farthest)._inside.least_rank_bytes

    def _but(self, **changes: Any) -> _Outer:
        """The same search with some of the request changed."""
        return replace(self, case=self.case.but(**changes))

    def best(self) -> Searched:
        """The best plan, whose parameters may be in the host's memory where the request leaves that open, or asks."""
        request = self.request
        if self.case.fixed_storage is not None or not (request.may_offload or request.offload):
            return self.run()
        far = self._but(offload=True)
        farther = [far, far._but(streams=True)]
        return far._or_farther(farther[1:]) if request.offload else self._or_farther(farther)

    def _or_farther(self, farther: Sequence[_Outer]) -> Searched:
        """This search's plan, a faster one of the next search, or, where there is none, what the next ones find.

        Args:
            farther: searches that may store ever more outside of the device.
        """
        hopeless = self._hopeless()
        if not farther:
            if hopeless is not None:
                raise hopeless
            return self.run()
        first, *rest = farther
        found = hopeless or self._result()
        if isinstance(found, Searched):
            return first.if_faster(found)
        try:
            return first._or_farther(rest)
        except SearchError as error:
            if self.request.offload:  # what is known without a search has no remedies
                raise (found if is_lack(found) else error) from None
            raise both(found, error, "with parameters on the host") from None

    def _hopeless(self) -> MemoryBoundError | None:
        """The error where it is known without a search that nothing fits, which whoever watches is told."""
        if not self._inside.cannot_fit:
            return None
        found = self._inside.refusal()
        where = "with parameters on the host" if self.request.offload else "on the devices alone"
        self.progress(f"{where}: {found.finding}")
        return found

    def _result(self) -> Searched | SearchError:
        """The best plan, or the error where there is none."""
        try:
            return self.run()
        except SearchError as error:
            return error

    def run(self) -> Searched:
        found = self._found()
        return found if self.case.fixed_storage else self._in_best_order(found)

    def _found(self) -> Searched:
        """The best plan on meshes whose axes nest in the order in which they are placed or named."""
        if self.request.mesh is not None:
            return self._refined(self.request.mesh)
        known = self._known(explore(self.graph, self.request, self.case.rows))
        first, if_none_fits = known.first()
        tried = Tried()
        self._try(first, tried)
        self._try(self._opened(tried), tried)
        unasked = None
        if not tried.found and if_none_fits:
            unasked = note_of_unasked_stages(self.request, self.case.rows, tried.refusals)
            self._try(if_none_fits, tried)
        self._try(known.refined(), tried)
        self._try(known.unsplit(tried.worth_seconds), tried)
        self._try_without_recipes(known, tried)
        # These run where the user named no axis, and run last: the searches above skip what cannot beat the best step
        # so far, so that a faster step found here first would leave out plans that a named mesh finds.
        self._try_in_dims(tried)
        self._try_over_sequences(known, tried)
        if not tried.found:
            self._try(known.experts(), tried)
        if not tried.found:
            raise refusal_of_all(self.request, tried.refusals)
        found = self._settled(tried, known)
        if unasked is None or found.best.plan.pipeline is None:
            return found
        return found._replace(best=found.best.noted(unasked))

    def _known(self, explored: Explored | None) -> Proposals:
        """The settings to try, by these estimates."""
        return Proposals(self.graph, self.request, explored)

    def _opened(self, tried: Tried) -> list[Trial]:
        """Settings that no plan under the recipe of their estimate fits, without this recipe; each is given once."""
        if not is_open(self.request.inside):
            return []
        failed = [each for each in tried.failed if len(parts_of(each.mesh)[1]) < 3]
        tried.failed.clear()
        failed.sort(key=lambda each: each.promise_seconds)
        return [each._replace(recipe=self.request.inside) for each in failed[:MOST_OPENED]]

    def _settled(self, tried: Tried, known: Proposals) -> Searched:
        """The best setting, also with other numbers of micro-batches and without its recipe."""
        self._try(self._recounted(tried, known), tried)
        self._try(self._opened(tried), tried)
        depth = depth_of(tried.ranked[0][0].mesh)
        self._try(known.experts(depth), tried)
        self._try_best_without_recipe(tried)
        depth = depth_of(tried.ranked[0][0].mesh)
        self._try(known.cut(depth), tried)
        (trial, best), *rest = tried.ranked
        others = tuple(each for other, each in rest if other.mesh != trial.mesh)
        return Searched(self._noted(best), trial, others, known.explored)

    def _noted(self, best: Planned) -> Planned:
        """The plan with a note on a number of micro-batches that nobody asked for, on a mesh without stages."""
        is_open = self.request.chosen_micro_batches is None and best.plan.pipeline is None
        is_noted = any(kind_of(note) == "micro-batches" for note in best.plan.notes)
        if best.plan.micro_batches == 1 or not is_open or is_noted:
            return best
        return best.noted(note_of_parts([best]))

    def _try_best_without_recipe(self, tried: Tried) -> None:
        """Searches the best settings of one or two axes without their recipes; three have too many combinations."""
        if not is_open(self.request.inside):
            return
        few = [each for each in tried.ranked if len(parts_of(each[0].mesh)[1]) < 3]
        best, best_seconds = tried.ranked[0], tried.best_seconds
        for trial, plan in best_of_each_kind(few or [best]):
            mesh = trial.mesh if few else without_context(trial)
            is_near = plan.price.step_seconds <= MOST_SHOWN * best_seconds
            if mesh is not None and is_near and not is_open(trial.recipe):
                known = plan if few and trial is best[0] else None
                free = trial._replace(mesh=mesh, recipe=self.request.inside, promise_seconds=0.0, known=known)
                self._try([free], tried)

    def if_faster(self, found: Searched) -> Searched:
        """The faster one of a known plan and this search's plan: see `_beyond`.

        This search is skipped if parameters, gradients and optimizer states take less than `WORTH_MOVING` of what the
        bound leaves to tensors, because storing them on the host would then free little memory. It is not where even
        activations have left the device.
        """
        request, best = self.request, found.best
        held = state_bytes(best.graph, best.plan, request.hardware, request.training_state)
        is_short = any(how.tier == "host" for how in best.plan.saved.values())
        room_bytes = request.bound_bytes - request.hardware.reserved_bytes
        if held < WORTH_MOVING * room_bytes and not is_short:
            return found
        try:
            other = self._beyond(found)
        except (MeshError, PlanError, RecipeError, SearchError):
            return found
        return other if other.best.key < best.key else found

    def _beyond(self, found: Searched) -> Searched:
        """The best one of a known plan, this search's plan of its setting, and the plans of settings that do not fit
        into the device's memory, if these promise a faster step with what the host stores.
        """
        if self.request.mesh is not None:
            faster_than_seconds = MOST_SHOWN * usual_seconds(found.best, self.request)
            return replace(self, faster_than_seconds=faster_than_seconds).run()
        tried = Tried([(found.trial, found.best)], most_shown=1.0)
        self._try([self._again(found)], tried)
        known = self._known(found.explored)
        self._try((each for each in known.overfull() if each[:3] != found.trial[:3]), tried)
        return self._settled(tried, known)

    def _again(self, found: Searched) -> Trial:
        """The setting of a plan, to be searched again; without estimates its number of micro-batches is open again."""
        trial = found.trial._replace(promise_seconds=0.0, known=None)
        if found.explored is not None:
            return trial
        return trial._replace(micro_batches=self.request.chosen_micro_batches)

    def _recounted(self, tried: Tried, known: Proposals) -> list[Trial]:
        """Settings of the best mesh with numbers of micro-batches that were not tried on it.

        Half and twice the best number come first, because the promises on one mesh hardly differ. Then come the others
        in the order of their promises. Where a plan of the mesh is faster than promised, the others may be so, too.
        """
        mesh, best = tried.ranked[0][0].mesh, tried.ranked[0][0].micro_batches or 1
        others = [
            each
            for each in known.settings
            if each.setting.world_mesh == mesh and (mesh, each.setting.micro_batches) not in tried.searched
        ]
        near = [each for each in others if each.setting.micro_batches in (best // 2, 2 * best)]
        far = [each for each in others if each not in near]
        trials = *known.promising(near), *known.promising(far)
        kept = tried.least_of_promise(mesh)
        return [each._replace(promise_seconds=kept * each.promise_seconds) for each in trials]

    def _try_in_dims(self, tried: Tried) -> None:
        """Searches tensor parallelism in two and three dims (`autopar.search.stages.dims`) where memory is tight."""
        known, request = tried.ranked[0] if tried.found else None, self.request
        if not (request.may_have_dims and is_whole(self.graph) and is_tight(known, request)):
            return
        count = (known[1].plan.micro_batches if known else None) or request.micro_batches or 1
        before = len(tried.found)
        best_seconds = tried.best_seconds
        settings = settings_in_dims(request.ranks or 1)
        self._try_by_promises((Trial(mesh, count, recipe) for mesh, recipe in settings), tried)
        other = best_seconds if known else None
        tried.found[before:] = [
            (trial, each.noted(words_of_dims(each.plan, other, each.price.step_seconds)))
            for trial, each in tried.found[before:]
        ]

    def _try_over_sequences(self, proposals: Proposals, tried: Tried) -> None:
        """Searches settings with an axis cp where memory is tight or dp has no rows for all ranks."""
        known, request = tried.ranked[0] if tried.found else None, self.request
        if is_tight(known, request) or self.case.rows < (request.ranks or 1):
            self._try((t for t in proposals.over_sequences() if t[:2] not in tried.searched), tried)

    def _try_without_recipes(self, known: Proposals, tried: Tried) -> None:
        """Searches meshes without a recipe where ranks that repeat work may gain, see `Proposals.unnamed`.

        Meshes that were searched under a recipe keep the names of their axes. If one of the meshes is the best, an
        axis of it is also taken as two, so that ops may split two factors along it.
        """
        trials = known.unnamed(tried.best_seconds)
        plain = {parts_of(each.mesh): each for each, _ in reversed(tried.ranked)}
        trials = [plain.get(parts_of(each.mesh), each)._replace(recipe=each.recipe, known=None) for each in trials]
        self._try_by_promises(trials, tried)
        if tried.found and tried.ranked[0][0].mesh in [each.mesh for each in trials]:
            self._try_by_promises(with_axis_as_two(tried.ranked[0][0]), tried)

    def _try_by_promises(self, trials: Iterable[Trial], tried: Tried) -> None:
        """Searches settings without stages; the promise of each is its step without a bound on memory."""
        promised = []
        for each in trials:
            asked = self.request.but(mesh=each.mesh, recipe=each.recipe, micro_batches=each.micro_batches, stages=None)
            promised.append(each._replace(promise_seconds=self._promise(asked)))
        self._try(sorted(promised, key=lambda each: each.promise_seconds), tried)

    def _try(self, trials: Iterable[Trial], tried: Tried) -> None:
        """Searches the plans of settings in order, but for those that promise a surely slower step than the best."""
        count = 0
        for trial in trials:
            if count >= MOST_EXACT and trial.priced is not None:
                break
            if trial.promise_seconds >= tried.worth_seconds or tried.repeats(trial, self.request):
                continue
            tried.searched.add((trial.mesh, trial.micro_batches))
            self.progress(f"searching the plan: {tried.words_before(trial)}")
            try:
                faster_than_seconds = tried.most_shown * tried.usual_seconds(self.request)
                # One setting says in full how much memory is missing; of the others that surely lack it, none does.
                gives_up = bool(tried.found) or any(is_lack(error) for _, error in tried.refusals)
                found = self._inside.search(trial, faster_than_seconds, gives_up=gives_up)
                tried.found.append(found)
                count += 1
            except (MeshError, PlanError, RecipeError, SearchError) as error:
                tried.refusals.append((trial.mesh, error))
                count += isinstance(error, SlowerError)
                may_fit = isinstance(error, SearchError) and not isinstance(error, (SlowerError, StateError))
                if may_fit and not is_open(trial.recipe):
                    tried.failed.append(trial)

    def _refined(self, mesh: Mesh) -> Searched:
        """The faster one of two plans: for the mesh that the user names, and with two axes in place of one of it."""
        finer = None if self.case.fixed_storage else of_given_mesh(self.graph, self.request)
        if finer is None:
            return self._inside.on_mesh(mesh, self.faster_than_seconds)
        try:
            found = self._inside.on_mesh(mesh, self.faster_than_seconds)
        except (MeshError, RecipeError, SearchError):
            refined = self._finer(finer, None)
            if refined is None:
                raise
            return refined
        refined = self._finer(finer, found.best.price.step_seconds)
        return refined if refined is not None and refined.best.key < found.best.key else found

    def _finer(self, finer: Finer, whole: float | None) -> Searched | None:
        """The best plan on a refined mesh; None if there is none, or no recipe promises less seconds than `whole`.

        The promise is the step under a recipe without a bound on memory. As on a searched mesh, the search without
        recipes follows where one under a recipe has been faster.
        """
        asked = [self.request.but(mesh=finer.mesh, recipe=recipe, refines=False) for recipe in finer.recipes]
        if not self.request.has_stages and whole is not None:
            asked = [each for each in asked if self._promise(each) < whole]
        found = [result for each in asked if (result := self._searched(each)) is not None]
        best = min(found, key=lambda each: each.best.key, default=None)
        if best is None or (whole is not None and best.best.price.step_seconds >= whole):
            return None
        if is_open(self.request.inside):
            free = self._searched(asked[0].but(recipe=self.request.recipe))
            best = best if free is None or best.best.key <= free.best.key else free
        note = words_of_heads(finer.mesh, finer.axis, whole, best.best.price.step_seconds)
        return best._replace(best=best.best.noted(note))

    def _in_best_order(self, found: Searched) -> Searched:
        """The faster one of a plan and of a plan on its mesh in another order of the axes, see `orders`."""
        request, own = self.request, found.best.plan.replica_mesh
        if request.mesh is not None and (not request.refines or request.mesh.placed != own):
            return found
        turned = best_order(found.best, request)
        if turned is None:
            return found
        inside = self._inside
        if request.mesh is not None:
            inside = SettingSearch(self.case.but(mesh=turned.replica_mesh))
        trial = found.trial._replace(mesh=turned.replica_mesh, promise_seconds=0.0, known=None)
        try:
            best = inside.plan(trial)
        except (MeshError, PlanError, RecipeError, SearchError):
            return found
        if best.key >= found.best.key:
            return found
        seconds = best.price.step_seconds, found.best.price.step_seconds
        for note in found.best.plan.notes:
            best = best.noted(note) if kind_of(note) == "micro-batches" else best
        return found._replace(
            best=best.noted(words_of_order(best.plan.mesh, found.best.plan.mesh, *seconds)), trial=trial
        )

    def _searched(self, request: Request) -> Searched | None:
        """The result of this search for another request; None if it has no plan."""
        try:
            return replace(self, case=replace(self.case, request=request)).run()
        except (MeshError, PlanError, RecipeError, SearchError):
            return None

    def _promise(self, request: Request) -> float:
        """Seconds of a step without stages and without a bound on memory; infinite where a recipe rules it out."""
        assert request.mesh is not None, "a refined mesh is given"
        count = request.micro_batches or 1
        alone = replace(self.case, request=request.but(micro_batches=count, offload=False))
        with suppress(MeshError, PlanError, RecipeError, SearchError):
            return GivenMesh(alone.at(count)).flat_seconds
        return math.inf
