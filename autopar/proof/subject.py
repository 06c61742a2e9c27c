"""A captured model and its results on a single device, for comparison with any number of plans."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar._torch import AskedLimits, RandomLastBits, pytree
from autopar.analysis.objective import BatchCapture, objective_of
from autopar.capture.export import LossFunction
from autopar.capture.remedies import traced_line
from autopar.capture.rows import arguments_of_replica
from autopar.errors import AutoparError, PlanError
from autopar.ir import Meeting, MixedPrecision, Plan
from autopar.ir.meeting import SERVER
from autopar.planning.planning import Prepared, plan_again, prepare_step, prepare_whole, split_example, why_not_again
from autopar.program.program import Program, build_program, with_smaller
from autopar.proof.caches import CachedTensors, clear, emptied_after
from autopar.proof.comparison import (
    PlanResults,
    doubtful,
    dtypes_of,
    float64_verdicts,
    judged_by_rounding,
    largest_entry,
    own_errors,
    plan_errors,
    rounding_verdicts,
)
from autopar.proof.replicas import SHOWN_STEPS, ReplicaSteps
from autopar.proof.served import ServedSteps
from autopar.proof.simulated_steps import simulated_steps, widened_program
from autopar.proof.single_device import (
    Batch,
    Between,
    Results,
    SingleDevice,
    copied,
    float64_arithmetic,
    widened_tensors,
)
from autopar.proof.streams import Streams
from autopar.proof.verdict import PERTURBED_RUNS, Verdict, VerifyReport
from autopar.proof.versions import DelayedSteps
from autopar.search.request.notes import idle_axes
from autopar.units import counted

_DELAYED_STEPS = 2  # of plans that update inside of a step: the second begins with what the first has updated


@dataclass(frozen=True)
class Reference:
    """The results of a single device, with which the results of plans are compared.

    Attributes:
        steps: results of every step, computed in float64.
        samples: results of several runs of the first step in the model's own dtypes: one run as it is, and
            `PERTURBED_RUNS` in which every op's result is moved at random by one unit in the last place
            (`RandomLastBits`); empty for a model that computes in float64.
    """

    steps: tuple[Results, ...]
    samples: tuple[Results, ...]


@dataclass(frozen=True)
class Subject:
    """A captured model, to compare any number of plans with a single device.

    Attributes:
        model: a copy of the user's model.
        args: positional arguments of a micro-batch; further micro-batches have its rows in another order.
        kwargs: keyword arguments of the micro-batch.
        prepared: the model's captured step.
        loss_fn: the same as in `compile`.
        between: function that is called with a copy of the model between two steps, or None.
        references: cache: number of micro-batches -> results of a single device.
        wholes: cache: number of micro-batches -> the step captured with the whole batch.
        others: arguments of a micro-batch of each further replica.
        first_smaller: number of the first micro-batch of a step that has a row less than the arguments, as all after it
            have; 0 where all have as many.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepared: Prepared
    loss_fn: LossFunction | None
    between: Between | None = None
    references: dict[int, Reference] = field(default_factory=dict, compare=False)
    wholes: dict[int, Prepared] = field(default_factory=dict, compare=False)
    others: tuple[Batch, ...] = ()
    first_smaller: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        *,
        loss_fn: LossFunction | None = None,
        precision: MixedPrecision | None = None,
        between: Between | None = None,
        replicas: int = 1,
        loss_tile_bytes: int | None = None,
    ) -> Subject:
        """Captures a model with the rows of the first replica.

        Raises AutoparError if the capture draws other tensors than the model.
        """
        args, kwargs = split_example(example_inputs)
        kwargs = dict(sorted(kwargs.items()))
        (args, kwargs), *others = [arguments_of_replica(args, kwargs, number, replicas) for number in range(replicas)]
        require_weights(model)
        model, loss_fn = copied(model, loss_fn)  # capture leaves weak references on what it saw
        prepared = prepare_step(
            model, args, kwargs, loss_fn=loss_fn, precision=precision, loss_tile_bytes=loss_tile_bytes
        )
        found = cls(model, args, kwargs, prepared, loss_fn, between, others=tuple(others))
        require_same_draws(prepared, found.single_device(1), (args, kwargs))
        return found

    @cached_property
    def arithmetic(self) -> torch.dtype:
        """The lowest precision that a gradient passes through."""
        return lowest_precision(self.prepared)

    @cached_property
    def streams(self) -> Streams:
        """The draws of the captured step."""
        return Streams.of(self.prepared)

    @cached_property
    def limits(self) -> AskedLimits:
        """The types whose limits the model's code asks for; its first run for a number of micro-batches notes them."""
        return AskedLimits()

    def single_device(self, count: int) -> SingleDevice:
        """The model on one device, for a number of micro-batches."""
        captured, streams = self.prepared.captured, self.streams
        if count > 1 and streams.ops:
            streams = streams.within(captured, self.whole(count))
        return SingleDevice(self.model, self.loss_fn, captured, streams)

    def compare(self, plan: Plan) -> VerifyReport:
        """Simulates a plan; compares loss, gradients and new values of buffers.

        Raises PlanError for another model's plan.
        """
        count = plan.micro_batches
        batch = self.whole(count).whole if count > 1 else None
        program = build_program(self.prepared.captured, self.prepared.analysis, plan, batch)
        return self.compare_program(self._with_smaller(program, batch) if self.first_smaller else program)

    def of_unequal(self, first_smaller: int) -> Subject:
        """The same model whose micro-batches have a row less from this number on, and which draws no random numbers."""
        assert not self.streams.ops, "what a smaller micro-batch draws has no place in the draws of the batch"
        return replace(self, first_smaller=first_smaller, references={}, wholes={})

    @cached_property
    def _smaller(self) -> Prepared:
        """The step captured for a smaller micro-batch."""
        return self._captured(*_without_a_row((self.args, self.kwargs)))

    def _with_smaller(self, program: Program, batch: BatchCapture | None) -> Program:
        """The program with that of smaller micro-batches, by the same choices. PlanError where these are not legal."""
        smaller, plan = self._smaller, program.plan
        again = plan_again(plan, smaller, plan.micro_batches)
        if again is None:
            raise PlanError(f"For smaller micro-batches the plan is not legal: {why_not_again(plan, smaller)}.")
        return with_smaller(
            program, build_program(smaller.captured, smaller.analysis, again, batch), self.first_smaller
        )

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        captured = self.prepared.captured
        precision, tile_bytes = captured.precision, captured.loss_tile_bytes
        return prepare_step(
            self.model, args, kwargs, loss_fn=self.loss_fn, precision=precision, loss_tile_bytes=tile_bytes
        )

    def whole(self, count: int) -> Prepared:
        """The step captured with a whole batch of this number of micro-batches."""
        if count not in self.wholes:
            ((args, kwargs),) = _together(self._batches(0, count))
            capture = functools.partial(self._captured, args, kwargs)
            self.wholes[count] = prepare_whole(capture, self.prepared, warnings.warn)
        return self.wholes[count]

    def compare_program(self, whole: Program) -> VerifyReport:
        """Simulates the program of a plan and compares its results, see `compare`."""
        plan = whole.plan
        reference = self.reference(plan.micro_batches)
        flushed = replace(whole, plan=_flushed(plan))
        verdicts = self._in_float64(flushed, reference)
        if self.arithmetic != torch.float64:
            verdicts += self._in_own_arithmetic(flushed, reference)
        if plan.meeting is not None:
            verdicts += self._of_replicas(whole, plan.meeting)
        if flushed.plan is not plan:
            verdicts += self._of_versions(whole)
        return VerifyReport(
            mesh=plan.world_mesh,
            recipe=plan.recipe,
            verdicts=tuple(verdicts),
            schedule=_schedule_text(plan),
            all_rounding=_is_all_rounding(reference.steps[0], self.model, self.arithmetic),
            idle=tuple(idle_axes(plan)),
            not_numbers=tuple(reference.steps[0].not_numbers),
        )

    def reference(self, micro_batches: int) -> Reference:
        """The model's results without autopar, computed once for each number of micro-batches."""
        if micro_batches not in self.references:
            self.references[micro_batches] = self._single_device_results(micro_batches)
        return self.references[micro_batches]

    def _single_device_results(self, micro_batches: int) -> Reference:
        device = self.single_device(micro_batches)
        first = self._on_one_device(0, micro_batches)
        samples = []
        if self.arithmetic != torch.float64:
            with self.limits.noted():
                samples = device.run([first], None)
            for seed in range(PERTURBED_RUNS):
                with RandomLastBits(seed):
                    samples += _counted(samples[0], device.run([first], None))
        has_state = self.between is not None or not device.repeats(first)
        steps = [self._on_one_device(i, micro_batches) for i in range(2 if has_state else 1)]
        if self.arithmetic == torch.float64:
            return Reference(tuple(device.run(steps, self.between)), ())
        return Reference(tuple(self._exact(device.widened(), steps)), tuple(samples))

    def _exact(self, wide: SingleDevice, steps: Sequence[Sequence[Batch]]) -> list[Results]:
        """The results in float64, made of no tensor that a function has cached in another arithmetic."""
        caches = CachedTensors(self.prepared.captured.constants.values())
        with float64_arithmetic(self.limits), emptied_after():
            exact = wide.run(widened_tensors(steps), self.between)
            used = caches.used()
            if used:
                clear(used)
                exact = wide.run(widened_tensors(steps), self.between)
        return exact

    def _in_float64(self, whole: Program, reference: Reference) -> list[Verdict]:
        """Verdicts on every step of the plan in float64 arithmetic."""
        device = self.single_device(whole.plan.micro_batches)
        if self.arithmetic == torch.float64:
            rehearsed = self._simulate(whole, device, reference)
        else:
            with float64_arithmetic(self.limits):
                widened = device.widened()
                rehearsed = self._simulate(widened_program(whole), widened, reference)
        verdicts = [
            float64_verdicts(plan_errors(found, expected), expected, i + 1)
            for i, (found, expected) in enumerate(zip(rehearsed, reference.steps, strict=True))
        ]
        if not any(map(doubtful, verdicts, reference.steps)):
            return list(itertools.chain.from_iterable(verdicts))
        samples = self._rounded_in_float64(whole.plan.micro_batches, len(verdicts))
        judged = map(judged_by_rounding, verdicts, samples, reference.steps)
        return list(itertools.chain.from_iterable(judged))

    def _rounded_in_float64(self, count: int, steps: int) -> list[list[Results]]:
        """For every step, the single device's results in float64 with the last bit of every result drawn at random."""
        device = self.single_device(count)
        batches = [self._on_one_device(i, count) for i in range(steps)]
        runs = []
        with float64_arithmetic(self.limits), emptied_after():
            wide, given = device.widened(), widened_tensors(batches)
            for seed in range(PERTURBED_RUNS):
                with RandomLastBits(seed):
                    runs.append(wide.run(given, self.between))
        return [list(of_step) for of_step in zip(*runs, strict=True)]

    def _of_replicas(self, whole: Program, meeting: Meeting) -> list[Verdict]:
        """Verdicts on steps and meetings of all replicas in float64 arithmetic."""
        count = whole.plan.micro_batches
        every = [
            replace(self, args=args, kwargs=kwargs, references={}, others=())
            for args, kwargs in ((self.args, self.kwargs), *self.others)
        ]
        parts = [each._batches(0, count) for each in every]
        together = [each._on_one_device(0, count) for each in every]
        graph = self.prepared.analysis.graph
        steps = ServedSteps if meeting.rule == SERVER else ReplicaSteps
        if self.arithmetic == torch.float64:
            return steps(self.single_device(count), whole, graph, parts, together, meeting).verdicts()
        with float64_arithmetic(self.limits), emptied_after():
            device, wide = self.single_device(count).widened(), widened_program(whole)
            parts, together = widened_tensors(parts), widened_tensors(together)
            return steps(device, wide, graph, parts, together, meeting).verdicts()

    def _of_versions(self, whole: Program) -> list[Verdict]:
        """Verdicts on steps whose schedule updates parameters inside of a step, in float64 arithmetic."""
        count = whole.plan.micro_batches
        steps = [self._batches(i, count) for i in range(_DELAYED_STEPS)]
        together = [self._of_updates(whole, batches) for batches in steps]
        graph = self.prepared.analysis.graph
        if self.arithmetic == torch.float64:
            return DelayedSteps(self.single_device(count), whole, graph, steps, together).verdicts()
        with float64_arithmetic(self.limits), emptied_after():
            device, wide = self.single_device(count).widened(), widened_program(whole)
            steps, together = widened_tensors(steps), widened_tensors(together)
            return DelayedSteps(device, wide, graph, steps, together).verdicts()

    def _of_updates(self, whole: Program, batches: list[Batch]) -> list[list[Batch]]:
        """The batches of every update for the single device, as in `_on_one_device`."""
        assert whole.plan.pipeline is not None, "a plan that updates inside of a step has stages"
        size = whole.plan.pipeline.update_every
        groups = [batches[i : i + size] for i in range(0, len(batches), size)]
        is_whole = whole.objective.counts
        return [_together(group) if is_whole else group for group in groups]

    def _in_own_arithmetic(self, whole: Program, reference: Reference) -> list[Verdict]:
        """Verdicts on the first step of the plan in the model's own dtypes."""
        first = Reference(reference.steps[:1], reference.samples)
        (found,) = self._simulate(whole, self.single_device(whole.plan.micro_batches), first)
        errors = plan_errors(found, reference.steps[0])
        own = own_errors(reference.samples, errors, reference.steps[0])
        name = str(self.arithmetic).removeprefix("torch.")
        return rounding_verdicts(errors, own, reference.steps[0], dtypes_of(found), name)

    def _simulate(self, whole: Program, device: SingleDevice, reference: Reference) -> list[PlanResults]:
        """The plan's results of every step that the reference has."""
        count = whole.plan.micro_batches
        steps = [(self._batches(i, count), expected) for i, expected in enumerate(reference.steps)]
        sizes = [self.prepared, self._smaller] if self.first_smaller else [self.prepared]
        graphs = [each.analysis.graph for each in sizes]
        return list(simulated_steps(whole, graphs, device, steps, self.between))

    def _on_one_device(self, step: int, count: int) -> list[Batch]:
        """The batches of a step for the single device: the whole batch for a sum or a ratio, else its micro-batches."""
        batches = self._batches(step, count)
        if count == 1:
            return batches
        objective = objective_of(self.prepared.captured, self.whole(count).whole)
        return _together(batches) if objective.counts or self.first_smaller else batches

    def _batches(self, step: int, count: int) -> list[Batch]:
        """The micro-batches of a step: the rows of the example, each time in another order."""
        batches = [self._batch(step * count + i) for i in range(count)]
        first = self.first_smaller or count
        return batches[:first] + list(map(_without_a_row, batches[first:]))

    def _batch(self, number: int) -> Batch:
        if number == 0:
            return self.args, self.kwargs
        rolled = pytree.tree_map(
            lambda x: x.roll(number, 0) if isinstance(x, Tensor) and x.ndim else x, (self.args, self.kwargs)
        )
        return cast(Batch, rolled)


