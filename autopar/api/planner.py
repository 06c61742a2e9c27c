"""Programs for a compiled module: captured, planned once for all ranks, planned again for other shapes."""

from __future__ import annotations

import functools
import platform
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.api.announcing import (
    announce,
    start_line,
    warn_of_idle_axes,
    warn_of_loss,
    warn_of_repeated_work,
    warn_of_shape,
    warn_of_unasked_stages,
    warn_of_unused_folder,
)
from autopar.api.machine import words_of_device
from autopar.api.placed import goes_on, with_unused
from autopar.capture.captured import Captured
from autopar.capture.export import LossFunction, capture_forward, capture_step
from autopar.capture.guards.guards import Guards
from autopar.capture.open_sizes import OpenDims
from autopar.errors import MeshError, PlanError, RecipeError, SearchError
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, Plan, without_pipeline
from autopar.ir.batches import first_smaller
from autopar.pipeline.composed import composed, step_of, stored_bytes
from autopar.pipeline.saved_values import possible_lines
from autopar.pipeline.schedules import check_micro_batches, takes, unbounded
from autopar.planning.likeness import likeness_of_model, model_lines
from autopar.planning.loss_tiles import best_in_tiles, in_tiles, in_tiles_if_needed, tile_bytes_of
from autopar.planning.planning import (
    Prepared,
    are_given_by_micro_batches,
    has_no_rows,
    has_same_ops,
    in_parts,
    in_unequal_parts,
    make_plan,
    part_that_keeps_results,
    plan_again,
    prepare_whole,
    prepared_of,
    refuse_no_batch,
    refuse_sum,
    unsplit_plan,
)
from autopar.planning.remarks import with_remarks
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures
from autopar.planning.stored_plans import StoredPlans
from autopar.program.program import build_program, with_smaller
from autopar.program.recomputation import known_recomputation
from autopar.program.stages import cut_stages, cuts_where_parameters_lie, refuse_strays, stages_with_smaller
from autopar.program.term_shares import refuse_unknown
from autopar.runtime.model.program_builder import Fixed, ProgramRequest, Programs, StandIns
from autopar.runtime.parameters.stage_partition import Users, users_of
from autopar.runtime.ranks.all_ranks import AllRanks, warn_together
from autopar.runtime.ranks.files import Files
from autopar.runtime.ranks.processes import agreed, make_world, refuse_unlike, world_size
from autopar.runtime.ranks.tiers import Tiers
from autopar.runtime.ranks.world import World, set_timeout
from autopar.search.candidates.refined import with_inner_axes
from autopar.search.candidates.trials import asks_for_no_stages, is_small
from autopar.search.request.request import Request
from autopar.units import counted


