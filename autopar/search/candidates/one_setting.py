"""The plan of one setting: a mesh with its stages and a number of micro-batches.

The outer search (`autopar.search.candidates.outer`) chooses settings; this is the search inside one of them, with the
graph at the size of the setting's micro-batches, and with the request's constraints on meshes replaced by the setting's
mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import MemoryBoundError, MeshError, SearchError, StateError
from autopar.ir import PIPELINE_AXIS, Mesh
from autopar.ir.note import Note
from autopar.pipeline.blocks import has_blocks
from autopar.search.candidates.trials import Searched, Trial
from autopar.search.exact.least_memory import least_bytes
from autopar.search.exact.question import LayoutQuestion
from autopar.search.refine.buckets import usual_seconds, with_buckets
from autopar.search.refine.nesting import with_nesting
from autopar.search.refine.overlapped import with_decomposed, with_overlap
from autopar.search.refine.replicas import with_delays, with_meeting
from autopar.search.refine.stored import with_stores
from autopar.search.request.options import AUTO_AXES
from autopar.search.request.recipes import is_open
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh, Planned
from autopar.search.stages.pipeline_settings import divisors
from autopar.search.stages.staged import SlowerError
from autopar.units import counted, format_bytes, format_seconds

_ALONE = Mesh((("dp", 1),))
# What is decided for a plan that was found, in this order: each is priced with those before it.
_REFINEMENTS = (with_stores, with_nesting, with_decomposed, with_overlap, with_meeting, with_buckets, with_delays)


class UnsearchedError(MemoryBoundError):
    """It is known without a search that no plan fits into the memory of a rank; it says no more than that."""


@dataclass(frozen=True)
class SettingSearch:
    """The search for the plan of one setting.

    Attributes:
        case: the model with the user's wishes.
    """

    case: Case

    @property
    def request(self) -> Request:
        """The user's wishes."""
        return self.case.request

    @property
    def cannot_fit(self) -> bool:
        """Whether it is known without a search that no plan fits, whatever its mesh and recomputation."""
        bound = self.request.search_bound_bytes
        return bound is not None and self.least_rank_bytes > bound

    @property
    def least_rank_bytes(self) -> float:
        """A lower bound on the peak memory of a rank under any plan, found without a search; 0 where none is known.

        All ranks together hold at least what one rank alone would for a micro-batch of a single row.
        """
        request, graph, searches = self.request, self.case.graph, self.case.searches
        if not is_open(request.inside) or request.has_lone_ops or not has_blocks(graph):
            return 0.0
        graph = searches.with_batch(graph, 1) if request.cuts_batch and graph.batch else graph
        alone = searches.on(LayoutQuestion(graph, _ALONE, tiers=request.tiers, **request.figures))
        held = least_bytes(alone.problem, may_offload=bool(request.offload) or request.recompute == "offloaded")
        reserved = request.hardware.reserved_bytes
        return reserved + (held - reserved) / self._ranks

    @property
    def _ranks(self) -> int:
        return self.request.mesh.ranks if self.request.mesh is not None else self.request.ranks or 1

    def refusal(self) -> MemoryBoundError:
        """The error where no plan can fit, with what a rank needs at least, which may not be enough."""
        request, least_bytes = self.request, math.ceil(self.least_rank_bytes)
        reserved = format_bytes(request.hardware.reserved_bytes)
        finding = (
            f"No plan on {counted(self._ranks, 'rank')} fits into {format_bytes(request.bound_bytes)}: however "
            f"the model is split, and whichever layers are recomputed, a rank needs more than "
            f"{format_bytes(least_bytes)}, {reserved} of it reserved."
        )
        made = MemoryBoundError(
            f"{finding} What would help: more ranks, or memory_bytes (--max-memory) above {least_bytes}."
        )
        made.finding = finding
        return made

    def plan(self, trial: Trial, faster_than_seconds: float = math.inf, *, gives_up: bool = False) -> Planned:
        """The plan of a setting. With stages it must be faster than `faster_than_seconds`, or SlowerError is raised.

        With `gives_up`, UnsearchedError is raised where no plan can fit, in place of a search for an error that says
        how much memory is missing.
        """
        asked = self._asked(trial)
        count = trial.micro_batches or self.case.captured
        case = self.case.at(count)
        asked = asked.but(batch=None, micro_batches=trial.micro_batches or (None if asked.has_stages else count))
        known = trial.known
        bound = faster_than_seconds if known is None else usual_seconds(known, asked)
        given = GivenMesh(replace(case, request=asked), bound)
        if gives_up and given.cannot_fit:
            raise UnsearchedError(f"No plan with {counted(count, 'micro-batch')} fits.")
        found = given.search()
        for refine in _REFINEMENTS:
            found = refine(found, asked)
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
            mesh=trial.mesh,
            recipe=trial.recipe,
            stages=None,
            without=frozenset(),
            inside_node=(),
            schedule=request.chosen_schedule if staged else None,
            chunks=request.chunks if staged else None,
        )

    def on_mesh(self, mesh: Mesh, faster_than_seconds: float) -> Searched:
        """The plan for the mesh that the user names. With stages it must be faster than `faster_than_seconds`."""
        if not self.request.has_stages:
            faster_than_seconds = math.inf
        trial = Trial(mesh, self.request.micro_batches, self.request.recipe)
        trial, best = self.search(trial, faster_than_seconds)
        return Searched(best, trial)

    def search(
        self, trial: Trial, faster_than_seconds: float = math.inf, *, gives_up: bool = False
    ) -> tuple[Trial, Planned]:
        """The plan of a setting as `plan` finds it, with the best number of micro-batches where that is open.

        On a mesh without stages an open number of micro-batches starts at one. It grows as long as no plan fits, or the
        step gets shorter. More micro-batches take less memory, but launch more kernels, so that no more are tried after
        a plan that the bound on memory does not slow down. If parameters and optimizer states alone do not fit, only
        the largest number is tried, whose error says how much memory is missing. See `_told` for other errors.
        """
        trials = [trial._replace(micro_batches=count) for count in self._counts(trial)]
        found: list[tuple[Trial, Planned]] = []
        failed: list[tuple[Trial, SearchError | MeshError]] = []
        has_slower = False
        while trials:
            each = trials.pop(0)
            if found and not found[-1][1].is_tight:
                break
            try:
                planned = self.plan(each, faster_than_seconds, gives_up=gives_up or bool(trials))
            except (SearchError, MeshError) as error:
                failed.append((each, error))
                trials = trials[-1:] if isinstance(error, StateError) else trials
                has_slower = has_slower or isinstance(error, SlowerError)
                if not found and not trials:
                    raise self._told(failed, faster_than_seconds, gives_up) from None
                continue
            if found and planned.key >= found[-1][1].key:
                break
            found.append((each, planned))
        best_trial, best = found[-1]
        if best_trial.micro_batches not in (None, 1, trial.micro_batches):
            best = best.noted(note_of_parts([each for _, each in found], is_given=not has_slower))
        return best_trial, best

    def _told(
        self, failed: Sequence[tuple[Trial, SearchError | MeshError]], faster_than_seconds: float, gives_up: bool
    ) -> SearchError | MeshError:
        """The error of a setting without a plan, of those of all numbers of micro-batches that were tried.

        If memory is missing for some of them, it is the error of the largest one of these, in full unless the caller
        gives up. Otherwise it is that of the smallest number, which has the batch that was asked for.
        """
        too_large = [each for each in failed if isinstance(each[1], MemoryBoundError)]
        trial, error = too_large[-1] if too_large else failed[0]
        if gives_up or not isinstance(error, UnsearchedError):
            return error
        try:
            self.plan(trial, faster_than_seconds)
        except SearchError as full:
            return full
        raise AssertionError(f"a plan was found that cannot fit: {error}")

    def _counts(self, trial: Trial) -> Iterator[int | None]:
        """Numbers of micro-batches to try for a setting; None lets the search of stages choose."""
        is_staged = PIPELINE_AXIS in trial.mesh.names
        if trial.micro_batches is not None or is_staged or not self.request.cuts_batch:
            yield trial.micro_batches
            return
        yield from divisors(self.case.rows)


def note_of_parts(found: Sequence[Planned], *, is_given: bool = False) -> Note:
    """A note on a number of micro-batches that nobody asked for: why it is more than one.

    Args:
        found: plans that fit, in the order of their numbers of micro-batches; the last one is taken.
        is_given: whether the mesh is given, and all smaller numbers were tried on it.
    """
    first, best = found[0], found[-1]
    count, seconds = counted(best.plan.micro_batches, "micro-batch"), best.price.step_seconds
    if first is not best:
        fewer, whole_seconds = first.plan.micro_batches, first.price.step_seconds
        return Note(
            f"{count}: a step takes {format_seconds(seconds)}, and {format_seconds(whole_seconds)} with {fewer} "
            f"(micro_batches={fewer} forces that)",
            "micro-batches",
        )
    why = "fewer do not fit" if is_given else "the fastest number that fits"
    return Note(f"{count}: {why} in memory", "micro-batches")
