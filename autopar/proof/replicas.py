"""Checks plans with replicas that synchronise every K steps (`autopar.ir.meeting`), by comparison with plain PyTorch.

Both sides take the same steps in one process, in float64:

    reference     a copy of the model for each replica, one after the other: autograd, torch.optim.SGD, and at the
                  meeting the mean of the copies, or torch.optim.SGD with Nesterov's momentum on the differences
    the plan      the program of a replica on simulated ranks, whose gradients are put together from the shards of the
                  ranks, and at the meeting `autopar.runtime.replicas.outer_step`

Between meetings both sides use SGD. Any optimizer would do, as long as the replicas' parameters become different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autopar.ir import Graph, Meeting
from autopar.program.program import Program
from autopar.proof.comparison import (
    PlanResults,
    float64_verdicts,
    held_gradient,
    parameter_verdicts,
    plan_errors,
    whole_of_shards,
)
from autopar.proof.simulated_steps import simulated_steps
from autopar.proof.single_device import Batch, Results, SingleDevice, copied
from autopar.proof.verdict import Verdict
from autopar.runtime.replicas.outer_step import OuterStep

SHOWN_STEPS = 3  # most steps between meetings that are run: the program of every step is the same
_RATE = 1e-2  # learning rate of SGD


@dataclass(frozen=True)
class ReplicaSteps:
    """The steps of all replicas, which `verdicts` runs on both sides.

    Attributes:
        device: the model and its loss in float64.
        whole: the program of a replica in float64.
        graph: the captured model.
        parts: for every replica the micro-batches of its plan.
        together: for every replica the batches of a step for the single device, see `Subject`.
        meeting: the replicas and meetings of the plan.
    """

    device: SingleDevice
    whole: Program
    graph: Graph
    parts: Sequence[Sequence[Batch]]
    together: Sequence[Sequence[Batch]]
    meeting: Meeting

    @property
    def steps(self) -> int:
        """Number of steps between meetings that are run."""
        return min(self.meeting.steps, SHOWN_STEPS)

    def verdicts(self) -> list[Verdict]:
        """Verdicts on every step of every replica until one step after the second meeting, and on both meetings."""
        pairs = [copied(self.device.model, self.device.loss_fn) for _ in self.parts]
        plain, ours = [model for model, _ in pairs], self._copies()
        reference, outer = _PlainReplicas(plain, self.meeting), OuterStep(self.meeting)
        outer.begin(trained(ours[0]), {})
        found: list[Verdict] = []
        for step in range(1, 2 * self.steps + 2):
            for replica, ((model, loss_fn), other) in enumerate(zip(pairs, ours, strict=True)):
                expected = self.device.step_of(model, loss_fn, self.together[replica])
                results = self._simulated(other, replica, expected)
                found += float64_verdicts(plan_errors(results, expected), expected, step)
                descend(model, expected.gradients)
                descend(other, whole_gradients(results))
            if step % self.steps == 0:
                reference.meet()
                _meet(ours, outer)
                found += parameter_verdicts(ours, plain, step)
        return found

    def _copies(self) -> list[nn.Module]:
        return [copied(self.device.model, self.device.loss_fn)[0] for _ in self.parts]

    def _simulated(self, model: nn.Module, replica: int, expected: Results) -> PlanResults:
        """One step of a replica on simulated ranks; its buffers take their new values."""
        device = replace(self.device, model=model)
        steps = [(self.parts[replica], expected)]
        (results,) = simulated_steps(self.whole, [self.graph], device, steps, None)
        with torch.no_grad():
            for name, ranks in results.buffers.items():
                model.get_buffer(name).copy_(ranks[0])
        return results


class _PlainReplicas:
    """Plain copies of the model, one for each replica, whose meetings use only torch (the reference side)."""

    def __init__(self, models: Sequence[nn.Module], meeting: Meeting) -> None:
        self._models, self._meeting = models, meeting
        self._base = {name: x.detach().clone() for name, x in trained(models[0])}
        self._outer = torch.optim.SGD(
            self._base.values(), lr=meeting.rate, momentum=meeting.momentum, nesterov=meeting.momentum > 0
        )

    @torch.no_grad()
    def meet(self) -> None:
        """Gives all models the same parameters."""
        columns = [dict(trained(model)) for model in self._models]
        for name, x in self._base.items():
            mean = torch.stack([each[name] for each in columns]).mean(0)
            if self._meeting.rule == "diloco":
                x.grad = x - mean
            else:
                x.copy_(mean)
        self._outer.step()
        for each in columns:
            for name, x in self._base.items():
                each[name].copy_(x)
        _average_buffers(self._models)


@torch.no_grad()
def _meet(models: Sequence[nn.Module], outer: OuterStep) -> None:
    """A meeting by the runtime's code, in which this function computes the mean in place of an all-reduce."""
    columns = [dict(trained(model)) for model in models]
    for name, x in columns[0].items():
        mean = torch.stack([outer.sent(name, each[name]) for each in columns]).sum(0)
        outer.take(name, x, mean.div_(len(columns)))
        for each in columns[1:]:
            each[name].copy_(x)
    _average_buffers(models)


def _average_buffers(models: Sequence[nn.Module]) -> None:
    for column in zip(*(model.buffers() for model in models), strict=True):
        if column[0].is_floating_point():
            mean = torch.stack(column).mean(0)
            for x in column:
                x.copy_(mean)


def trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)


@torch.no_grad()
def descend(model: nn.Module, gradients: Mapping[str, Tensor | None]) -> None:
    """A step of SGD."""
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        if gradient is not None and parameters[name].requires_grad:
            parameters[name].sub_(gradient, alpha=_RATE)


def whole_gradients(results: PlanResults) -> dict[str, Tensor]:
    """Whole gradients of all parameters, assembled from the shards of the ranks."""
    plan = results.program.plan
    return {
        spec.name: whole_of_shards(spec, [held_gradient(x) for x in results.stored[spec.name]], plan)
        for spec in results.program.parameters
        if spec.name in plan.parameters and spec.name not in results.program.frozen
    }