class Planner:
    """Makes programs, one plan for all ranks, and the mesh they run on."""

    def __init__(
        self,
        request: Request,
        *,
        loss_fn: LossFunction | None,
        plan: Plan | None,
        device: torch.device,
        device_mesh: DeviceMesh | None,
        timeout_seconds: float | None,
        assumed: Sequence[str] = (),
        files: Files | None = None,
        stored: StoredPlans | None = None,
    ) -> None:
        """Takes what was asked; the process group exists by now.

        Args:
            request: what is asked of a plan; with replicas, of one of them.
            loss_fn: the loss function of a step; None where the model returns its loss.
            plan: the plan that was given; None to search one.
            device: where this rank computes.
            device_mesh: the mesh that was given as processes, if it was.
            timeout_seconds: how long a collective waits for the other ranks; None for the group's time.
            assumed: notes on what was assumed, for the plan.
            files: where this rank keeps tensors of the tier nvme; None where no folder was named.
            stored: plans that earlier starts have searched; None where they are not kept.
        """
        self._files, self._stored = files, stored or StoredPlans(None)
        self.device, self._request, self._assumed = device, request, tuple(assumed)
        self._loss_fn, self._plan = loss_fn, plan
        self._loss_tile_bytes = None if plan is None else plan.loss_tile_bytes
        self._timeout_seconds, self._device_mesh = timeout_seconds, device_mesh
        self._mesh = request.mesh  # of the ranks that train one model in step
        self._world: World | None = None
        self._first: Prepared | None = None
        self._first_rows: int | None = None  # of the first step, where its micro-batches differ in size
        self._made: dict[bool, list[Plan]] = {True: [], False: []}  # of steps, of forwards

    def device_mesh(self) -> DeviceMesh | None:
        """A mesh over all ranks: that of the plan if its shape is known, else of one axis.

        With pipeline stages it is the mesh of one, on which tensors lie that all stages have alike.
        """
        if self._mesh is not None:
            found = self.world().device_mesh
            return found.plain if isinstance(found, _torch.StageMesh) else found
        return make_world(Mesh((("all", world_size()),)), self.device, None).device_mesh

    def program(self, model: nn.Module, stand_ins: StandIns, asked: ProgramRequest) -> Programs:
        """Captures and plans a model, see `ProgramBuilder`."""
        find = functools.partial(self._planned, model, stand_ins, asked)
        if self._plan is not None or self._loss_tile_bytes is not None:
            found = find(self._loss_tile_bytes)
        elif asked.is_step and not self._made[True]:
            found = best_in_tiles(find, tile_bytes_of(self._request), _Planned.graph_and_plan, self._faster)
        else:
            found = in_tiles_if_needed(find, tile_bytes_of(self._request))
        if asked.is_step and self._loss_tile_bytes is None:
            self._loss_tile_bytes = found.plan.loss_tile_bytes
        smaller = found.smaller
        if smaller is not None and self._first is None:
            self._first_rows = smaller.rows
        programs = self._programs(found.prepared, found.plan, found.batch)
        if smaller is not None:
            users = users_of(model, programs.stages)
            programs = self._with_smaller(programs, smaller.capture(), found.batch, smaller.first, users)
        if asked.fixed is not None and asked.fixed.pipeline is not None:
            refuse_strays(programs.stages, asked.fixed.users)
        return programs

    def _planned(
        self, model: nn.Module, stand_ins: StandIns, asked: ProgramRequest, loss_tile_bytes: int | None
    ) -> _Planned:
        """A model and its plan, with a loss in such tiles.

        An open number of micro-batches is found for the whole batch. Where the number is not 1, the model is captured
        for a micro-batch and for the batch, which shows what of the step counts rows (`autopar.analysis.row_counts`).
        Where the last micro-batches are smaller, they have a capture and a program of their own.
        """
        micro_batches, is_step = asked.micro_batches, asked.is_step
        is_tried = loss_tile_bytes != self._loss_tile_bytes
        keeps_open = self._keeps_open_number(asked)

        # Not a function with a cache of `functools`: where one was made, captures look for it among all objects.
        known: dict[tuple[int, int], Prepared] = {}

        def captured(count: int, number: int = 0) -> Prepared:
            if (count, number) not in known:
                shapes = asked.shapes(count, number)
                capture = functools.partial(self._capture, model, functools.partial(stand_ins, count, number), asked)
                found = asked.captures.captured(count, shapes, capture, is_smaller=number > 0)
                # Another loss of the model may have no logits, and a forward no loss.
                found = in_tiles(found, loss_tile_bytes, must=is_tried)
                differentiable = frozenset(name for i, name in enumerate(found.inputs) if i in asked.differentiable)
                made = prepared_of(replace(found, differentiable=differentiable)).skewed(self._request.skew)
                known[count, number] = made
            return known[count, number]

        _refuse_unlike_models(functools.partial(captured, 1 if keeps_open else micro_batches or 1))
        if micro_batches is None and asked.fixed is not None:
            micro_batches = self._best_count(captured)
        count = micro_batches or 1
        if count > 1 and keeps_open:
            batch = captured(1)
            part = _part_in_all_sizes(batch, captured, asked.rows(count))
            prepared = part or batch
            count = micro_batches = 1 if part is None else count
        else:
            prepared, batch = self._part_and_batch(captured, count)
        if self._request.meeting is not None and is_step and self._first is None:
            refuse_sum(prepared, self._request.meeting, lambda: captured(2 * count))
        is_unequal = bool(first_smaller(asked.rows(count)))
        plan = agreed(lambda: self._chosen(prepared, micro_batches, asked.fixed, is_step, is_unequal))
        if is_step and self._request.micro_batches is None and plan.micro_batches != count:
            prepared, plan = in_parts(plan, batch, captured, functools.partial(self._searched, fixed=asked.fixed))
        plan = with_remarks(plan, prepared.analysis.graph, self._request)
        rows = asked.rows(plan.micro_batches)
        first = first_smaller(rows)
        if not first:
            return _Planned(prepared, plan, batch)
        refuse_no_batch(prepared, batch)
        smaller = functools.partial(captured, plan.micro_batches, first)
        return _Planned(prepared, in_unequal_parts(plan, rows), batch, _Smaller(sum(rows), first, smaller))

    def _faster(self, a: _Planned, b: _Planned) -> _Planned:
        """The one with the shorter step by the first rank's prices; of two that are equal the first."""

        def seconds(found: _Planned) -> float:
            return composed(*found.graph_and_plan(), **self._request.figures).step_seconds

        plan = agreed(lambda: min(a, b, key=seconds).plan)
        return a if plan.loss_tile_bytes == a.plan.loss_tile_bytes else b

    def _keeps_open_number(self, asked: ProgramRequest) -> bool:
        """Whether a step without stages has the number of micro-batches of an earlier one, and nobody asked for it."""
        if asked.fixed is None or asked.fixed.pipeline is not None:
            return False
        return asked.micro_batches is not None and self._request.micro_batches is None

    def _part_and_batch(self, captured: Callable[[int], Prepared], count: int) -> tuple[Prepared, Prepared]:
        """The model for one of this many micro-batches, and for the batch."""
        part = captured(count)
        if count == 1:
            return part, part
        warn = functools.partial(warn_together, stacklevel=3)
        return part, prepare_whole(lambda: captured(1), part, warn)

    def _best_count(self, captured: Callable[[int], Prepared]) -> int:
        """The best number of micro-batches of a step that comes after a forward; 1 where these change its results."""
        if self._mesh is not None and PIPELINE_AXIS not in self._mesh.names:
            return 1
        batch = captured(1)
        count = agreed(lambda: self._search(batch, None, captured=1)).micro_batches
        return count if count == 1 or are_given_by_micro_batches(captured(count), batch) else 1

    def _capture(
        self,
        model: nn.Module,
        stand_ins: Callable[[], AbstractContextManager[Any]],
        asked: ProgramRequest,
        open_dims: OpenDims,
    ) -> Captured:
        precision, loss_fn = self._request.precision, self._loss_fn if asked.is_step else None
        options = precision, asked.numbers, open_dims
        with stand_ins() as (args, kwargs):
            if asked.is_step:
                capture = functools.partial(capture_step, model, args, kwargs, loss_fn, *options)
            else:
                capture = functools.partial(capture_forward, model, args, kwargs, *options)
            if asked.numbers:  # the capture depends on numbers before they changed, too
                return capture()
            question = CaptureQuestion(model, args, kwargs, loss_fn, asked.is_step, precision, open_dims)
            return StoredCaptures(self._stored.folder).captured(question, capture)

    def _chosen(
        self, prepared: Prepared, micro_batches: int | None, fixed: Fixed | None, is_step: bool, is_unequal: bool
    ) -> Plan:
        count, given = micro_batches or 1, self._plan
        if given is not None and (is_step or fixed is None):
            is_its_model = given.fingerprint == prepared.captured.fingerprint
            if is_its_model and (fixed is None or goes_on(given, fixed, count, prepared)):
                return given
            if fixed is None:
                return self._beside(given, prepared, is_step)
        if fixed is not None:
            is_open = is_step and self._request.micro_batches is None and not is_unequal
            return self._following(prepared, fixed, count, is_step=is_step, is_open=is_open)
        # A script that calls model(...) before `step`, and has no loss_fn, has a training loop of its own.
        with_stages = (is_step or self._loss_fn is not None) and not self._saves_effort(prepared)
        return self._search(prepared, micro_batches if is_step else None, captured=count, with_stages=with_stages)

    def _beside(self, given: Plan, prepared: Prepared, is_step: bool) -> Plan:
        """A plan of a forward that comes before the step that a plan was given for, with its parameters.

        Of another model it is the given plan, which the program is then refused for.
        """
        if is_step or not given.parameters.keys() >= prepared.analysis.graph.parameters.keys():
            return given
        if given.pipeline is not None:
            raise PlanError(
                "The plan has pipeline stages, and model(...) was called before the first step. Give "
                "example_inputs=... to autopar.compile, so that the stages are set up at once, or call step first."
            )
        fixed = Fixed(given.parameters, None, given.recompute, {}, given.saved)
        return self._following(prepared, fixed, 1, is_step=False, is_open=False)

    def _programs(self, prepared: Prepared, plan: Plan, batch: Prepared) -> Programs:
        is_step = prepared.captured.is_step
        if is_step and plan.pipeline is not None:
            check_micro_batches(plan.pipeline, plan.micro_batches)
        program = build_program(prepared.captured, prepared.analysis, plan, batch.whole)
        if is_step:
            refuse_unknown(program.objective, plan.micro_batches)
        if is_step and program.objective.normalizes:
            warn_of_loss(program.objective.obstacle, plan.micro_batches)
        stages = cut_stages(program, prepared.analysis.graph)
        if self._first is None:
            self._check_files(prepared, plan)
            if plan.replica_mesh != self._mesh:
                self._world = None  # of a mesh whose axes the plan has refined
            self._first, self._mesh = prepared, plan.replica_mesh
            self._announce(plan)
        if all(plan.ops != made.ops for made in self._made[is_step]):
            self._made[is_step].append(plan)
        captured = prepared.captured
        return Programs(program, stages, captured.guards, batch.captured.writes, captured.numbers)

    def _with_smaller(
        self, programs: Programs, smaller: Prepared, batch: Prepared, first: int, users: Users
    ) -> Programs:
        """The programs with those of the last micro-batches, from number `first` on, which have fewer rows.

        They make the choices of the plan where these are legal, and others where they are not: one row is not split.
        """
        plan = programs.whole.plan

        def chosen() -> Plan:
            fixed = Fixed(plan.parameters, plan.pipeline, plan.recompute, users, plan.saved)
            again = plan_again(plan, smaller, plan.micro_batches)
            return again or self._search_anew(smaller, fixed, plan.micro_batches, is_open=False)

        less = build_program(smaller.captured, smaller.analysis, agreed(chosen), batch.whole)
        stages = cut_stages(less, smaller.analysis.graph)
        refuse_strays(stages, users)
        whole = with_smaller(programs.whole, less, first)
        return replace(
            programs,
            whole=whole,
            stages=[whole] if plan.pipeline is None else stages_with_smaller(programs.stages, stages, first),
            guards=Guards((*programs.guards, *smaller.captured.guards.without(each.place for each in programs.guards))),
            numbers=(*programs.numbers, *smaller.captured.numbers),
        )

    def _check_files(self, prepared: Prepared, plan: Plan) -> None:
        """Raises AutoparError on all ranks where one has no room for what the plan keeps in files."""
        if all(how.tier != "nvme" for how in plan.parameters.values()):
            if self._files is not None:
                warn_of_unused_folder(self._files, plan)
            return
        request = self._request
        needed_bytes = stored_bytes(prepared.analysis.graph, plan, **request.figures, tier="nvme")
        together = AllRanks("Keeping parameters in files")

        def check(files: Files, disks: Sequence[tuple[str, int]]) -> None:
            files.check(needed_bytes, disks.count(disks[together.rank]))

        files = together.each(lambda: Tiers(self.device, self._files).files)
        disks = together.everyones((platform.node(), files.disk))
        together.each(lambda: check(files, disks))

    def _announce(self, plan: Plan) -> None:
        """On the first rank: what was chosen, what it is predicted to take, and where it runs."""
        if self.world().rank == 0:
            announce(lambda: self._start_line(plan), plan.notes)

    def _start_line(self, plan: Plan) -> str:
        line = start_line(plan, self._request, self._plan is not None, self.predicted(plan))
        return f"{line}; {words_of_device(self.device)}"

    def predicted(self, plan: Plan) -> tuple[float, float]:
        """Predicted seconds of a step and peak bytes of a rank, of the plan of the first program."""
        assert self._first is not None, "a plan was made for a program"
        request = self._request
        found = composed(self._first.analysis.graph, plan, **request.figures)
        return found.step_seconds, found.peak_bytes

    def _searched(self, prepared: Prepared, count: int, *, fixed: Fixed | None) -> Plan:
        """A plan for a step of this many micro-batches, of which `prepared` is one; the same on all ranks."""
        if fixed is not None:
            return agreed(lambda: self._following(prepared, fixed, count, is_step=True, is_open=False))
        return agreed(lambda: self._search(prepared, count, captured=count))

    def _search(
        self, prepared: Prepared, micro_batches: int | None, *, captured: int, with_stages: bool = True
    ) -> Plan:
        """The best plan; where nobody asks for stages, and without `with_stages`, one that has them only if it must.

        A loop of the script's own may save the state dict, which is that of one stage where there are stages.
        """
        request = self._request.of_micro_batches(micro_batches).but(mesh=self._mesh)

        def search(asked: Request) -> Plan:
            return self._stored.plan(make_plan, prepared, asked, captured_micro_batches=captured)

        if with_stages or self._mesh is not None or not asks_for_no_stages(request):
            plan = search(request)
        else:
            try:
                plan = search(request.but(stages=(1,)))
            except (MeshError, RecipeError, SearchError):
                plan = search(request)
        if self._mesh is not None:
            warn_of_idle_axes(plan)
        warn_of_repeated_work(plan)
        warn_of_unasked_stages(plan)
        if world_size() == 1:  # there may be no process group, which stages communicate by
            plan = replace(plan, pipeline=None)
        return replace(plan, notes=(*plan.notes, *self._assumed))

    def _saves_effort(self, prepared: Prepared) -> bool:
        """Whether stages are searched only where nothing else fits: what they may gain repays no search.

        Of a step that takes milliseconds they save little in the minute after which a search has to be repaid: a
        transformer of 0.14 million parameters on four ranks 4 %, for half of the search's time. Who names the hardware
        asks about a machine, which need not be this one.
        """
        request = self._request
        is_named = not self._assumed or request.ranks is None or self._mesh is not None
        return not is_named and is_small(prepared.analysis.graph, request)

    def _following(self, prepared: Prepared, fixed: Fixed, micro_batches: int, *, is_step: bool, is_open: bool) -> Plan:
        """A plan for another graph of the model, or other shapes; its parameters stay where they lie.

        The choices of an earlier plan are taken again where they are legal, so that nothing is searched. Where one has
        to be searched and `is_open`, it may have another number of micro-batches.
        """
        earlier = self._made[is_step]
        plan = next(
            (
                again
                for p in earlier
                if (again := plan_again(p, prepared, micro_batches)) and self._has_room(again, prepared)
            ),
            None,
        )
        if plan is None:
            plan = self._search_anew(prepared, fixed, micro_batches, is_open=is_open)
            alike = [p for p in earlier if has_same_ops(p, prepared)]
            if alike:
                warn_of_shape(alike[0], plan, prepared)
        if plan.pipeline is None or fixed.pipeline is None:
            return plan
        pipeline = replace(fixed.pipeline, cuts=plan.pipeline.cuts)
        if is_step and pipeline.update_every:
            check_micro_batches(pipeline, micro_batches)  # another schedule would train another model
        if is_step and not takes(pipeline, micro_batches):
            pipeline = unbounded(pipeline)
            warnings.warn(
                f"This batch can be cut into {counted(micro_batches, 'micro-batch')}, which the schedule "
                f"{fixed.pipeline.schedule} does not take; it is run by {pipeline.schedule}.",
                stacklevel=2,
            )
        return replace(plan, pipeline=pipeline)

    def _has_room(self, plan: Plan, prepared: Prepared) -> bool:
        """Whether the plan fits into memory; stages and recomputation were sized for the first batch."""
        if plan.pipeline is not None or plan.recompute != "none":
            return True
        request = self._request
        step = step_of(prepared.analysis.graph, plan, **request.figures, with_items=False)
        return step.peak_bytes() <= request.bound_bytes

    def _search_anew(self, prepared: Prepared, fixed: Fixed, micro_batches: int, *, is_open: bool) -> Plan:
        """A plan with the parameters where they lie; an open number of micro-batches is searched, without stages."""
        assert self._mesh is not None, "there was a first program"
        mesh, graph = without_pipeline(self._mesh), prepared.analysis.graph
        parameters = with_unused(fixed.parameters, prepared, mesh)
        if fixed.pipeline is None and has_no_rows(prepared):
            return replace(unsplit_plan(prepared, mesh, parameters, micro_batches), meeting=self._request.meeting)
        count = None if is_open and fixed.pipeline is None else micro_batches
        request = self._request.of_micro_batches(count).but(
            mesh=mesh,
            recipe=with_inner_axes(self._request.inside, mesh, self._request.mesh),
            pins={},
            schedule=None,
            chunks=None,
            recompute=None,
            must_fit=fixed.pipeline is None and fixed.recompute == "none",
        )

        def search(asked: Request) -> Plan:
            return self._stored.plan(
                make_plan, prepared, asked, fixed_storage=parameters, captured_micro_batches=micro_batches
            )

        try:
            plan = search(request)
        except (MeshError, RecipeError, SearchError):
            try:
                # The parameters lie as the recipe has it; this graph need not.
                plan = search(request.but(recipe="auto"))
            except MeshError:  # an axis divides nothing any more
                plan = unsplit_plan(prepared, mesh, parameters, micro_batches)
                plan = replace(plan, meeting=request.meeting)
        plan = replace(plan, recompute=fixed.recompute)
        if fixed.pipeline is not None:
            cuts = cuts_where_parameters_lie(graph, fixed.users, fixed.pipeline.stages)
            plan = replace(plan, pipeline=replace(fixed.pipeline, cuts=cuts))
        plan = replace(plan, recompute=known_recomputation(plan, graph), saved=fixed.saved)
        return replace(plan, saved=possible_lines(graph, plan))

    def world(self) -> World:
        """The process groups of the mesh; available once there is a first program."""
        if self._world is None:
            assert self._mesh is not None, "the mesh is known once there is a program"
            made = make_world(self._mesh, self.device, self._device_mesh, self._timeout_seconds, self._request.meeting)
            self._world = replace(made, files=self._files)
            if self._timeout_seconds is not None:
                set_timeout(self._world, self._timeout_seconds)
        return self._world

    def explain(self, plan: Plan) -> Explanation:
        """The plan of the first program for people, with what it costs."""
        assert self._first is not None, "a plan was made for a program"
        request = self._request.but(batch=self._first_rows) if self._first_rows else self._request
        return _explained(self._first.analysis.graph, plan, request)


