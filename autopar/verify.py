"""The proof without a cluster: all ranks of a plan simulated in one process, against the model itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import Captured, LossFunction, run_with_loss
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError
from autopar.ir import Mesh, Plan
from autopar.passes.retarget import draws
from autopar.planning import Prepared, make_plan, prepare_step, split_example
from autopar.program import Program, build_program
from autopar.random_plan import random_plan
from autopar.runtime import simulate
from autopar.search import RecipeLike

TOLERANCE_FLOAT64 = 1e-9
TOLERANCE_FLOAT32 = 2e-5  # where any part of the graph is of lower precision
# Where a gradient passes through bfloat16 or float16. bfloat16 rounds to 8 bits, that is by 4e-3 each
# time, and sums over parts are rounded once more for every part; a wrong plan is wrong by far more.
TOLERANCE_HALF = 5e-2
_FLOOR = 1e-6  # gradients below this part of the largest are compared with that instead
_BUFFER_FLOOR = (
    0.1  # the same for a buffer and the largest of its module: a mean may be all rounding
)


@dataclass(frozen=True)
class VerifyReport:
    """How far a plan's results are from the single-device model's.

    Attributes:
        mesh: the axes it was simulated on.
        recipe: how the plan was made.
        loss_error: relative, the worst of all ranks.
        worst_gradient_error: relative to the largest entry of that parameter's gradient, the worst of all
            parameters and ranks.
        worst_parameter: where that is.
        tolerance: what all errors must stay below.
        parameters: how many were compared.
        buffer_error: of the buffers that the forward updates, relative to their largest entry, the worst
            of all buffers and ranks; 0.0 if there are none.
        buffers: how many were compared.
    """

    mesh: Mesh
    recipe: str
    loss_error: float
    worst_gradient_error: float
    worst_parameter: str
    tolerance: float
    parameters: int
    buffer_error: float = 0.0
    buffers: int = 0

    @property
    def passed(self) -> bool:
        """Whether all errors are below the tolerance; a nan is not."""
        errors = (self.loss_error, self.worst_gradient_error, self.buffer_error)
        return all(error <= self.tolerance for error in errors)

    def __str__(self) -> str:
        buffers = f"  buffers             {self.buffer_error:.1e} of {self.buffers} updated\n"
        return (
            f"{'PASSED' if self.passed else 'FAILED'}: {self.mesh}, recipe {self.recipe}, "
            f"{self.mesh.size} ranks simulated\n"
            f"  loss                {self.loss_error:.1e} (relative, worst rank)\n"
            f"  worst gradient      {self.worst_gradient_error:.1e} of {self.parameters}, "
            f"at {self.worst_parameter}\n"
            f"{buffers if self.buffers else ''}"
            f"  tolerance           {self.tolerance:.0e}{self._hint}"
        )

    @property
    def _hint(self) -> str:
        """What a failure in low precision may mean."""
        if self.passed or self.tolerance == TOLERANCE_FLOAT64:
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
) -> VerifyReport:
    """Runs a plan with all ranks simulated in one process, and compares loss, every gradient and updated buffers.

    Needs no process group and no device; the model must have real weights and is left as it was.

    Args:
        model: plain PyTorch.
        example_inputs: a tuple of arguments, a dict of keyword arguments, or one tensor.
        mesh: the axes to simulate.
        plan: a plan, "random" for one drawn at random, or None to search one.
        recipe: constraints on the search.
        seed: of the random plan.
        loss_fn: as in `compile`.
    """
    subject = Subject.of(model, example_inputs, loss_fn=loss_fn)
    return subject.compare(_plan(subject.prepared, Mesh.of(mesh), plan, recipe, seed))


@dataclass(frozen=True)
class Subject:
    """A captured model with what a single device computes, to hold any number of plans against.

    Attributes:
        model: a copy of the user's.
        args, kwargs: the batch.
        prepared: its captured step.
        loss: of the single device.
        gradients: of the single device, None for a parameter that the model does not use.
        buffers: of the single device after its forward.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepared: Prepared
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, example_inputs: Any, *, loss_fn: LossFunction | None = None
    ) -> Subject:
        """Captures a model and runs it eagerly once."""
        args, kwargs = split_example(example_inputs)
        kwargs = dict(sorted(kwargs.items()))
        _require_weights(model)
        model = copy.deepcopy(model)  # capture leaves weak references on what it saw
        prepared = prepare_step(model, args, kwargs, loss_fn=loss_fn)
        _require_determinism(prepared)
        single = _single_device(model, args, kwargs, prepared.captured, loss_fn)
        return cls(model, args, kwargs, prepared, *single)

    def compare(self, plan: Plan) -> VerifyReport:
        """Simulates a plan; compares loss, gradients and new values of buffers.

        Raises PlanError for another model's plan.
        """
        program = build_program(self.prepared.captured, self.prepared.analysis, plan)
        losses, stored, updates = _simulated(program, self.model, self.args, self.kwargs)
        errors = _gradient_errors(program, stored, self.gradients)
        worst = max(errors, key=lambda name: _nan_last(errors[name]), default="none")
        return VerifyReport(
            mesh=plan.mesh,
            recipe=plan.recipe,
            loss_error=max((_relative(each, self.loss) for each in losses), key=_nan_last),
            worst_gradient_error=errors.get(worst, 0.0),
            worst_parameter=worst,
            tolerance=tolerance(self.prepared),
            parameters=len(errors),
            buffer_error=_buffer_error(updates, self.buffers),
            buffers=len(updates),
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
            f"The model draws random numbers ({random[0].target}), and a plan draws others than a single "
            "device: there is nothing to compare. Set its dropout to 0, or verify model.eval()."
        )


