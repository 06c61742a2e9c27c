"""From a module to a plan: capture, clean up, analyze, search. Needs no process group and no device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.analysis.extras import extras_of
from autopar.analysis.factors import Analysis, analyze
from autopar.analysis.objective import BatchCapture, objective_of
from autopar.analysis.skew import with_skew
from autopar.capture.captured import Captured
from autopar.capture.export import LossFunction, capture_forward, capture_step
from autopar.capture.guards.guards import Place
from autopar.errors import AutoparError, PlanError, RecipeError, SearchError, StepError, first_line
from autopar.ir import (
    UNSPLIT,
    Graph,
    Labels,
    Meeting,
    Mesh,
    MixedPrecision,
    Op,
    ParameterPlan,
    Plan,
    R,
    State,
    is_legal,
    owner_of,
    plain,
)
from autopar.ir.batches import captured_batch, first_smaller, sizes_of_micro_batches
from autopar.ir.note import Note, kind_of
from autopar.ir.recompute import RecomputeOption
from autopar.passes import clean_up
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.parts import count_repeating
from autopar.pipeline.saved_values import possible_lines
from autopar.planning.duration import words_if_long
from autopar.planning.garbage import collecting_rarely
from autopar.planning.loss_tiles import in_tiles
from autopar.planning.remarks import with_remarks
from autopar.planning.undivided import undivided_lines
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.trials import Searched
from autopar.search.request.request import Progress, Request, silent
from autopar.units import counted

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class Prepared:
    """A captured, cleaned and analyzed model."""

    captured: Captured
    analysis: Analysis

    @property
    def whole(self) -> BatchCapture:
        """This capture, used as that of the whole batch, for comparison with the capture of a micro-batch."""
        return BatchCapture(self.captured, self.analysis.graph)

    def skewed(self, skew: float) -> Prepared:
        """The same model with skewed routing to its experts, see `autopar.analysis.skew`."""
        return replace(self, analysis=replace(self.analysis, graph=with_skew(self.analysis.graph, skew)))


@collecting_rarely()
def prepare_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    precision: MixedPrecision | None = None,
    numbers: Sequence[Place] = (),
    loss_tile_bytes: int | None = None,
) -> Prepared:
    """Captures forward and loss of one micro-batch; arguments as in `capture_step`, and `in_tiles`.

    Raises CaptureError or StepError.
    """
    captured = capture_step(model, args, dict(kwargs or {}), loss_fn, precision, numbers)
    clean_up(captured.module)
    return prepared_of(in_tiles(captured, loss_tile_bytes))


def prepared_of(captured: Captured) -> Prepared:
    """The analysis of a cleaned capture. Raises StepError for a step that trains nothing."""
    prepared = Prepared(captured, analyze(captured))
    graph = prepared.analysis.graph
    if captured.is_step and not graph.tensors[graph.outputs[-1]].needs_grad:
        raise StepError(
            "No gradient flows from the loss to any parameter: all are frozen or detached, or are used by a "
            "torch.utils.checkpoint with use_reentrant=True none of whose inputs requires a gradient. Give it "
            "use_reentrant=False, which takes gradients to parameters in any case."
        )
    return prepared


def prepare_whole(capture: Callable[[], Prepared], part: Prepared, warn: Callable[[str], object]) -> Prepared:
    """Captures the step for the whole batch; where the capture raises, warns and returns `part`.

    It may raise because the model's code contains the number of rows of a micro-batch, such as `x.reshape(4, -1)`. The
    caller compares the two captures to find the numbers that count rows (`autopar.analysis.row_counts`); with `part` as
    both, none are found.

    Args:
        capture: function that captures the step for the whole batch; every exception that it raises is caught.
        part: captured step for one micro-batch.
        warn: function that is called with the text of the warning.
    """
    try:
        return capture()
    except Exception as error:  # whatever the model's own code raises at that size
        warn(
            f"The model runs on a micro-batch but not on the whole batch ({first_line(error)}), so that it shows no "
            "number that counts rows: in the loss, such as / len(targets), it is taken for that of the whole batch."
        )
        return part


@collecting_rarely()
def prepare_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: MixedPrecision | None = None,
    numbers: Sequence[Place] = (),
) -> Prepared:
    """Captures the forward alone; arguments as in `capture_forward`. Raises CaptureError."""
    captured = capture_forward(model, args, dict(kwargs or {}), precision, numbers)
    clean_up(captured.module)
    return prepared_of(captured)


def policy_of(asked: MixedPrecision | str | None, plan: Plan | None = None) -> MixedPrecision | None:
    """The mixed-precision policy that the user asks for, or that of a plan. Raises AutoparError if they differ."""
    policy = MixedPrecision.of(asked)
    if plan is None or policy == plan.precision:
        return policy
    if policy is None:
        return plan.precision
    raise AutoparError(
        f"The plan was made for the precision {plan.precision or 'of the parameters'}, but precision={str(policy)!r} "
        "was asked for; leave it out, or make another plan."
    )


def make_plan(
    prepared: Prepared,
    request: Request,
    *,
    captured_micro_batches: int | None = None,
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """Searches a plan; without a mesh in the request, the mesh is searched, too.

    Args:
        prepared: the captured model, with the rows of one micro-batch if the request has a number of micro-batches.
        request: the user's wishes.
        captured_micro_batches: number of captured batches that make up a step; by default the request's
            number of micro-batches.
        fixed_storage: layouts of parameters that are placed already, by name.

    Raises MeshError, RecipeError or SearchError where no plan can be made, and PlanError for
    recomputation of more blocks than the model has.
    """
    return search_step(
        prepared, request, captured_micro_batches=captured_micro_batches, fixed_storage=fixed_storage
    ).best.plan


@collecting_rarely()
def search_step(
    prepared: Prepared,
    request: Request,
    *,
    captured_micro_batches: int | None = None,
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
    progress: Progress = silent,
) -> Searched:
    """The search of `make_plan`; returns the plan with its price, and the other plans that were found.

    It calls `progress` with a line of text for every setting that it begins to search.
    """
    graph = prepared.analysis.graph
    request = _that_keeps_results(prepared, request, captured_micro_batches or 1)
    if fixed_storage is None:
        _refuse_more_blocks(graph, request.recompute)
    if long := words_if_long(graph, request):
        log.warning(long)
    try:
        found = search_plan(
            graph,
            request,
            fingerprint=prepared.captured.fingerprint,
            fixed_storage=fixed_storage,
            captured_micro_batches=captured_micro_batches or request.micro_batches or 1,
            progress=progress,
        )
    except SearchError as error:
        if captured_batch(graph):
            raise
        raise SearchError(
            "The first batch has no rows, of which no plan can split any. Plan with one that has rows, by "
            "model.prepare(*batch) or example_inputs= of compile; calls without rows then run, too."
        ) from error
    best = found.best
    plan = with_remarks(_finished(best.plan, best.graph, prepared), best.graph, request)
    if request.batch is not None and request.batch % plan.micro_batches:
        plan = in_unequal_parts(plan, sizes_of_micro_batches(request.batch, plan.micro_batches))
    return found._replace(best=best._replace(plan=plan))


def _refuse_more_blocks(graph: Graph, recompute: RecomputeOption | None) -> None:
    if not isinstance(recompute, int) or not has_blocks(graph):
        return
    count = count_repeating(graph)
    if recompute > count:
        raise PlanError(
            f"recompute={recompute} was asked for, but the model has {counted(count, 'block')} that can "
            f"be recomputed: ask for at most {count} of every stage, or for 'full', which is all of them."
        )


def _finished(plan: Plan, graph: Graph, prepared: Prepared) -> Plan:
    if plan.micro_batches > 1:
        _check_batch_first(graph, plan.micro_batches)
    elif plan.meeting is not None:
        _check_batch_first(graph, 1)
    plan = take_parts(plan, graph)
    said = (*plan.notes, *undivided_lines(graph, plan), *prepared.captured.forms)
    return replace(plan, notes=said, shapes=graph.edge_shapes, dtypes=_edge_dtypes(prepared))


def _edge_dtypes(prepared: Prepared) -> dict[str, str]:
    """Dtypes of the inputs and parameters of a graph, in which a few layers may stand for all that were captured."""
    dtypes = prepared.captured.edge_dtypes
    return {name: dtypes[name] for name in prepared.analysis.graph.edge_shapes}


def _check_batch_first(graph: Graph, micro_batches: int) -> None:
    """Micro-batches are parts of dim 0 of every input: PlanError where that is not the batch and another dim is."""
    elsewhere = _batch_elsewhere(graph)
    if elsewhere:
        name, dim = elsewhere
        shape = list(graph.tensors[graph.inputs[name]].shape)
        parts = counted(micro_batches, "micro-batch") if micro_batches > 1 else "Batches of replicas"
        raise PlanError(
            f"{parts} are parts of dim 0 of every input, but the batch "
            f"of {name} of shape {shape} is dim {dim}: take one (micro_batches=1), or put the "
            "samples into dim 0 (batch_first=True in torch.nn; the states of a recurrent layer have them in dim 1)."
        )


def _is_changed_by_micro_batches(prepared: Prepared) -> bool:
    """Whether a result of a batch cannot be computed from those of its micro-batches, as with batch statistics.

    A batch of one row cannot be cut.
    """
    captured, graph = prepared.captured, prepared.analysis.graph
    if not captured.is_step or captured_batch(graph) <= 1:
        return False
    return not are_given_by_micro_batches(prepared, prepared)


def _that_keeps_results(prepared: Prepared, request: Request, captured: int) -> Request:
    """The request, in which the search chooses no number of micro-batches that would change results.

    Micro-batches are parts of dim 0. If dim 0 is not the batch, or the parts give another loss, their number is the
    captured one.

    Args:
        prepared: the captured step or forward.
        request: the user's wishes.
        captured: number of captured batches that make up a step.
    """
    if request.micro_batches is not None:
        return request
    if _batch_elsewhere(prepared.analysis.graph) or _is_changed_by_micro_batches(prepared):
        return request.of_micro_batches(captured)
    return request.but(cuts_batch=request.cuts_batch and _may_cut(prepared))


def _may_cut(prepared: Prepared) -> bool:
    """Whether a batch that runs without stages may be cut into micro-batches that nobody asked for.

    A forward that changes a buffer would change it again for every micro-batch, and an input whose dim 0 is not the
    batch, such as a table of positions, would be cut with the others.
    """
    captured, graph = prepared.captured, prepared.analysis.graph
    batch = graph.batch
    inputs = [graph.tensors[name].factors for name in graph.inputs.values()]
    is_cut_by_rows = all(dims[0] and dims[0][0] in batch for dims in inputs if dims)
    return captured.is_step and not captured.mutated and bool(batch) and is_cut_by_rows


def in_parts(
    plan: Plan, batch: Prepared, capture: Callable[[int], Prepared], search: Callable[[Prepared, int], Plan]
) -> tuple[Prepared, Plan]:
    """The step and the plan for one of the micro-batches that a search chose; for the whole batch if it cannot be cut.

    The search knows only the step at the size of the batch. At the size of a micro-batch the model may run other ops,
    or fail, as with the batch's size in its code (`x.reshape(8, -1)`). The batch then runs whole.

    Args:
        plan: the plan that the search found for the batch.
        batch: the step, captured for the batch.
        capture: function that captures the step for one of this many micro-batches; every exception is caught.
        search: function that searches a plan for a captured step of this many micro-batches.
    """
    if plan.micro_batches == 1 and plan.fingerprint == batch.captured.fingerprint:
        return batch, plan
    part = batch
    if plan.micro_batches > 1:
        found = part_of(batch, lambda: capture(plan.micro_batches))
        if found is None:
            return batch, search(batch, 1)
        part = found
    return part, _plan_of_part(plan, part) or search(part, plan.micro_batches)


def in_unequal_parts(plan: Plan, sizes: Sequence[int]) -> Plan:
    """The plan for micro-batches of these sizes, of which only those of one size overlap; a note names them."""
    at_a_time = math.gcd(plan.overlap_batches, first_smaller(sizes), len(sizes))
    text = (
        f"{sum(sizes)} samples in {len(sizes)} micro-batches of {', '.join(map(str, sizes))}, each priced as one of "
        f"{sizes[0]}"
    )
    # A plan that was loaded has the note.
    notes = (note for note in plan.notes if (note, kind_of(note)) != (text, "uneven"))
    return replace(plan, overlap_batches=at_a_time, notes=(*notes, Note(text, "uneven")))


def refuse_no_batch(part: Prepared, batch: Prepared) -> None:
    """Raises StepError for micro-batches of different sizes of a batch on which the model does not run as a whole."""
    if batch is part:
        raise StepError(
            "The model does not run on the whole batch, which would show the numbers that count rows, as micro-batches "
            "of different sizes need them. Take a number of micro-batches that divides the batch."
        )


def part_that_keeps_results(batch: Prepared, capture: Callable[[], Prepared]) -> Prepared | None:
    """The step for a micro-batch if the user did not ask for micro-batches; None if the batch has to run whole.

    An earlier step ran in micro-batches, but this one may differ from it, such as training after an evaluation.

    Args:
        batch: the step, captured for the batch.
        capture: function that captures the step for a micro-batch; every exception is caught.
    """
    return part_of(batch, capture) if _may_cut(batch) else None


def part_of(batch: Prepared, capture: Callable[[], Prepared]) -> Prepared | None:
    """The step for a micro-batch; None where micro-batches do not give the results of the batch.

    Args:
        batch: the step, captured for the batch.
        capture: function that captures the step for a micro-batch; every exception is caught.
    """
    try:
        part = capture()
    except Exception as error:  # whatever the model's own code raises at that size
        said = first_line(f"{type(error).__name__}: {error}")
        log.info("The batch is not cut, as the model does not run on a part of it (%s).", said)
        return None
    return part if are_given_by_micro_batches(part, batch) else None


def _plan_of_part(plan: Plan, part: Prepared) -> Plan | None:
    """The plan of a batch for a captured micro-batch of it; None where it is not legal there."""
    if why_not_again(plan, part):
        return None
    graph = part.analysis.graph
    return replace(
        plan,
        fingerprint=part.captured.fingerprint,
        shapes=graph.edge_shapes,
        dtypes=_edge_dtypes(part),
        saved=possible_lines(graph, plan),
    )


def are_given_by_micro_batches(prepared: Prepared, batch: Prepared) -> bool:
    """Whether the results of a step over a batch come from those of its micro-batches.

    Args:
        prepared: the step at the size of a micro-batch; with the batch itself, every number is taken for one that
            counts no rows.
        batch: the step at the size of the batch.
    """
    captured, whole = prepared.captured, batch.whole
    extras = extras_of(captured, prepared.analysis.graph, whole)
    return objective_of(captured, whole).is_known and not any(each.obstacle for each in extras)


def refuse_sum(prepared: Prepared, meeting: Meeting, half: Callable[[], Prepared]) -> None:
    """Raises RecipeError for a loss of replicas that is a sum over rows.

    Every replica takes its steps on the loss of its own rows, and their mean is that of the batch where the loss is a
    mean. Of a sum it would be a fraction.

    Args:
        prepared: the captured step of a replica.
        meeting: the replicas.
        half: function that captures the step for half as many rows, which shows the numbers that count rows. It is
            called where the loss may be a sum.
    """
    if objective_of(prepared.captured, prepared.whole).kind != "sum":
        return
    try:
        kind = objective_of(half().captured, prepared.whole).kind
    except Exception:  # one row has no half, and the model's own code may not take it
        kind = "sum"
    if kind == "sum":
        raise RecipeError(
            f"The loss is a sum over rows. The {meeting.replicas} replicas along {meeting.axis} take their steps on "
            f"rows of their own, whose sum is 1/{meeting.replicas} of the batch's: let the loss be a mean, such as "
            "loss / rows."
        )


def _batch_elsewhere(graph: Graph) -> tuple[str, int] | None:
    """The first input whose batch is not its dim 0, with the dim that is the batch; None if there is no such input."""
    for name, tensor in graph.inputs.items():
        first, *others = (
            any("batch" in graph.factors[factor].roles for factor in factors)
            for factors in graph.tensors[tensor].factors or ((),)
        )
        if any(others) and not first and graph.tensors[tensor].dims[0]:
            return name, others.index(True) + 1
    return None


def plan_again(plan: Plan, prepared: Prepared, micro_batches: int) -> Plan | None:
    """The choices of a plan, for a graph of the same ops with other sizes; None if they are not legal there."""
    if why_not_again(plan, prepared):
        return None
    return replace(
        plan,
        fingerprint=prepared.captured.fingerprint,
        micro_batches=micro_batches,
        overlap_batches=math.gcd(plan.overlap_batches, micro_batches),
        notes=("the choices of the plan for other shapes",),
        shapes=prepared.analysis.graph.edge_shapes,
        dtypes=_edge_dtypes(prepared),
        saved=possible_lines(prepared.analysis.graph, plan),
    )


def has_same_ops(plan: Plan, prepared: Prepared) -> bool:
    """Whether the plan was made for a graph of the same ops, parameters and inputs, of any sizes."""
    graph = prepared.analysis.graph
    return (
        list(plan.ops) == [op.name for op in graph.ops]
        and plan.parameters.keys() == graph.parameters.keys()
        and plan.inputs.keys() == graph.inputs.keys()
    )


def why_not_again(plan: Plan, prepared: Prepared) -> str:
    """Which choice of a plan is not legal for this graph, "" if all are."""
    graph = prepared.analysis.graph
    if not has_same_ops(plan, prepared):
        return "the model runs other ops"
    for op in graph.ops:
        labels = plan.ops[op.name]
        split = {plain(label) for label in labels if owner_of(label) is None}
        gone = sorted(split - {choice.label for choice in op.choices})
        if gone:
            return f"{op.name} ({op.kind}) no longer has a dim {gone[0]} to split; it may have size 1"
        if not is_legal(graph, op, labels, plan.mesh):
            return _obstacle(op, labels, plan.mesh)
    for name, layout in plan.inputs.items():
        tensor = graph.tensors[graph.inputs[name]]
        if not graph.can_take(tensor.name, layout, plan.mesh):
            return f"the input {name} of shape {list(tensor.shape)} cannot be cut as it was"
    return ""


def _obstacle(op: Op, labels: Labels, mesh: Mesh) -> str:
    """Words for a factor of an op that the labels split and the mesh does not divide; "" if there is none."""
    split: dict[str, list[tuple[str, int]]] = {}
    for label, axis in zip(labels, mesh.axes, strict=True):
        if op.choice(label).splits:
            split.setdefault(plain(label), []).append(axis)
    for label, axes in split.items():
        choice = op.choice(label)
        if choice.size % math.prod(size for _, size in axes):
            words = " x ".join(f"{name}={size}" for name, size in axes)
            return f"{words} does not divide {choice.factor or label} of size {choice.size} ({op.name})"
    return f"{op.name} ({op.kind}) cannot be split as it was"


def has_no_rows(prepared: Prepared) -> bool:
    """Whether a batch has no rows: there is nothing to split."""
    graph = prepared.analysis.graph
    return any(graph.tensors[name].shape[:1] == (0,) for name in graph.inputs.values())


def unsplit_plan(prepared: Prepared, mesh: Mesh, parameters: Mapping[str, ParameterPlan], micro_batches: int) -> Plan:
    """The plan in which every rank does all the work, with the given layouts of parameters."""
    graph, axes = prepared.analysis.graph, len(mesh.axes)
    return Plan(
        mesh=mesh,
        fingerprint=prepared.captured.fingerprint,
        recipe="auto",
        micro_batches=micro_batches,
        parameters=parameters,
        inputs={name: (R,) * axes for name in graph.inputs},
        ops={op.name: (UNSPLIT,) * axes for op in graph.ops},
        precision=graph.precision,
        loss_tile_bytes=graph.loss_tile_bytes,
        notes=("no axis divides anything, so every rank does all the work",),
    )


def take_parts(plan: Plan, graph: Graph) -> Plan:
    """Returns the plan with inputs already split where all ops that read them split them alike.

    This is decided for each mesh axis: a replicated input (R) becomes S(dim) where every op that reads it takes S(dim)
    along that axis. All other inputs keep their layouts. To slice a replicated input inside the graph would cost as
    little, but then a rank that has only its own shard of the input could not pass that shard.
    """
    inputs = {
        name: tuple(_agreed_state(plan, graph, graph.inputs[name], axis, state) for axis, state in enumerate(layout))
        for name, layout in plan.inputs.items()
    }
    return replace(plan, inputs=inputs)


def _agreed_state(plan: Plan, graph: Graph, tensor: str, axis: int, state: State) -> State:
    wanted = {
        op.choice(plan.ops[op.name][axis]).operands[i]
        for op in graph.ops
        for i, operand in enumerate(op.operands)
        if operand == tensor
    }
    only = wanted.pop() if len(wanted) == 1 else state
    splits_rows = only.kind == "S" and only.factor == 0
    return only if state == R and splits_rows else state


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of an example: a tuple or list, a dict of keyword arguments, or one input."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