def _part_in_all_sizes(
    batch: Prepared, captured: Callable[[int, int], Prepared], rows: Sequence[int]
) -> Prepared | None:
    """The step for the first micro-batch, by the rows of each; None where those of some size change results."""
    numbers = sorted({0, first_smaller(rows)})
    parts = [part_that_keeps_results(batch, functools.partial(captured, len(rows), each)) for each in numbers]
    return parts[0] if all(parts) else None


@dataclass(frozen=True)
class _Smaller:
    """Micro-batches with fewer rows than those before them.

    Attributes:
        rows: rows of the batch.
        first: number of the first of them.
        capture: function to the model for one of them.
    """

    rows: int
    first: int
    capture: Callable[[], Prepared]


@dataclass(frozen=True)
class _Planned:
    """A model with its plan.

    Attributes:
        prepared: the model for a micro-batch of the plan.
        plan: the plan.
        batch: the model for the whole batch.
        smaller: the last micro-batches, where they have fewer rows than the first.
    """

    prepared: Prepared
    plan: Plan
    batch: Prepared
    smaller: _Smaller | None = None

    def graph_and_plan(self) -> tuple[Graph, Plan]:
        """What the price depends on."""
        return self.prepared.analysis.graph, self.plan


def _refuse_unlike_models(capture: Callable[[], Prepared]) -> None:
    """Captures the model; raises MeshError, on all ranks with one sentence, where a rank has another, or has none."""
    found: Prepared | Exception
    try:
        found = capture()
    except Exception as error:  # whatever the model itself raises
        found = error
    refuse_unlike(likeness_of_model(found), lambda: model_lines(found))
    if isinstance(found, Exception):
        raise found


def _explained(graph: Graph, plan: Plan, request: Request) -> Explanation:
    return Explanation(
        graph,
        plan,
        request.cluster,
        run_of(plan, request.training_state),
        memory_bound_bytes=request.bound_bytes,
        request=request,
    )