def tolerance(prepared: Prepared) -> float:
    """What a right plan stays below: that of the lowest precision that a gradient passes through."""
    tensors = prepared.analysis.graph.tensors.values()
    lowest_bytes = min((t.itemsize_bytes for t in tensors if t.needs_grad), default=8)
    if lowest_bytes <= 2:
        return TOLERANCE_HALF
    return TOLERANCE_FLOAT32 if lowest_bytes < 8 else TOLERANCE_FLOAT64


def _plan(
    prepared: Prepared, mesh: Mesh, plan: Plan | str | None, recipe: RecipeLike, seed: int
) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan == "random":
        return random_plan(
            prepared.analysis.graph, mesh, seed=seed, fingerprint=prepared.captured.fingerprint
        )
    if plan is not None:
        raise AutoparError(f'A plan to verify is a Plan, "random" or None, not {plan!r}.')
    # What is proved is the arithmetic: the ranks share this process's memory, whatever a plan would take.
    return make_plan(
        prepared, mesh, hardware=find_hardware("cpu-gloo"), recipe=recipe, memory_bytes=sys.maxsize
    )


def _single_device(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captured: Captured,
    loss_fn: LossFunction | None,
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """Loss, gradients and buffers of the model run eagerly; of a copy, so that its own stay."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    loss = run_with_loss(copied, args, kwargs, loss_fn)
    loss.backward()
    parameters = dict(copied.named_parameters())
    gradients = {name: parameters[name].grad for name in captured.parameters.values()}
    return loss.detach(), gradients, dict(copied.named_buffers(remove_duplicate=False))


def _simulated(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], dict[str, simulate.Ranks], dict[str, simulate.Ranks]]:
    """Of every rank the loss, the stored shards with their gradients, and new values of buffers."""
    mesh, plan = program.plan.mesh, program.plan
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    stored: dict[str, simulate.Ranks] = {}
    arguments: list[simulate.Ranks] = []
    for spec in program.parameters:
        how, value = plan.parameters[spec.name], parameters[spec.name].detach()
        stored[spec.name] = [
            simulate.shard(value, spec.dims, how.storage, mesh, rank)
            .clone()
            .requires_grad_(spec.name not in program.frozen)
            for rank in range(mesh.size)
        ]
        arguments.append(
            simulate.convert(stored[spec.name], spec.dims, how.storage, how.resident, mesh)
        )
    arguments += [[buffers[spec.name]] * mesh.size for spec in program.buffers]
    arguments += [[constant] * mesh.size for constant in program.constants]
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    for spec, x in zip(program.inputs, tensors, strict=True):
        arguments.append(
            [simulate.shard(x, spec.dims, spec.layout, mesh, rank) for rank in range(mesh.size)]
        )
    outputs = simulate.run(program, arguments)
    losses = outputs[-1]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    updates = {name: [x.detach() for x in outputs[i]] for i, name in program.mutated.items()}
    return [loss.detach() for loss in losses], stored, updates


def _buffer_error(updates: Mapping[str, simulate.Ranks], expected: Mapping[str, Tensor]) -> float:
    """The worst relative error of updated buffers on any rank."""
    errors = []
    for name, ranks in updates.items():
        floor = _BUFFER_FLOOR * _largest_of_module(name, updates, expected)
        scale = max(_largest(expected[name]), floor) or 1.0
        errors += [_difference(x, expected[name]) / scale for x in ranks]
    return max(errors, key=_nan_last, default=0.0)


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


def _gradient_errors(
    program: Program, stored: Mapping[str, simulate.Ranks], gradients: Mapping[str, Tensor | None]
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
        scale = max(_largest(expected), _FLOOR * largest)
        layout = program.plan.parameters[spec.name].storage
        errors[spec.name] = max(
            (
                _largest(
                    _gradient(x)
                    - simulate.shard(expected, spec.dims, layout, program.plan.mesh, rank)
                )
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
