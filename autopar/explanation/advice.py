"""Plans a model on a cluster and explains the plan, for the command line and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autopar.cost_model.breakdown import Candidate
from autopar.cost_model.items import TrainingState
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.steps.run import total
from autopar.errors import AutoparError, MemoryBoundError, SearchError, StateError
from autopar.explanation.asked import check_closed_form, expand_pins
from autopar.explanation.candidate_rows import (
    AS_FAST,
    idle,
    kept_notes,
    largest_cause,
    name_of,
    row_of,
    seconds_by_cause,
    slower,
)
from autopar.explanation.comparison import ELSEWHERE, compared, smallest
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation, words_of_factors
from autopar.explanation.few_layers import capture_target, tokens_of, training_state_of, with_graph
from autopar.explanation.kinds import best_of, ways_of
from autopar.explanation.report import axis_lines
from autopar.explanation.simulated import SimulatedStep
from autopar.explanation.what_would_change import (
    Change,
    Promise,
    faster_clusters,
    larger_memories,
    near,
    promised_first,
)
from autopar.ir import Graph, Plan
from autopar.ir.batches import captured_batch, sizes_of_micro_batches, with_batch
from autopar.ir.recompute import is_saved_option
from autopar.models.presets import Preset
from autopar.models.targets import Target, resolve_target
from autopar.pipeline.composed import composed, step_of
from autopar.planning.layers import spoken_of_all_layers
from autopar.planning.loss_tiles import best_in_tiles, tile_bytes_of
from autopar.planning.planning import Prepared, part_of, search_step
from autopar.planning.undivided import undivided_lines
from autopar.search.candidates.candidates import SettingEstimator
from autopar.search.candidates.request_filters import has_closed_form
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import Explored, Searched, closed_forms, depths_of, space_of
from autopar.search.request.notes import exchange_lines
from autopar.search.request.refusals import words_of_reserved
from autopar.search.request.request import Progress, Request, silent
from autopar.search.stages.given import Planned
from autopar.search.stages.pipeline_settings import Priced as PricedPipeline
from autopar.units import counted

EXPLORED_BATCH = 8  # sequences of the graph that all settings are priced with
_OTHERS = 8  # settings of a pipeline that are listed beside the chosen one


@dataclass(frozen=True)
class Question:
    """A model, and the request for a plan of it.

    Attributes:
        target: preset of the model, or a text that `autopar.models.targets.resolve_target` accepts.
        request: number of ranks and constraints on the plan; where its batch is None, a micro-batch has one sequence
            for every rank, or is the target's own example inputs where these have a fixed batch.
        seq: number of tokens of a sequence; None for the target's own length, which for presets and configurations is
            the longest that the model supports, at most `DEFAULT_SEQ` tokens.
        progress: function that is called with a line of text when a phase of the search begins.
        training_state: text of differences from the usual training state for the model's dtypes
            (`training_state_of`), as `TrainingState.parse` reads it.
        loss_tile_bytes: bytes of the tiles of the loss (`autopar.planning.loss_tiles`); None for none.
    """

    target: str | Preset
    request: Request
    seq: int | None = None
    progress: Progress = silent
    training_state: str = ""
    loss_tile_bytes: int | None = None
    _captured: dict[int, tuple[Target, Prepared, Graph]] = field(default_factory=dict, compare=False)
    _plans: dict[str, Plan | None] = field(default_factory=dict, compare=False)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the request."""
        return self.request.cluster

    @property
    def bound_bytes(self) -> int:
        """Bytes that a rank may use."""
        return self.request.bound_bytes

    def _asked(self, graph: Graph) -> Request:
        """The request with labels in place of pins that name an axis, and with the training state of the graph."""
        pins = expand_pins(self.request.pins, graph, self.request.hardware)
        return self.request.but(pins=pins, training_state=self._state_of(graph))

    def _state_of(self, graph: Graph) -> TrainingState:
        """The usual training state for the graph's dtypes, changed as the question asks."""
        return TrainingState.parse(self.training_state, training_state_of(graph))

    @cached_property
    def model(self) -> Target:
        """The target. Raises AutoparError if there is none."""
        return resolve_target(self.target, seq=self.seq, dtype=self._parameter_dtype)

    @property
    def _parameter_dtype(self) -> torch.dtype:
        """The dtype in which a preset's parameters are stored: float32 if a mixed-precision policy casts them."""
        return torch.bfloat16 if self.request.precision is None else torch.float32

    def captured(self, batch: int) -> tuple[Prepared, Graph]:
        """The step captured with a micro-batch of `batch` sequences, in which a few layers stand for all."""
        if self.model.own_batch:
            batch = 0
        if batch not in self._captured:
            self.progress(f"capturing {self.target}")
            target = resolve_target(self.target, batch=batch or None, seq=self.seq, dtype=self._parameter_dtype)
            self._captured[batch] = (target, *self._capture(target))
        return self._captured[batch][1:]

    @property
    def text(self) -> str:
        """The question in a line: `gpt2 on h100x8x1, 8 ranks: batch of 32, 1,024 tokens a sequence, --mesh pp=8`."""
        graph, request = self._posed[0].analysis.graph, self._posed[1]
        sequence = graph.factors.get("seq") if tokens_of(graph) is not None else None
        tokens = f", {sequence.size:,} tokens a sequence" if sequence else ""
        wishes = f", {self.request.text}" if self.request.text else ""
        asked = f"batch of {request.batch:,}{tokens}{wishes}"
        return f"{self.target} on {self.cluster}, {counted(self.cluster.ranks, 'rank')}: {asked}"

    # --- all ways

    @cached_property
    def space(self) -> SettingEstimator:
        """All settings of the captured model on the cluster."""
        prepared, request = self._posed
        self.progress("searching the layouts of every recipe")
        assert request.batch is not None, "the batch of a step is known"
        space = space_of(prepared.analysis.graph, request, request.batch)
        return replace(space, _plans=self._plans)

    def on(self, request: Request, training_state: str | None = None) -> Question:
        """Another question about the same model, which uses the layouts that were searched for this one.

        Args:
            request: the new request, under the same precision.
            training_state: text of the training state; None for the text of this question.
        """
        state = self.training_state if training_state is None else training_state
        return replace(self, request=request, training_state=state)

    def at(self, seq: int) -> Question:
        """The same question with another number of tokens in a sequence."""
        return replace(self, seq=seq, _captured={}, _plans={})

    @cached_property
    def settings(self) -> tuple[PricedCandidate, ...]:
        """Estimates of all settings that the request allows, fastest first.

        Raises AutoparError if there are none, or if the request asks for something that has no estimate.
        """
        check_closed_form(self.request)
        return closed_forms(self.space, self._posed[1])

    def priced(self, settings: Sequence[PricedCandidate]) -> list[PricedCandidate]:
        """The prices for this question of settings of another question with as many ranks; fastest first.

        If recomputation is open, the fewest recomputed layers that fit are computed again.
        """
        space = self.space
        alike = [p.setting for p in settings if p.setting.recompute in space.recomputes]
        found = space.price_of(dict.fromkeys(alike))
        if {"none", "full"} <= {*space.recomputes}:
            found += space.with_fewest_blocks(found, self.bound_bytes)
        return sorted(found, key=lambda each: (each.seconds, each.setting.name))

    @cached_property
    def _posed(self) -> tuple[Prepared, Request]:
        """The captured step, and the request with a known batch size: the arguments of the search."""
        own = self.model.own_batch
        prepared, graph = self.captured(0 if own else EXPLORED_BATCH)
        request = self._asked(graph)
        if not own:
            rows = request.batch or (request.ranks or 1) * (request.micro_batches or 1)
            asked = request.but(batch=rows, cuts_batch=True)
            return with_graph(prepared, graph).skewed(asked.skew), asked.of_replica()
        size, count = captured_batch(graph), request.micro_batches
        if request.batch is not None:
            count = self._own_batches(size)
        asked = request.but(batch=size * (count or 1), micro_batches=count)
        return with_graph(prepared, graph).skewed(asked.skew), asked.of_replica()

    def _own_batches(self, own: int) -> int:
        """Number of micro-batches of a step, if each micro-batch has the `own` rows of the target's example."""
        batch, asked = self.request.batch, self.request.micro_batches
        assert batch is not None, "a batch was asked for"
        if asked is not None and batch == own:
            return asked
        if batch % own:
            raise AutoparError(
                f"A batch of {batch} is not a multiple of the {own} sequences of {self.target}'s own "
                "example inputs; give the function a parameter named batch, or another --batch."
            )
        count = batch // own
        if asked not in (None, count):
            raise AutoparError(
                f"A batch of {batch} is {count} times the {own} sequences of {self.target}'s own "
                f"example inputs, which are a micro-batch, but --micro-batches says {asked}. Leave one of them out."
            )
        return count

    # --- the chosen one

    def answer(self) -> Explanation:
        """The best plan, with the next best ones. Raises SearchError if none fits; the error names remedies.

        In a cluster of several kinds of machines, kinds may be left out (`autopar.explanation.kinds`).
        """
        return best_in_tiles(
            lambda size: self.in_tiles(size)._of_all_kinds(),
            tile_bytes_of(self.request),
            lambda found: (found.graph, found.plan),
            lambda *found: min(found, key=lambda each: each.step_seconds),
        )

    def in_tiles(self, loss_tile_bytes: int | None) -> Question:
        """The same question with a loss in such tiles."""
        if loss_tile_bytes == self.loss_tile_bytes:
            return self
        self.progress("searching again, with the loss in tiles (docs/memory.md)")
        return replace(self, loss_tile_bytes=loss_tile_bytes, _captured={}, _plans={})

    def _of_all_kinds(self) -> Explanation:
        if not self.request.hardware.kinds or self.request.mesh is not None:
            return self._answer()
        prepared, posed = self._posed
        depths, _ = depths_of(prepared.analysis.graph, posed)
        batch = self.request.batch if self.model.own_batch else posed.batch
        return best_of(ways_of(self.request.but(batch=batch), depths), lambda asked: self.on(asked)._answer(False))

    def _answer(self, asks_changes: bool = True) -> Explanation:
        """The best plan on all ranks, by default with what would change the choice."""
        prepared, request = self._posed
        self.progress("searching the plan")
        try:
            # The batch of the target's own may be cut, too; whether the model runs on a part of it is seen in the end.
            found = search_step(prepared, request.but(cuts_batch=True), progress=self.progress)
            if self._needs_whole(found.best.plan):
                found = search_step(prepared, request.of_micro_batches(1), progress=self.progress)
        except SearchError as error:
            is_told = bool(words_of_reserved(request))
            if self.request.mesh is None and has_closed_form(request) and not is_told and self._lacks_memory:
                lacking = StateError if isinstance(error, StateError) else MemoryBoundError
                raise lacking(self.why_nothing_fits()) from None
            raise
        answer = self._advice(found.best.graph, found.best.plan)
        chosen = found.trial.priced
        if chosen is not None and found.explored is not None:
            answer = answer.but(setting=chosen.setting)
            changes = self._changes(found.explored, chosen, answer) if asks_changes else ()
            answer = answer.but(changes=tuple(changes))
        return answer.but(candidates=tuple(self._rows(found, answer)))

    def _rows(self, found: Searched, answer: Explanation) -> Iterator[Candidate]:
        """Rows of the comparison: the chosen plan, other searched plans, and estimates of other settings."""
        pipeline = answer.plan.pipeline
        yield row_of(answer, name_of(answer.plan), idle(answer.simulation) if pipeline else "", "")
        for each in found.best.others[:_OTHERS]:
            yield self._other(each, found.best.graph, answer)
        for planned in found.others:
            yield self._planned(planned, answer)
        yield from self._estimated(found, answer)

    def _estimated(self, found: Searched, answer: Explanation) -> Iterator[Candidate]:
        """Estimates of settings, the best of every mesh, recipe and recomputation.

        On a mesh whose plan was searched those are left out that promise a step as short: the search has not found it.
        The setting of the chosen plan is listed where the search has found a better plan than under its recipes.
        """
        chosen, explored = found.trial.priced, found.explored
        if chosen is None or explored is None:
            return
        known_seconds = {
            str(each.plan.world_mesh): each.price.step_seconds for each in (*reversed(found.others), found.best)
        }
        priced = (*explored.settings, chosen)
        meshes = {each.setting.name: str(each.setting.world_mesh) for each in priced}
        parts = chosen.parts if answer.simulated else seconds_by_cause(answer.step)
        causes = {**parts, ELSEWHERE: answer.step_seconds - sum(parts.values())}
        rows = compared(explored.settings, chosen, self.bound_bytes, found=causes)
        searched = {name_of(each.plan) for each in (found.best, *found.others)}
        for row in rows:
            if row.name in searched:
                continue
            least_seconds = known_seconds.get(meshes[row.name], 0.0) * (1 + AS_FAST)
            if row.step_seconds > least_seconds or not (row.fits or row.chosen):
                yield replace(row, chosen=False, why_not=row.why_not or slower(row.step_seconds, answer.step_seconds))

    def _planned(self, planned: Planned, best: Explanation) -> Candidate:
        """A plan on another mesh as a row of the comparison."""
        price, traffic_bytes, binds = planned.price, *self._traffic_and_cause(planned)
        return Candidate(
            name_of(planned.plan),
            price.step_seconds,
            price.peak_bytes,
            traffic_bytes,
            binds,
            price.peak_bytes <= self.bound_bytes,
            why_not=slower(price.step_seconds, best.step_seconds),
        )

    def _traffic_and_cause(self, planned: Planned) -> tuple[float, str]:
        """Bytes that a rank sends in a step, and the cause that takes most of the step's time."""
        graph, plan, software = planned.graph, planned.plan, self.request.software
        hardware, state = self.cluster.hardware, self._state_of(graph)
        if plan.pipeline is not None:
            simulated = SimulatedStep(graph, plan, hardware, state, software)
            return simulated.traffic_bytes, idle(simulated.simulation)
        step = step_of(graph, plan, hardware, software=software, training_state=state)
        return float(total(step.traffic())), largest_cause(step)

    def explain(self, priced: PricedCandidate) -> Explanation:
        """The explanation of the best plan for a setting, whether or not it fits."""
        setting = priced.setting
        self.progress(f"searching the plan for {setting.name}")
        found = self._searched_in(setting, must_fit=False).best
        return replace(self._advice(found.graph, found.plan), setting=setting)

    def _searched_in(self, setting: ClusterSetting, *, must_fit: bool) -> Searched:
        """The search of a setting, which already satisfies the request's `without`: that is not checked again."""
        prepared, request = self._posed
        return search_step(
            prepared,
            request.but(
                mesh=setting.world_mesh,
                recipe=setting.recipe,
                micro_batches=setting.micro_batches,
                stages=None,
                schedule=setting.schedule or None,
                chunks=None,
                recompute=setting.recompute,
                must_fit=must_fit,
                without=frozenset(),
            ),
        )

    def whole_plan(self, plan: Plan) -> Plan:
        """The plan of an answer with the ops and parameters of all layers, not only of the captured ones.

        `autopar.compile(model, plan=...)` and `autopar.verify` accept it.
        """
        batch = self._posed[1].batch
        assert batch is not None, "the batch of a step is known"
        largest, *_ = sizes_of_micro_batches(batch, plan.micro_batches)
        prepared, graph = self._captured_rows(largest)
        return spoken_of_all_layers(plan, graph, prepared.captured)

    def _needs_whole(self, plan: Plan) -> bool:
        """Whether a plan cuts the target's own batch into micro-batches on which the model does not run alike."""
        prepared, request = self._posed
        count = plan.micro_batches
        if not self.model.own_batch or request.micro_batches is not None or count == 1:
            return False
        assert request.batch is not None, "the batch of a step is known"
        rows = request.batch // count
        return part_of(prepared, lambda: self._captured_rows(rows)[0]) is None

    def _captured_rows(self, rows: int) -> tuple[Prepared, Graph]:
        """The step captured with a micro-batch of this number of rows."""
        if not self.model.own_batch or rows == captured_batch(self.captured(0)[1]):
            return self.captured(rows)
        if rows not in self._captured:
            own = captured_batch(self.captured(0)[1])
            self._captured[rows] = (self.model, *self._capture(self.model, (own, rows)))
        return self._captured[rows][1:]

    def _capture(self, target: Target, rows: tuple[int, int] | None = None) -> tuple[Prepared, Graph]:
        asked = self.request
        return capture_target(
            target,
            rows,
            precision=asked.precision,
            loss_tile_bytes=self.loss_tile_bytes,
            whole=is_saved_option(asked.recompute),  # the inputs that layers save have names
        )

    def _other(self, other: PricedPipeline, graph: Graph, best: Explanation) -> Candidate:
        """Another schedule on the chosen mesh as a row of the comparison."""
        plan, rows = other.plan, captured_batch(graph) * best.plan.micro_batches
        sized = with_batch(graph, rows // plan.micro_batches) if "batch" in graph.factors else graph
        step = SimulatedStep(sized, plan, self.cluster.hardware, self._state_of(graph), self.request.software)
        memory = max(other.balance.rank_bytes) + self.cluster.hardware.reserved_bytes
        return Candidate(
            name_of(plan),
            other.seconds,
            memory,
            step.traffic_bytes,
            idle(other.simulation),
            memory <= self.bound_bytes,
            why_not=slower(other.seconds, best.step_seconds),
        )

    def _advice(self, graph: Graph, plan: Plan) -> Explanation:
        run = run_of(plan, self._state_of(graph))
        plan = replace(
            plan,
            notes=(
                *axis_lines(plan, graph, words_of_factors(graph, self.model.words)),
                *exchange_lines(graph, plan),
                *undivided_lines(graph, plan),
                *kept_notes(plan),
                *self._own_rows(graph, plan),
            ),
        )
        return Explanation(
            graph,
            plan,
            self.cluster,
            run,
            self.request.software,
            self.bound_bytes,
            tokens=tokens_of(graph),
            words=self.model.words,
            request=self.request,
            has_loss_fn=self._posed[0].captured.has_loss_fn,
        )

    def _own_rows(self, graph: Graph, plan: Plan) -> Iterator[str]:
        """Says which batch was taken where none was asked for, or what one row of a smaller example represents."""
        own, count = captured_batch(graph), plan.micro_batches
        if self.request.batch is None and not self.model.own_batch:
            yield f"a batch of {counted(own * count, 'sample')}, as none was asked for: --batch asks for another"
        if self.model.own_batch and self.request.batch is not None and count > 1:
            yield (
                f"The example of {self.target} has {counted(own, 'row')}, which are one micro-batch, so a batch of "
                f"{self.request.batch} is {count} micro-batches. Give the function a parameter named batch, and the "
                "search chooses the rows of a micro-batch."
            )

    def _changes(self, explored: Explored, chosen: PricedCandidate, answer: Explanation) -> Iterator[Change]:
        """The answers on clusters with other figures, such as more memory.

        Args:
            explored: all settings of the request.
            chosen: estimate of the chosen setting.
            answer: the chosen plan.
        """
        self.progress("asking what would change the choice")
        nearest = near(explored.settings, chosen)
        for what, request in faster_clusters(self.request):
            asked = self._with_host(request, answer)
            priced = explored.space.on(asked.cluster).price_of(nearest)
            yield self._on_faster(what, request, answer, chosen, promised_first(priced, asked))
        yield from self._in_larger(explored, chosen, answer)

    @staticmethod
    def _with_host(request: Request, answer: Explanation) -> Request:
        """The request, whose estimates count what the host stores where the plan in hand has something there."""
        return request.but(offload=True) if "host" in answer.stored_bytes else request

    def _on_faster(
        self, what: str, request: Request, answer: Explanation, chosen: PricedCandidate, first: Promise
    ) -> Change:
        """The choice on a faster cluster: this plan, or one of the setting with the best estimate there.

        Where the latter is faster, this plan's setting is searched again, too: on other figures it may have a better
        plan.
        """
        same_seconds = composed(
            answer.graph,
            answer.plan,
            request.hardware,
            software=request.software,
            training_state=self._state_of(answer.graph),
        ).step_seconds
        kept = Change(what, same_seconds, chosen.setting.name, same_seconds)
        if first.priced is None or first.priced.setting == chosen.setting:
            return kept
        there = self.on(request)
        other_seconds = there._seconds_of(first, same_seconds)
        if other_seconds == math.inf:
            return kept
        own_seconds = min(same_seconds, _step_seconds(lambda: there._searched_in(chosen.setting, must_fit=True)))
        if own_seconds <= other_seconds:
            return replace(kept, best_seconds=own_seconds)
        return replace(kept, best=first.priced.setting.name, best_seconds=other_seconds)

    def _in_larger(self, explored: Explored, chosen: PricedCandidate, answer: Explanation) -> Iterator[Change]:
        """The larger memories with which a setting is faster that does not fit today, nor into the one before.

        A setting that fits today is no news of more memory, even where its estimate is lower.
        """
        overfull = [each for each in explored.settings if each.memory_bytes > self.bound_bytes]
        best, best_seconds = chosen.setting, answer.step_seconds
        for what, request in larger_memories(self.request):
            first = promised_first(overfull, self._with_host(request, answer))
            if first.priced is not None and first.priced.setting != best:
                seconds = self.on(request)._seconds_of(first, best_seconds)
                if seconds < best_seconds:
                    best, best_seconds = first.priced.setting, seconds
                    yield Change(what, answer.step_seconds, best.name, best_seconds)

    def _seconds_of(self, first: Promise, known_seconds: float) -> float:
        """Seconds of the best plan for a setting; infinite where none fits and takes less than is known."""
        if first.priced is None or first.seconds >= known_seconds:
            return math.inf
        setting = first.priced.setting
        found = _step_seconds(lambda: self._searched_in(setting, must_fit=True))
        return found if found < known_seconds else math.inf

    @property
    def _lacks_memory(self) -> bool:
        """Whether memory is why there is no plan, and not, say, more stages than the model has blocks."""
        least = smallest(self.settings)
        return bool(words_of_reserved(self.request)) or least.memory_bytes > self.bound_bytes

    def why_nothing_fits(self) -> str:
        """Sentences on how much memory the smallest setting lacks, and on remedies."""
        if words := words_of_reserved(self.request):
            return words
        least, bound = smallest(self.settings), self.bound_bytes
        over, reserved_bytes = least.memory_bytes - bound, self.cluster.hardware.reserved_bytes
        held_bytes = (least.memory_bytes - reserved_bytes) * self.cluster.ranks
        per_node = self.cluster.devices_per_node
        nodes = math.ceil(held_bytes / (bound - reserved_bytes) / per_node)
        return (
            f"{self.target} does not fit on {self.cluster}: the smallest way found, "
            f"{least.setting.name}, takes {least.memory_bytes / 1e9:.1f} GB of a rank, "
            f"{over / 1e9:.1f} GB ({over:,.0f} bytes) more than the {bound / 1e9:.1f} GB there are. "
            f"What would help: about {counted(nodes, 'node')} of {counted(per_node, 'rank')}, a smaller batch or "
            "shorter sequences, or devices with more memory (`autopar fit` prices them)."
        )


def _step_seconds(search: Callable[[], Searched]) -> float:
    """Seconds of a step of the plan that a search finds; infinite where it finds none."""
    try:
        return search().best.price.step_seconds
    except AutoparError:  # the estimate was too low, or its recipe contradicts something else
        return math.inf
