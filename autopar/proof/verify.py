"""The proof without a cluster: all ranks of a plan simulated in one process, against the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from autopar._torch import RandomLastBits, pytree, widened_dtype
from autopar.analysis.objective import objective_of
from autopar.capture.export import LossFunction
from autopar.capture.remedies import traced_line
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError
from autopar.ir import PIPELINE_AXIS, Mesh, MixedPrecision, Plan
from autopar.ops.nodes import bound_arguments, draws, is_operator
from autopar.planning.planning import (
    Prepared,
    make_plan,
    policy_of,
    prepare_step,
    split_example,
)
from autopar.program.program import Program, TensorSpec, build_program
from autopar.program.stages import cut_stages
from autopar.proof import lockstep
from autopar.proof.comparison import (
    PlanResults,
    dtypes_of,
    float64_verdicts,
    largest_entry,
    own_errors,
    plan_errors,
    rounding_verdicts,
)
from autopar.proof.random_plan import random_plan
from autopar.proof.rehearsal import Rehearsal, actions_of
from autopar.proof.single_device import (
    Batch,
    Between,
    Results,
    SingleDevice,
    copied,
    float64_arithmetic,
    widened_tensors,
)
from autopar.proof.verdict import PERTURBED_RUNS, Verdict, VerifyReport
from autopar.search import RecipeLike
from autopar.search.request import Request
from autopar.units import counted


def verify(
    model: nn.Module,
    example_inputs: Any,
    *,
    mesh: Mesh | Mapping[str, int],
    plan: Plan | str | None = None,
    recipe: RecipeLike = "auto",
    seed: int = 0,
    loss_fn: LossFunction | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    precision: MixedPrecision | str | None = None,
    between: Between | None = None,
) -> VerifyReport:
    """Runs a plan with all ranks simulated in one process, and compares loss, every gradient and updated buffers.

    The reference is the single-device model in float64. The plan must give it in float64 arithmetic up to a
    relative 1e-9; and where the model's own arithmetic is lower, the plan's error there must be of the size of the
    single device's own error, by a bound per tensor (`autopar.proof.verdict`). A model that holds state
    (updated buffers, a counter, a weight that `between` changes) is run for two steps.

    Needs no process group and no device; the model must have real weights and is left as it was.

    Args:
        model: plain PyTorch.
        example_inputs: a tuple of arguments, a dict of keyword arguments, or one tensor; with several
            micro-batches, the first of them.
        mesh: the axes to simulate; `pp` is that of pipeline stages.
        plan: a plan, "random" for one drawn at random, or None to search one.
        recipe: constraints on the search.
        seed: seed of the random plan.
        loss_fn, schedule: as in `compile`.
        micro_batches: number of micro-batches of a searched plan; by default 1, and two for each rank of a pipeline.
        precision: as in `compile`; by default that of the plan. The single device runs the model with
            parameters and inputs cast in the same way.
        between: what a script changes between two steps, as a function of the model: `set_beta` where
            it sets `model.beta = 0.5`. It is called with a copy of the model, once for each side, so it
            must set values and not add to them.

    Returns:
        A verdict in words and numbers; `passed` says whether every tensor is within its bound.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    >>> mesh = {"dp": 2, "tp": 2}
    >>> autopar.verify(model, torch.ones(4, 8), mesh=mesh, loss_fn=torch.mean).passed
    True
    """
    request = Request(
        find_hardware("cpu-gloo"), mesh=Mesh.of(mesh), recipe=recipe, micro_batches=micro_batches,
        schedule=schedule,
    )  # fmt: skip
    policy = policy_of(precision, plan if isinstance(plan, Plan) else None)
    subject = Subject.of(model, example_inputs, loss_fn=loss_fn, precision=policy, between=between)
    if isinstance(plan, Plan):
        return subject.compare(plan)
    if plan == "random":
        captured, graph = subject.prepared.captured, subject.prepared.analysis.graph
        return subject.compare(
            random_plan(graph, Mesh.of(mesh), seed=seed, fingerprint=captured.fingerprint)
        )
    if plan is not None:
        raise AutoparError(f'A plan to verify is a Plan, "random" or None, not {plan!r}.')
    return subject.compare(_searched(subject.prepared, request))


@dataclass(frozen=True)
class Reference:
    """What plans are compared with.

    Attributes:
        steps: results of the single device in float64 arithmetic, step by step.
        samples: results of its first step in the model's own arithmetic: as it is, and with the last bits drawn;
            empty for a model whose own arithmetic is float64.
    """

    steps: tuple[Results, ...]
    samples: tuple[Results, ...]


@dataclass(frozen=True)
class Subject:
    """A captured model, to compare any number of plans with what a single device computes.

    Attributes:
        model: a copy of the user's.
        args, kwargs: a micro-batch; further ones are its rows in another order.
        prepared: its captured step.
        loss_fn: as in `compile`.
        between: what to call with a copy of the model between two steps, or None.
        references: number of micro-batches -> what a single device computes, once it was run.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepared: Prepared
    loss_fn: LossFunction | None
    between: Between | None = None
    references: dict[int, Reference] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        *,
        loss_fn: LossFunction | None = None,
        precision: MixedPrecision | None = None,
        between: Between | None = None,
    ) -> Subject:
        """Captures a model; its random numbers must not matter."""
        args, kwargs = split_example(example_inputs)
        kwargs = dict(sorted(kwargs.items()))
        _require_weights(model)
        model, loss_fn = copied(model, loss_fn)  # capture leaves weak references on what it saw
        prepared = prepare_step(model, args, kwargs, loss_fn=loss_fn, precision=precision)
        _require_determinism(prepared)
        return cls(model, args, kwargs, prepared, loss_fn, between)

    @cached_property
    def arithmetic(self) -> torch.dtype:
        """The lowest precision that a gradient passes through."""
        return lowest_precision(self.prepared)

    @cached_property
    def single_device(self) -> SingleDevice:
        return SingleDevice(self.model, self.loss_fn, self.prepared.captured)

    def compare(self, plan: Plan) -> VerifyReport:
        """Simulates a plan; compares loss, gradients and new values of buffers.

        Raises PlanError for another model's plan.
        """
        return self.compare_program(
            build_program(self.prepared.captured, self.prepared.analysis, plan)
        )

    def compare_program(self, whole: Program) -> VerifyReport:
        """The same for the program of a plan."""
        plan = whole.plan
        reference = self.reference(plan.micro_batches)
        verdicts = self._in_float64(whole, reference)
        if self.arithmetic != torch.float64:
            verdicts += self._in_own_arithmetic(whole, reference)
        return VerifyReport(
            mesh=plan.world_mesh,
            recipe=plan.recipe,
            verdicts=tuple(verdicts),
            schedule=_schedule_text(plan),
            all_rounding=_is_all_rounding(reference.steps[0], self.model, self.arithmetic),
        )

    def reference(self, micro_batches: int) -> Reference:
        """The model's results without autopar, computed once for each number of micro-batches."""
        if micro_batches not in self.references:
            self.references[micro_batches] = self._single_device_results(micro_batches)
        return self.references[micro_batches]

    def _single_device_results(self, micro_batches: int) -> Reference:
        device, first = self.single_device, self._on_one_device(0, micro_batches)
        samples = []
        if self.arithmetic != torch.float64:
            samples = device.run([first], None)
            for seed in range(PERTURBED_RUNS):
                with RandomLastBits(seed):
                    samples += device.run([first], None)
        has_state = self.between is not None or not device.repeats(first)
        steps = [self._on_one_device(i, micro_batches) for i in range(2 if has_state else 1)]
        if self.arithmetic == torch.float64:
            return Reference(tuple(device.run(steps, self.between)), ())
        wide = device.widened()
        with float64_arithmetic():
            exact = wide.run(widened_tensors(steps), self.between)
        return Reference(tuple(exact), tuple(samples))

    def _in_float64(self, whole: Program, reference: Reference) -> list[Verdict]:
        """Every step of the plan in float64 arithmetic."""
        if self.arithmetic == torch.float64:
            rehearsed = list(self._rehearse(whole, self.single_device, reference))
        else:
            with float64_arithmetic():
                rehearsed = list(
                    self._rehearse(_widened_program(whole), self.single_device.widened(), reference)
                )
        return [
            verdict
            for i, (found, expected) in enumerate(zip(rehearsed, reference.steps, strict=True))
            for verdict in float64_verdicts(plan_errors(found, expected), expected, i + 1)
        ]

    def _in_own_arithmetic(self, whole: Program, reference: Reference) -> list[Verdict]:
        """The first step of the plan as it would run."""
        first = Reference(reference.steps[:1], reference.samples)
        (found,) = self._rehearse(whole, self.single_device, first)
        errors = plan_errors(found, reference.steps[0])
        own = own_errors(reference.samples, errors, reference.steps[0])
        name = str(self.arithmetic).removeprefix("torch.")
        return rounding_verdicts(errors, own, reference.steps[0], dtypes_of(found), name)

    def _rehearse(
        self, whole: Program, device: SingleDevice, reference: Reference
    ) -> Iterator[PlanResults]:
        """The results of every step on simulated ranks; the weights stay."""
        model, _ = copied(device.model, device.loss_fn)
        count = whole.plan.micro_batches
        stages = cut_stages(whole, self.prepared.analysis.graph)
        for step, expected in enumerate(reference.steps):
            if step and self.between is not None:
                self.between(model)
            inputs = [_named_inputs(whole, batch) for batch in self._batches(step, count)]
            buffers = dict(model.named_buffers(remove_duplicate=False))
            shares = whole.objective.shares([each | _prefixed(buffers) for each in inputs])
            rehearsal = Rehearsal(
                whole, stages, micro_batches=count, parameters=dict(model.named_parameters()),
                buffers=buffers, shares=shares,
            )  # fmt: skip
            rehearsal.run(actions_of(whole.plan), inputs.__getitem__)
            updated = _updated_buffers(rehearsal, model, expected)
            weighted = [[s * x for x in rehearsal.losses[i]] for i, s in enumerate(shares)]
            losses = [torch.stack(ranks).sum(0) for ranks in zip(*weighted, strict=True)]
            yield PlanResults(whole, losses, rehearsal.stored, updated)
            with torch.no_grad():
                for name, ranks in rehearsal.updates.items():
                    model.get_buffer(name).copy_(ranks[0])

    def _on_one_device(self, step: int, count: int) -> list[Batch]:
        """What the single device runs: the whole batch, but its micro-batches where the loss is that of none."""
        batches = self._batches(step, count)
        objective = objective_of(self.prepared.captured, self.prepared.analysis.graph)
        return _together(batches) if objective.kind in ("sum", "ratio") and count > 1 else batches

    def _batches(self, step: int, count: int) -> list[Batch]:
        """The micro-batches of a step: the rows of the example, each time in another order."""
        return [self._batch(step * count + i) for i in range(count)]

    def _batch(self, number: int) -> Batch:
        if number == 0:
            return self.args, self.kwargs
        rolled = pytree.tree_map(
            lambda x: x.roll(number, 0) if isinstance(x, Tensor) and x.ndim else x,
            (self.args, self.kwargs),
        )
        return cast(Batch, rolled)