def _counted(plain: Results, perturbed: Sequence[Results]) -> list[Results]:
    """The perturbed runs that show rounding.

    Last bits that turn a decision of the model, such as `x == x.amax()`, may leave no number, as its rounding does not.
    """
    return [each for each in perturbed if plain.has_nan or not each.has_nan]


def _flushed(plan: Plan) -> Plan:
    """The plan with a schedule that updates once per step; unchanged if it already does."""
    if plan.pipeline is None or not plan.pipeline.update_every:
        return plan
    return replace(plan, pipeline=replace(plan.pipeline, schedule="1f1b"))


def _without_a_row(batch: Batch) -> Batch:
    """A micro-batch without its last row, of which a tensor may have several entries."""
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    rows = math.gcd(*(len(x) for x in tensors))
    fewer = pytree.tree_map(lambda x: x[: len(x) - len(x) // rows] if isinstance(x, Tensor) and x.ndim else x, batch)
    return cast(Batch, fewer)


def _together(batches: list[Batch]) -> list[Batch]:
    """The micro-batches, concatenated to one batch."""
    together = pytree.tree_map(
        lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].ndim else xs[0], *batches
    )
    return [cast(Batch, together)]


def _schedule_text(plan: Plan) -> str:
    """Words such as `1f1b with 4 micro-batches through 2 stages`; "" without stages and replicas."""
    if plan.meeting is not None:
        shown = f", {SHOWN_STEPS} of them run" if plan.meeting.steps > SHOWN_STEPS else ""
        if plan.meeting.rule == SERVER:
            shown += ", against its order on one device"
        return f"{counted(plan.meeting.replicas, 'replica')} that synchronise {plan.meeting}{shown}"
    if plan.pipeline is None:
        return ""
    delays = ", against the same delays on one device" if plan.pipeline.update_every else ""
    return (
        f"{plan.pipeline.schedule} with {counted(plan.micro_batches, 'micro-batch')} through "
        f"{plan.pipeline.stages} stages{delays}"
    )


def lowest_precision(prepared: Prepared) -> torch.dtype:
    """The element type of the lowest precision that a gradient passes through."""
    sizes = [t.itemsize_bytes for t in prepared.analysis.graph.tensors.values() if t.needs_grad]
    values = [
        x.dtype
        for node in prepared.captured.module.graph.nodes
        for x in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    lowest = min(sizes, default=8)
    return min(
        (dtype for dtype in values if dtype.itemsize == lowest),
        key=lambda dtype: (-torch.finfo(dtype).eps, str(dtype)),
        default=torch.float64 if lowest >= 8 else torch.float32,
    )


def _is_all_rounding(results: Results, model: nn.Module, arithmetic: torch.dtype) -> bool:
    """Whether no gradient times its parameter's largest entry is above 64 roundings of the loss.

    No ground to compare more loosely: with a large constant added, a right loss has such gradients too.
    """
    rounding = 64 * torch.finfo(arithmetic).eps * largest_entry(results.loss)
    parameters = dict(model.named_parameters())
    found = [(g, parameters[n]) for n, g in results.gradients.items() if g is not None]
    return bool(found) and all(largest_entry(g) * largest_entry(x) <= rounding for g, x in found)


def require_weights(model: nn.Module) -> None:
    """Raises AutoparError for a model with parameters on the meta device."""
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise AutoparError(
            f"To prove a plan the model needs real weights, but {len(empty)} of its parameters are on the "
            f"meta device ({empty[0]} first). Build it on the CPU, smaller if need be."
        )


def require_same_draws(prepared: Prepared, device: SingleDevice, batch: Batch) -> None:
    """Raises AutoparError if a single device does not make the same draws in the same order as the capture."""
    ops = device.streams.ops
    if not ops:
        return
    found, expected = device.drawn(batch), device.streams.shapes
    if found == expected:
        return
    nodes = {node.name: node for node in prepared.captured.module.graph.nodes}
    lines = [f"{x.target} at {traced_line(x)}" for name in ops for x in (nodes[name],)]
    raise AutoparError(
        f"The model draws {len(found)} random tensors on a single device, of shapes {found}, but the captured step "
        f"{len(expected)}, of shapes {expected} ({'; '.join(lines)}): there is nothing to compare. Let the model draw "
        "in the same order in every call, or verify it in evaluation mode or with dropout 0."
    )
