"""The proof without a cluster: all ranks of a plan simulated in one process, against the model itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from rich.text import Text
from torch import Tensor, fx, nn

from autopar._torch import pytree
from autopar.capture.captured import Captured
from autopar.capture.export import LossFunction, run_with_loss
from autopar.capture.remedies import traced_line
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError
from autopar.ir import PIPELINE_AXIS, Mesh, MixedPrecision, Plan
from autopar.ops.nodes import bound_arguments, draws
from autopar.ops.sharding import shard
from autopar.planning.planning import (
    Prepared,
    make_plan,
    policy_of,
    prepare_step,
    split_example,
)
from autopar.program.program import Program, build_program
from autopar.program.stages import cut_stages
from autopar.proof import lockstep
from autopar.proof.random_plan import random_plan
from autopar.proof.rehearsal import Rehearsal, actions_of
from autopar.rules.trial import dense
from autopar.search import RecipeLike
from autopar.search.request import Request
from autopar.units import counted

TOLERANCE_FLOAT64 = 1e-9
TOLERANCE_FLOAT32 = 2e-5  # where any part of the graph is of lower precision
# Where a gradient passes through bfloat16 or float16. bfloat16 rounds to 8 bits, that is by 4e-3 each
# time, and sums over parts are rounded once more for every part; a wrong plan is wrong by far more.
TOLERANCE_HALF = 5e-2
# A gradient is a sum whose terms may be as large as the largest gradient and cancel, as those of a bias before
# batch norm do; each term is rounded to its own eps. So gradients below this part of the largest are compared with
# that instead: in float64, those under 64 roundings of it, 1.4e-14, are not told from zero, and all above are.
_FLOOR = 64 * torch.finfo(torch.float64).eps / TOLERANCE_FLOAT64  # 1.4e-5
_BUFFER_FLOOR = (
    0.1  # the same for a buffer and the largest of its module: a mean may be all rounding
)


@dataclass(frozen=True)
class VerifyReport:
    """The distance of a plan's results from those of the single-device model.

    Attributes:
        mesh: the axes it was simulated on.
        recipe: how the plan was made.
        loss_error: relative, the worst of all ranks.
        worst_gradient_error: relative to the largest entry of that parameter's gradient, the worst of all
            parameters and ranks.
        worst_parameter: where that is.
        tolerance: what all errors must stay below.
        parameters: how many were compared.
        buffer_error: error of the buffers that the forward updates, on a single device or as captured,
            relative to their largest entry, the worst of all buffers and ranks; 0.0 if there are none.
        worst_buffer: where that is, "" if there are none.
        buffers: how many were compared.
        schedule: how micro-batches went through pipeline stages, "" without stages.
        all_rounding: whether every gradient is too small to tell from the rounding of the loss.
    """

    mesh: Mesh
    recipe: str
    loss_error: float
    worst_gradient_error: float
    worst_parameter: str
    tolerance: float
    parameters: int
    buffer_error: float = 0.0
    worst_buffer: str = ""
    buffers: int = 0
    schedule: str = ""
    all_rounding: bool = False

    @property
    def passed(self) -> bool:
        """Whether all errors are below the tolerance; a nan is not."""
        errors = (self.loss_error, self.worst_gradient_error, self.buffer_error)
        return all(error <= self.tolerance for error in errors)

    def __str__(self) -> str:
        buffers = (
            f"  buffers             {self.buffer_error:.1e} of {self.buffers} updated, "
            f"at {self.worst_buffer}\n"
        )
        return (
            f"{'PASSED' if self.passed else 'FAILED'}: {self.mesh}, recipe {self.recipe}, "
            f"{self.mesh.size} ranks simulated{', ' + self.schedule if self.schedule else ''}\n"
            f"  loss                {self.loss_error:.1e} (relative, worst rank)\n"
            f"  worst gradient      {self.worst_gradient_error:.1e} of {self.parameters}, "
            f"at {self.worst_parameter}\n"
            f"{buffers if self.buffers else ''}"
            f"  tolerance           {self.tolerance:.0e}{self._hint}"
        )

    @property
    def _hint(self) -> str:
        """A note on what a failure may mean other than a wrong plan."""
        if self.passed:
            return ""
        if self.all_rounding:
            return (
                "\n  No gradient is larger than the rounding of the loss: a loss that is the same for all parameters"
                "\n  (of what was normalized, say) has gradients that are zero but for it, and proves nothing."
            )
        if self.tolerance == TOLERANCE_FLOAT64:
            return ""
        return (
            "\n  In float32 a gradient that is zero but for rounding (a bias before batch norm) differs in"
            "\n  every digit: verify model.double() to tell rounding from a wrong plan."
        )

    def __rich__(self) -> Text:
        head, _, rest = str(self).partition(":")
        return Text.assemble((head, "bold green" if self.passed else "bold red"), ":" + rest)


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
) -> VerifyReport:
    """Runs a plan with all ranks simulated in one process, and compares loss, every gradient and updated buffers.

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
    subject = Subject.of(model, example_inputs, loss_fn=loss_fn, precision=policy)
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
    """The results of a single device.

    Attributes:
        loss: the mean over micro-batches.
        gradients: None for a parameter that the model does not use.
        buffers: after the forward.
        changed: the names of those that the forward changed, one for each.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A captured model, to hold any number of plans against what a single device computes.

    Attributes:
        model: a copy of the user's.
        args, kwargs: a micro-batch; further ones are its rows in another order.
        prepared: its captured step.
        loss_fn: as in `compile`.
        references: number of micro-batches -> what a single device computes, once it was run.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepared: Prepared
    loss_fn: LossFunction | None
    references: dict[int, Reference] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        *,
        loss_fn: LossFunction | None = None,
        precision: MixedPrecision | None = None,
    ) -> Subject:
        """Captures a model; its random numbers must not matter."""
        args, kwargs = split_example(example_inputs)
        kwargs = dict(sorted(kwargs.items()))
        _require_weights(model)
        model, loss_fn = _copied(model, loss_fn)  # capture leaves weak references on what it saw
        prepared = prepare_step(model, args, kwargs, loss_fn=loss_fn, precision=precision)
        _require_determinism(prepared)
        return cls(model, args, kwargs, prepared, loss_fn)

    def compare(self, plan: Plan) -> VerifyReport:
        """Simulates a plan; compares loss, gradients and new values of buffers.

        Raises PlanError for another model's plan.
        """
        count = plan.micro_batches
        whole = build_program(self.prepared.captured, self.prepared.analysis, plan)
        rehearsal = Rehearsal(
            whole, cut_stages(whole, self.prepared.analysis.graph), micro_batches=count,
            parameters=dict(self.model.named_parameters()),
            buffers=dict(self.model.named_buffers(remove_duplicate=False)),
        )  # fmt: skip
        rehearsal.run(actions_of(plan), lambda i: self._inputs(whole, i))
        return self._report(whole, rehearsal)

    def reference(self, micro_batches: int) -> Reference:
        """The model's results without autopar, computed once for each number of micro-batches."""
        if micro_batches not in self.references:
            batches = [self._batch(i) for i in range(micro_batches)]
            self.references[micro_batches] = _single_device(
                self.model, batches, self.prepared.captured, self.loss_fn
            )
        return self.references[micro_batches]

    def _batch(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A micro-batch: the rows of the first in another order."""
        if number == 0:
            return self.args, self.kwargs
        rolled = pytree.tree_map(
            lambda x: x.roll(number, 0) if isinstance(x, Tensor) and x.ndim else x,
            (self.args, self.kwargs),
        )
        return cast(tuple[tuple[Any, ...], dict[str, Any]], rolled)

    def _inputs(self, whole: Program, number: int) -> dict[str, Tensor]:
        tensors = [x for x in pytree.tree_leaves(self._batch(number)) if isinstance(x, Tensor)]
        return {spec.name: x for spec, x in zip(whole.inputs, tensors, strict=True)}

    def _report(self, whole: Program, rehearsal: Rehearsal) -> VerifyReport:
        plan, reference = whole.plan, self.reference(rehearsal.count)
        errors = _gradient_errors(whole, rehearsal.stored, reference.gradients)
        worst = max(errors, key=lambda name: _nan_last(errors[name]), default="none")
        buffers = _buffer_errors(self._updated(rehearsal), reference.buffers)
        worst_buffer = max(buffers, key=lambda name: _nan_last(buffers[name]), default="")
        losses = torch.stack([torch.stack(ranks) for ranks in rehearsal.losses.values()]).mean(0)
        return VerifyReport(
            mesh=plan.world_mesh,
            recipe=plan.recipe,
            loss_error=max((_relative(each, reference.loss) for each in losses), key=_nan_last),
            worst_gradient_error=errors.get(worst, 0.0),
            worst_parameter=worst,
            tolerance=tolerance(self.prepared),
            parameters=len(errors),
            buffer_error=buffers.get(worst_buffer, 0.0),
            worst_buffer=worst_buffer,
            buffers=len(buffers),
            schedule=_schedule_text(plan),
            all_rounding=_is_all_rounding(reference, self.model),
        )

    def _updated(self, rehearsal: Rehearsal) -> dict[str, lockstep.Ranks]:
        """The buffers that the program says it updates, and those that the model itself changes.

        What the model changes and the program does not know of stays as it was, and fails.
        """
        found = dict(rehearsal.updates)
        names = _names_of_buffers(self.model)
        for name in self.reference(rehearsal.count).changed:
            if found.keys().isdisjoint(names[name]):
                held = next((n for n in names[name] if n in rehearsal.buffers), None)
                found[name] = rehearsal.buffers[held] if held else [self.model.get_buffer(name)]
        return found


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
    if "dropout" in str(node.target) or {"train", "training"} & bound_arguments(node).keys():
        return "Set its dropout to 0, or verify model.eval()."
    return (
        "Give it the numbers, as an input or as FractionalMaxPool2d takes `_random_samples`; what draws in training "
        "alone is proved by model.eval()."
    )


def tolerance(prepared: Prepared) -> float:
    """The largest error of a correct plan, that of the lowest precision that a gradient passes through."""
    tensors = prepared.analysis.graph.tensors.values()
    lowest_bytes = min((t.itemsize_bytes for t in tensors if t.needs_grad), default=8)
    if lowest_bytes <= 2:
        return TOLERANCE_HALF
    return TOLERANCE_FLOAT32 if lowest_bytes < 8 else TOLERANCE_FLOAT64


def _searched(prepared: Prepared, request: Request) -> Plan:
    """A plan for the proof of its arithmetic: the ranks share this process's memory."""
    depth = dict(request.mesh.axes).get(PIPELINE_AXIS) if request.mesh else None
    count = request.chosen_micro_batches or (2 * depth if depth else 1)
    return make_plan(prepared, request.but(micro_batches=count, must_fit=False))


def _single_device(
    model: nn.Module,
    batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    captured: Captured,
    loss_fn: LossFunction | None,
) -> Reference:
    """Loss, gradients and buffers of the model run eagerly; of a copy, so that its own stay."""
    copied, loss_fn = _copied(model, loss_fn)
    copied.zero_grad()
    losses = []
    for args, kwargs in batches:
        loss = run_with_loss(copied, args, kwargs, loss_fn, captured.precision)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    parameters = dict(copied.named_parameters())
    found = {name: parameters[name].grad for name in captured.parameters.values()}
    gradients = {name: g if g is None else dense(g) for name, g in found.items()}
    buffers = dict(copied.named_buffers(remove_duplicate=False))
    changed = tuple(n for n, x in model.named_buffers() if not _is_unchanged(x, buffers[n]))
    return Reference(torch.stack(losses).mean(0), gradients, buffers, changed)


def _is_unchanged(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors are the same bit by bit; a nan is itself."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    bits = (dense(x).contiguous().reshape(-1).view(torch.uint8) for x in (before, after))
    return torch.equal(*bits)


def _names_of_buffers(model: nn.Module) -> dict[str, list[str]]:
    """The first name of every buffer -> all that it has."""
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {found[0]: found for found in names.values()}


def _copied(
    model: nn.Module, loss_fn: LossFunction | None
) -> tuple[nn.Module, LossFunction | None]:
    """A deep copy, with the loss, which may be a method of the model or hold it.

    Of state that a run before left in an attribute with its graph, the value alone.
    """
    state = [
        x for module in model.modules() for x in pytree.tree_leaves(list(vars(module).values()))
    ]
    left = [x for x in state if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy((model, loss_fn), {id(x): x.detach().clone() for x in left})


def _buffer_errors(
    updates: Mapping[str, lockstep.Ranks], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """The relative error of every updated buffer, the worst of all ranks."""
    errors = {}
    for name, ranks in updates.items():
        floor = _BUFFER_FLOOR * _largest_of_module(name, updates, expected)
        scale = max(_largest(expected[name]), floor) or 1.0
        errors[name] = max((_difference(x, expected[name]) for x in ranks), key=_nan_last) / scale
    return errors


def _largest_of_module(name: str, updates: Iterable[str], expected: Mapping[str, Tensor]) -> float:
    """The largest entry of the floating buffers that are updated beside one; counters do not compare."""
    module = name.rpartition(".")[0]
    beside = [expected[other] for other in updates if other.rpartition(".")[0] == module]
    return max((_largest(x) for x in beside if x.is_floating_point()), default=0.0)


def _difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:  # a plan's mistake that broadcasting would hide
        return float("inf")
    if torch.equal(value, expected):  # also where both are infinite
        return 0.0
    exact = torch.promote_types(expected.dtype, torch.float64)
    return _largest(value.to(exact) - expected.to(exact))


def comparable(gradient: Tensor, largest: float) -> float:
    """The scale of a gradient's errors: its largest entry, or a fraction of `largest`, that of all gradients."""
    return max(_largest(gradient), _FLOOR * largest)


def _is_all_rounding(reference: Reference, model: nn.Module) -> bool:
    """Whether no gradient times its parameter's largest entry is above 64 roundings of the loss.

    No ground to compare more loosely: beside a large constant, a loss has such gradients that are right.
    """
    rounding = 64 * torch.finfo(reference.loss.dtype).eps * _largest(reference.loss)
    parameters = dict(model.named_parameters())
    found = [(g, parameters[n]) for n, g in reference.gradients.items() if g is not None]
    return bool(found) and all(_largest(g) * _largest(x) <= rounding for g, x in found)


def _gradient_errors(
    program: Program, stored: Mapping[str, lockstep.Ranks], gradients: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """The relative error of every parameter's gradient, the worst of all ranks."""
    largest = max((_largest(g) for g in gradients.values() if g is not None), default=0.0)
    errors = {}
    for spec in program.parameters:
        if spec.name in program.frozen:
            continue
        expected = gradients[spec.name]
        if expected is None:  # the model does not use it
            expected = torch.zeros(spec.shape, dtype=spec.dtype)
        scale = comparable(expected, largest)
        layout = program.plan.parameters[spec.name].storage
        errors[spec.name] = max(
            (
                _largest(_gradient(x) - shard(expected, spec.dims, layout, program.plan.mesh, rank))
                for rank, x in enumerate(stored[spec.name])
            ),
            key=_nan_last,
        )
        errors[spec.name] /= scale or 1.0
    return errors


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _relative(value: Tensor, expected: Tensor) -> float:
    return abs((value - expected).item()) / (abs(expected.item()) or 1.0)


def _nan_last(error: float) -> float:
    return float("inf") if error != error else error
