"""The proof without a cluster: all ranks of a plan simulated in one process, against the model itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
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
from autopar.planning import Prepared, make_plan, prepare_step
from autopar.program import Program, build_program
from autopar.random_plan import random_plan
from autopar.runtime import simulate
from autopar.search import RecipeLike

TOLERANCE_FLOAT64 = 1e-9
TOLERANCE_FLOAT32 = 2e-5  # where any part of the graph is of lower precision
_FLOOR = 1e-6  # gradients below this part of the largest are compared with that instead


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
        tolerance: what both must stay below.
        parameters: how many were compared.
    """

    mesh: Mesh
    recipe: str
    loss_error: float
    worst_gradient_error: float
    worst_parameter: str
    tolerance: float
    parameters: int

    @property
    def passed(self) -> bool:
        """Whether both errors are below the tolerance; a nan is not."""
        return self.loss_error <= self.tolerance and self.worst_gradient_error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{'PASSED' if self.passed else 'FAILED'}: {self.mesh}, recipe {self.recipe}, "
            f"{self.mesh.size} ranks simulated\n"
            f"  loss                {self.loss_error:.1e} (relative, worst rank)\n"
            f"  worst gradient      {self.worst_gradient_error:.1e} of {self.parameters}, "
            f"at {self.worst_parameter}\n"
            f"  tolerance           {self.tolerance:.0e}"
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
    """Runs a plan with all ranks simulated in one process, and compares loss and every gradient.

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
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prepared: Prepared
    loss: Tensor
    gradients: Mapping[str, Tensor | None]

    @classmethod
    def of(
        cls, model: nn.Module, example_inputs: Any, *, loss_fn: LossFunction | None = None
    ) -> Subject:
        """Captures a model and runs it eagerly once."""
        args, kwargs = _split(example_inputs)
        kwargs = dict(sorted(kwargs.items()))
        _require_weights(model)
        model = copy.deepcopy(model)  # capture leaves weak references on what it saw
        prepared = prepare_step(model, args, kwargs, loss_fn=loss_fn)
        _require_determinism(prepared)
        loss, gradients = _single_device(model, args, kwargs, prepared.captured, loss_fn)
        return cls(model, args, kwargs, prepared, loss, gradients)

    def compare(self, plan: Plan) -> VerifyReport:
        """Simulates a plan and compares loss and gradients. Raises PlanError for another model's."""
        program = build_program(self.prepared.captured, self.prepared.analysis, plan)
        losses, stored = _simulated(program, self.model, self.args, self.kwargs)
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
    graph = prepared.analysis.graph
    low = any(t.needs_grad and t.itemsize_bytes < 8 for t in graph.tensors.values())
    return TOLERANCE_FLOAT32 if low else TOLERANCE_FLOAT64


def _split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


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
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the model run eagerly; of a copy, so that buffers and gradients stay."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    loss = run_with_loss(copied, args, kwargs, loss_fn)
    loss.backward()
    parameters = dict(copied.named_parameters())
    return loss.detach(), {name: parameters[name].grad for name in captured.parameters.values()}


def _simulated(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], dict[str, simulate.Ranks]]:
    """The loss of every rank, and the stored shards of every rank with their gradients."""
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
    losses = simulate.run(program, arguments)[-1]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    return [loss.detach() for loss in losses], stored


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
