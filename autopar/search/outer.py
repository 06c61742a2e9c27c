"""The outer search: chooses the mesh, the number of pipeline stages and the number of micro-batches.

A *setting* is one mesh with its stages and a number of micro-batches. The search has two levels:

    estimate all settings at once                    `autopar.search.candidates`, by closed-form formulas
    search the plan of one setting                   `autopar.search.given`: layouts, cuts, schedule, chunks and
                                                     recomputation

An estimate assumes equal stages and the schedule 1F1B. A setting's *promise* is this estimate with the smaller bubble
of interleaved stages, so that it is optimistic. The search takes settings in the order of their promises and finds
their plans. It stops when no promise is better than the best plan, or after `_EXACT` plans. Then it tries other
numbers of micro-batches on the best mesh. If the user names no recipe, each setting is searched under the recipe of
its estimate, and the best mesh also without a recipe.

If a graph or a recipe has no closed form, every mesh is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost_model.cluster import Cluster
from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, SearchError, StateError
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, ParameterPlan, with_pipeline
from autopar.ir.batches import captured_batch, with_batch
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.composed import state_bytes
from autopar.pipeline.parts import block_starts
from autopar.search.candidates import Space
from autopar.search.decomposed import with_decomposed
from autopar.search.delayed import with_delays
from autopar.search.given import GivenMesh, Planned
from autopar.search.intents import allows, has_closed_form, recomputations
from autopar.search.pipeline_settings import divisors, searched_chunks
from autopar.search.recipes import RecipeLike, is_open, recipe_axes
from autopar.search.replicas import with_meeting
from autopar.search.request import AUTO_AXES, Request
from autopar.search.search import meshes_of
from autopar.search.settings import PricedCandidate
from autopar.search.staged import SlowerError
from autopar.search.stored import with_stores

_EXACT = 4  # number of settings whose plans are searched
_WORTH_MOVING = 0.25  # smallest state of training that is worth moving to the host, as a part of the memory bound
_SAME_MESH = 2  # numbers of micro-batches to try on one mesh, and again on the best mesh
# Plans of other settings are kept for display if their steps are at most this many times as long as the best one.
_SHOWN = 1.1


class Trial(NamedTuple):
    """A setting to search exactly.

    Attributes:
        mesh: the mesh of all ranks.
        micro_batches: number of micro-batches; None where the search on the mesh chooses it.
        recipe: recipe for the mesh of one stage.
        promise_seconds: optimistic estimate of a step; 0 where there is no estimate.
        priced: the estimate of the setting; None where there is none.
        known: a plan for the mesh under another recipe; the search looks only for a faster one.
    """

    mesh: Mesh
    micro_batches: int | None
    recipe: RecipeLike
    promise_seconds: float = 0.0
    priced: PricedCandidate | None = None
    known: Planned | None = None


class Explored(NamedTuple):
    """All settings of a request with their estimates.

    Attributes:
        space: the space of settings, which can price more of them.
        settings: estimates of all settings, fastest first.
    """

    space: Space
    settings: tuple[PricedCandidate, ...]


class Searched(NamedTuple):
    """The outcome of the outer search.

    Attributes:
        best: the fastest plan that fits.
        trial: the setting of the best plan.
        others: plans of other settings, fastest first.
        explored: all settings with their estimates; None where there are no estimates.
    """

    best: Planned
    trial: Trial
    others: tuple[Planned, ...] = ()
    explored: Explored | None = None


@dataclass
class _Tried:
    """The settings that were searched so far.

    Attributes:
        found: settings with their plans.
        reasons: errors of the settings without a plan.
        searched: mesh and number of micro-batches of every setting.
    """

    found: list[tuple[Trial, Planned]] = field(default_factory=list)
    reasons: list[AutoparError] = field(default_factory=list)
    searched: set[tuple[Mesh, int | None]] = field(default_factory=set)

    @property
    def ranked(self) -> list[tuple[Trial, Planned]]:
        """All plans, best first."""
        return sorted(self.found, key=lambda each: each[1].key)

    @property
    def best_seconds(self) -> float:
        """Seconds of a step of the fastest plan; infinite without a plan."""
        return min((each.price.step_seconds for _, each in self.found), default=math.inf)


def search_plan(
    graph: Graph,
    request: Request,
    *,
    captured_micro_batches: int = 1,
    fingerprint: str = "",
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Searched:
    """Finds the fastest plan that a request allows.

    Args:
        graph: the captured model.
        request: the user's wishes; the search decides what they leave open.
        captured_micro_batches: number of captured batches that make up a step, if the request names no batch.
        fingerprint: hash of the captured graph, which the plan records.
        fixed_storage: layouts of parameters that are placed already, by name.

    Unless the request forbids it, parameters may be stored in the host's memory: if no plan fits otherwise, or if the
    plan is then faster (for example because less is recomputed). They stay in the host's memory even during a step if
    no plan fits otherwise, or if the plan is then faster.

    Raises MeshError, PlanError, RecipeError or SearchError where there is no plan.
    """
    outer = _Outer(graph, request, captured_micro_batches, fingerprint, fixed_storage)
    if fixed_storage is not None or not (request.may_offload or request.offload):
        return outer.run()
    if request.offload:
        return outer.or_streaming()
    far = replace(outer, request=request.but(offload=True))
    try:
        found = outer.run()
    except SearchError as error:
        return far.instead_of(error)
    return far.if_faster(found)


@dataclass(frozen=True)
class _Outer:
    graph: Graph
    request: Request
    captured: int
    fingerprint: str
    fixed_storage: Mapping[str, ParameterPlan] | None
    faster_than_seconds: float = (
        math.inf
    )  # stages of a given mesh are searched only for a shorter step

    @property
    def rows(self) -> int:
        """Number of samples of a step."""
        return self.request.batch or captured_batch(self.graph) * self.captured

    def run(self) -> Searched:
        if self.request.mesh is not None:
            return self._on_mesh(self.request.mesh)
        explored = explore(self.graph, self.request, self.rows)
        first, if_none_fits = trials_of(self.graph, self.request, explored)
        tried = _Tried()
        self._try(first, tried)
        if not tried.found:
            self._try(if_none_fits, tried)
        if not tried.found:
            lines = (str(error) for error in tried.reasons)
            raise SearchError("\n".join([f"No plan on {self.request.ranks} ranks.", *lines]))
        self._try(self._recounted(tried, explored), tried)
        trial, best = tried.ranked[0]
        if is_open(self.request.inside) and not is_open(trial.recipe):
            again = trial._replace(recipe=self.request.inside, promise_seconds=0.0, known=best)
            self._try([again], tried)
        (trial, best), *rest = tried.ranked
        others = tuple(each for other, each in rest if other.mesh != trial.mesh)
        return Searched(best, trial, others, explored)

    def or_streaming(self) -> Searched:
        """The faster one of two plans: parameters on the device during the whole step, or only for each use."""
        streaming = replace(self, request=self.request.but(streams=True))
        try:
            found = self.run()
        except SearchError as error:
            try:
                return streaming.run()
            except SearchError:
                raise error from None
        return streaming.if_faster(found)

    def instead_of(self, error: SearchError) -> Searched:
        """This search's plan, after another search has failed with `error`; raises both errors if this one fails."""
        try:
            return self.or_streaming()
        except SearchError as other:
            raise type(error)(f"{error} Nor does it with parameters on the host: {other}") from None

    def if_faster(self, found: Searched) -> Searched:
        """The faster one of a known plan and this search's plan on the same mesh.

        This search is skipped if parameters, gradients and optimizer states take less than `_WORTH_MOVING` of the
        bound, because storing them on the host would then free little memory. It is not where even activations have
        left the device.
        """
        request, best = self.request, found.best
        held = state_bytes(best.graph, best.plan, request.hardware, request.training_state)
        is_short = any(how.tier == "host" for how in best.plan.saved.values())
        if held < _WORTH_MOVING * request.bound_bytes and not is_short:
            return found
        try:
            other = self._near(found)
        except (MeshError, PlanError, RecipeError, SearchError):
            return found
        return other if other.best.key < best.key else found

    def _near(self, found: Searched) -> Searched:
        """The result of this search on the mesh and micro-batches of a known plan, if it is about as fast."""
        faster_than_seconds = _SHOWN * found.best.price.step_seconds
        if self.request.mesh is not None:
            return replace(self, faster_than_seconds=faster_than_seconds).run()
        trial = found.trial._replace(known=None)
        return found._replace(best=self._exact(trial, faster_than_seconds), trial=trial)

    def _recounted(self, tried: _Tried, explored: Explored | None) -> list[Trial]:
        """Settings of the best mesh with numbers of micro-batches that were not tried on it.

        Half and twice the best number come first, because the promises on one mesh hardly differ. Then come the others
        in the order of their promises.
        """
        if explored is None:
            return []
        mesh, best = tried.ranked[0][0].mesh, tried.ranked[0][0].micro_batches or 1
        others = [
            each
            for each in explored.settings
            if each.setting.world_mesh == mesh
            and (mesh, each.setting.micro_batches) not in tried.searched
        ]
        near = [each for each in others if each.setting.micro_batches in (best // 2, 2 * best)]
        far = [each for each in others if each not in near]
        bound, blocks = self.request.bound_bytes, _blocks(self.graph)
        return [*_promising(near, bound, blocks), *_promising(far, bound, blocks)]

    def _try(self, trials: Iterable[Trial], tried: _Tried) -> None:
        """Searches the plans of settings in order, skipping those that promise no faster step than the best plan."""
        count = 0
        for trial in trials:
            if count >= _EXACT and trial.priced is not None:
                break
            best_seconds = tried.best_seconds
            if trial.promise_seconds >= best_seconds:
                continue
            tried.searched.add((trial.mesh, trial.micro_batches))
            try:
                tried.found.append((trial, self._exact(trial, _SHOWN * best_seconds)))
                count += 1
            except (MeshError, PlanError, RecipeError, SearchError) as error:
                tried.reasons.append(type(error)(f"{trial.mesh}: {error}"))
                count += isinstance(error, SlowerError)

    def _on_mesh(self, mesh: Mesh) -> Searched:
        """The plan for the mesh that the user names.

        On a mesh without stages, an open number of micro-batches starts at one and is doubled as long as no plan fits,
        or the step gets shorter. (More micro-batches take less memory, but launch more kernels.) If parameters and
        optimizer states alone do not fit, only the largest number is tried, whose error says how much memory is
        missing.
        """
        trials = [Trial(mesh, count, self.request.recipe) for count in self._counts()]
        found: list[tuple[Trial, Planned]] = []
        while trials:
            trial = trials.pop(0)
            try:
                planned = self._exact(
                    trial, self.faster_than_seconds if self.request.has_stages else math.inf
                )
            except SearchError as error:
                trials = trials[-1:] if isinstance(error, StateError) else trials
                if not found and not trials:
                    raise
                continue
            if found and planned.key >= found[-1][1].key:
                break
            found.append((trial, planned))
        trial, best = found[-1]
        return Searched(best, trial)

    def _counts(self) -> Iterator[int | None]:
        """Numbers of micro-batches to try on the mesh that the user names; None lets the search of stages choose."""
        request = self.request
        if request.micro_batches is not None or request.has_stages or not request.cuts_batch:
            yield request.micro_batches
            return
        count = 1
        while count <= self.rows and self.rows % count == 0:
            yield count
            count *= 2

    def _exact(self, trial: Trial, faster_than_seconds: float = math.inf) -> Planned:
        """The plan of a setting. With stages it must be faster than `faster_than_seconds`, or SlowerError is raised."""
        asked = self._asked(trial)
        count = trial.micro_batches or self.captured
        rows, rest = divmod(self.rows, count)
        if rest:
            raise SearchError(
                f"{count} micro-batches do not divide a batch of {self.rows} samples."
            )
        graph = self.graph
        if rows != captured_batch(graph):
            graph = with_batch(graph, rows)
        asked = asked.but(
            batch=None, micro_batches=trial.micro_batches or (None if asked.has_stages else count)
        )
        known = trial.known
        if known is not None:
            faster_than_seconds = known.price.step_seconds
        found = GivenMesh(
            graph, asked, self.fingerprint, count, self.fixed_storage, faster_than_seconds
        ).search()
        found = with_decomposed(with_stores(found, request=asked), asked)
        found = with_delays(with_meeting(found, asked), asked)
        if known is None:
            return found
        others = sorted((*found.others, *known.others), key=lambda each: each.key)
        return found._replace(others=tuple(others))

    def _asked(self, trial: Trial) -> Request:
        """The request with the mesh and the recipe of a setting, in place of the request's constraints on meshes."""
        request = self.request
        if request.mesh is not None:
            return request
        staged = PIPELINE_AXIS in trial.mesh.names
        there = tuple(axis for axis in request.decompose if axis in trial.mesh.names)
        return request.but(
            decompose=request.decompose if request.decompose == AUTO_AXES else there,
            mesh=trial.mesh, recipe=trial.recipe, stages=None, without=frozenset(), inside_node=(),
            schedule=request.chosen_schedule if staged else None,
            chunks=request.chunks if staged else None,
        )  # fmt: skip


def explore(graph: Graph, request: Request, rows: int) -> Explored | None:
    """All settings of a request with their estimates; None where the request or the model has no closed forms."""
    if request.ranks == 1 or not has_closed_form(request):
        return None
    space = space_of(graph, request, rows)
    if not request.cuts_batch and space.is_empty:  # for example because no dim is the batch
        return None
    return Explored(space, closed_forms(space, request))


def trials_of(
    graph: Graph, request: Request, explored: Explored | None
) -> tuple[list[Trial], list[Trial]]:
    """Two lists of settings in the order of their search; the second is for the case that the first has no plan."""
    first, if_none_fits = depths_of(graph, request)
    if explored is None:
        return list(_every_mesh(request, first)), list(_every_mesh(request, if_none_fits))
    # The estimate of a step without stages is nearly exact: its plan comes first, and bounds the others.
    trials = list(_promising(explored.settings, request.bound_bytes, _blocks(graph)))
    flat = next((each for each in trials if _depth(each.mesh) == 1), None)
    if flat is not None:
        trials = [flat, *(each for each in trials if each is not flat)]
    return (
        [each for each in trials if _depth(each.mesh) in first],
        [each for each in trials if _depth(each.mesh) in if_none_fits],
    )


def depths_of(graph: Graph, request: Request) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of pipeline ranks to try first, and those to try if no plan with the first ones fits.

    If the user names a recipe without a schedule, pipeline stages are tried only if nothing fits without them.
    """
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    depths = [depth for depth in divisors(request.ranks) if depth <= _blocks(graph)]
    if request.depths is not None:
        return [depth for depth in depths if depth in request.depths], ()
    if request.chosen_schedule or request.chunks:
        return depths[1:] or depths, ()
    if PIPELINE_AXIS in recipe_axes(request.recipe) or is_open(request.inside):
        return depths, ()
    return depths[:1], depths[1:]


def _blocks(graph: Graph) -> int:
    """Number of blocks of the model; a stage has at least one."""
    return len(block_starts(graph)) if has_blocks(graph) else 1


def space_of(graph: Graph, request: Request, rows: int) -> Space:
    """The space of settings of a model on the ranks of a request, for a step of `rows` samples."""
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    node = math.gcd(request.ranks, request.hardware.devices_per_node)
    hardware = replace(request.hardware, devices_per_node=node)
    again = [r for r in recomputations(request) if not isinstance(r, float)] or ["none", "full"]
    first, if_none_fits = depths_of(graph, request)
    return Space(
        graph, Cluster(hardware, request.ranks // node), rows, request.training_state,
        request.software, stages=(*first, *if_none_fits),
        recomputes=tuple(again) if graph.stacks else ("none",), pins=request.pins,
        own_batch=not request.cuts_batch,
    )  # fmt: skip


def closed_forms(space: Space, request: Request) -> tuple[PricedCandidate, ...]:
    """Estimates of all settings that a request allows, fastest first. Raises AutoparError if there are none."""
    priced = space.price()
    if {"none", "full"} <= {*space.recomputes}:  # then also numbers of blocks between them
        priced += space.with_fewest_blocks(priced, request.bound_bytes)
        priced.sort(key=lambda each: (each.seconds, each.setting.name))
    node = request.hardware.devices_per_node
    found = tuple(each for each in priced if allows(request, each.setting, node))
    if not found:
        raise SearchError(
            f"Nothing is left of the {len(priced)} ways to lay the model on {space.cluster}: "
            f"{request.text} rule out all of them. Drop one of them."
        )
    return found


def _promising(
    settings: Sequence[PricedCandidate], bound_bytes: int, blocks: int
) -> Iterator[Trial]:
    """Settings in the order in which they are searched.

    First come those whose estimated memory fits, fastest promise first; then the others, least memory first. Every mesh
    occurs with at most `_SAME_MESH` numbers of micro-batches.
    """

    def order(each: PricedCandidate) -> tuple[bool, float, str]:
        fits = each.memory_bytes <= bound_bytes
        return not fits, promise(each) if fits else each.memory_bytes, each.setting.name

    def promise(each: PricedCandidate) -> float:
        """The estimate with the smaller bubble that the largest searched number of chunks gives."""
        chunks = max(searched_chunks(blocks, _depth(each.setting.world_mesh)), default=1)
        return each.seconds - (1 - 1 / chunks) * each.parts.get("bubble", 0.0)

    counts: dict[Mesh, set[int]] = {}
    for each in sorted(settings, key=order):
        mesh, count = each.setting.world_mesh, each.setting.micro_batches
        known = counts.setdefault(mesh, set())
        if count not in known and len(known) < _SAME_MESH:
            known.add(count)
            yield Trial(mesh, count, each.setting.recipe, promise(each), each)


def _every_mesh(request: Request, depths: Sequence[int]) -> Iterator[Trial]:
    """Every mesh with these numbers of pipeline ranks, with the micro-batches that the user asks for."""
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    named = recipe_axes(request.inside)
    is_staged = bool(request.chosen_schedule or request.chunks)
    for depth in depths:
        for mesh in meshes_of(request.ranks // depth, named):
            world = with_pipeline(mesh, depth, 0) if depth > 1 or is_staged else mesh
            yield Trial(world, request.chosen_micro_batches, request.inside)


def _depth(mesh: Mesh) -> int:
    return dict(mesh.axes).get(PIPELINE_AXIS, 1)