def _prefixed(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"buffers.{name}": x for name, x in buffers.items()}


def _together(batches: list[Batch]) -> list[Batch]:
    """The micro-batches as one batch."""
    together = pytree.tree_map(
        lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) and xs[0].ndim else xs[0], *batches
    )
    return [cast(Batch, together)]


def _named_inputs(whole: Program, batch: Batch) -> dict[str, Tensor]:
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    # A program in float64 arithmetic says that it takes float64.
    pairs = zip(whole.inputs, tensors, strict=True)
    return {spec.name: x.to(torch.promote_types(spec.dtype, x.dtype)) for spec, x in pairs}


def _updated_buffers(
    rehearsal: Rehearsal, model: nn.Module, expected: Results
) -> dict[str, lockstep.Ranks]:
    """The buffers that the program says it updates, and those that the model itself changes.

    A buffer that the model changes and the program does not know of stays as it was, and fails.
    """
    found = dict(rehearsal.updates)
    names = _names_of_buffers(model)
    for name in expected.changed:
        if found.keys().isdisjoint(names[name]):
            held = next((n for n in names[name] if n in rehearsal.buffers), None)
            found[name] = rehearsal.buffers[held] if held else [model.get_buffer(name).clone()]
    return found


def _widened_program(program: Program) -> Program:
    """A program that takes float64, and whose gradients are added up in float64."""
    return replace(
        program,
        parameters=tuple(map(_widened_spec, program.parameters)),
        buffers=tuple(map(_widened_spec, program.buffers)),
        inputs=tuple(map(_widened_spec, program.inputs)),
        constants=tuple(widened_tensors(x) for x in program.constants),
    )


def _widened_spec(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=widened_dtype(spec.dtype), reduced=None)


def _schedule_text(plan: Plan) -> str:
    """`1f1b with 4 micro-batches through 2 stages`, "" without stages."""
    if plan.pipeline is None:
        return ""
    return (
        f"{plan.pipeline.schedule} with {counted(plan.micro_batches, 'micro-batch')} through "
        f"{plan.pipeline.stages} stages"
    )


def _require_weights(model: nn.Module) -> None:
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise AutoparError(
            f"To prove a plan the model needs real weights, and {len(empty)} of its parameters are on the "
            f"meta device ({empty[0]} first). Build it on the CPU, smaller if need be."
        )


def _require_determinism(prepared: Prepared) -> None:
    random = [n for n in prepared.captured.module.graph.nodes if draws(n)]
    if random:
        raise AutoparError(
            f"The model draws random numbers ({random[0].target}, at {traced_line(random[0])}), and a plan draws "
            f"others than a single device: there is nothing to compare. {_without_draws(random[0])}"
        )


def _without_draws(node: fx.Node) -> str:
    """A remedy: how a model computes the same without the random numbers of an op."""
    arguments = bound_arguments(node) if is_operator(node) else {}
    if "dropout" in str(node.target) or {"train", "training"} & arguments.keys():
        return "Set its dropout to 0, or verify model.eval()."
    return (
        "Give it the numbers, as an input or as FractionalMaxPool2d takes `_random_samples`; what draws in training "
        "alone is proved by model.eval()."
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


def _searched(prepared: Prepared, request: Request) -> Plan:
    """A plan for the proof of its arithmetic: the ranks share this process's memory."""
    depth = dict(request.mesh.axes).get(PIPELINE_AXIS) if request.mesh else None
    count = request.chosen_micro_batches or (2 * depth if depth else 1)
    return make_plan(prepared, request.but(micro_batches=count, must_fit=False))


def _names_of_buffers(model: nn.Module) -> dict[str, list[str]]:
    """The first name of every buffer -> all that it has."""
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {found[0]: found for found in names.values()}


def _is_all_rounding(results: Results, model: nn.Module, arithmetic: torch.dtype) -> bool:
    """Whether no gradient times its parameter's largest entry is above 64 roundings of the loss.

    No ground to compare more loosely: with a large constant added, a right loss has such gradients too.
    """
    rounding = 64 * torch.finfo(arithmetic).eps * largest_entry(results.loss)
    parameters = dict(model.named_parameters())
    found = [(g, parameters[n]) for n, g in results.gradients.items() if g is not None]
    return bool(found) and all(largest_entry(g) * largest_entry(x) <= rounding for g, x in found)
