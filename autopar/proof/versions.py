"""Schedules that update without a flush, simulated in one process and compared with a single device's same delays.

Two sides take the same steps with SGD, in float64:

    reference     one model by autograd; for every update its parameters are put together from the versions that the
                  formulas of the papers give each stage (`version_seen`)
    the plan      the programs of all stages on simulated ranks, in the order of the schedule's actions; each stage
                  updates its own shards, and micro-batches take the versions of `autopar.pipeline.weight_stashing`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autopar.analysis.objective import equal_parts
from autopar.ir import Graph, Pipeline
from autopar.pipeline.weight_stashing import WeightVersions
from autopar.program.program import Program, TensorSpec
from autopar.program.stages import cut_stages
from autopar.proof import lockstep
from autopar.proof.comparison import (
    Key,
    float64_verdicts,
    held_gradient,
    largest_difference,
    parameter_verdicts,
    whole_of_shards,
)
from autopar.proof.lockstep import Ranks
from autopar.proof.rehearsal import Rehearsal, actions_of
from autopar.proof.simulated_steps import draws_of, named_inputs, prefixed_buffers
from autopar.proof.single_device import Batch, Results, SingleDevice, copied
from autopar.proof.verdict import Verdict

_RATE = 1e-1  # of SGD


def version_seen(pipeline: Pipeline, stage: int, micro_batch: int) -> int:
    """Number of updates that a micro-batch sees on a stage, by the formulas of the papers.

    >>> [version_seen(Pipeline(2, "pipedream", ("linear_1",)), 0, m) for m in range(4)]
    [0, 0, 1, 2]
    """
    if pipeline.schedule == "2bw":
        return max(0, micro_batch // pipeline.stages - 1)
    behind = pipeline.stages - 1 - (stage if pipeline.schedule == "pipedream" else 0)
    return max(0, micro_batch - behind)


@dataclass(frozen=True)
class DelayedSteps:
    """Steps with updates inside, to be run on both sides.

    Attributes:
        device: the model and its loss in float64.
        whole: the program of the plan in float64.
        graph: the captured model.
        steps: for every step the micro-batches of the plan.
        together: for every step and update the same as the single device takes them, see `Subject`.
    """

    device: SingleDevice
    whole: Program
    graph: Graph
    steps: Sequence[Sequence[Batch]]
    together: Sequence[Sequence[Sequence[Batch]]]

    @property
    def pipeline(self) -> Pipeline:
        """The stages of the plan."""
        assert self.whole.plan.pipeline is not None, "only a plan with stages has versions"
        return self.whole.plan.pipeline

    @cached_property
    def _stages(self) -> list[Program]:
        return cut_stages(self.whole, self.graph)

    def verdicts(self) -> list[Verdict]:
        """The loss of every update, and buffers and parameters after every step."""
        plain, loss_fn = copied(self.device.model, self.device.loss_fn)
        ours, _ = copied(self.device.model, self.device.loss_fn)
        found: list[Verdict] = []
        for step, (parts, together) in enumerate(zip(self.steps, self.together, strict=True), 1):
            expected = self._reference(plain, loss_fn, together)
            rehearsal = self._rehearsed(ours, parts)
            for results, ranks in zip(expected, self._losses(rehearsal), strict=True):
                errors: dict[Key, float] = {("loss", ""): largest_difference(ranks, results.loss)}
                found += float64_verdicts(errors, results, step)
            buffers: dict[Key, float] = {
                ("buffer", name): largest_difference(ranks, expected[-1].buffers[name])
                for name, ranks in rehearsal.updates.items()
            }
            found += float64_verdicts(buffers, expected[-1], step)
            self._take(ours, rehearsal)
            found += parameter_verdicts([ours], [plain], step)
        return found

    # --- the reference

    def _reference(self, model: nn.Module, loss_fn: Any, together: Sequence[Sequence[Batch]]) -> list[Results]:
        """The results of every update of a step, after which the model has the newest parameters."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        versions, found = [_values(parameters)], list[Results]()
        for update, batches in enumerate(together):
            first = update * self.pipeline.update_every
            for name, stage in self._homes.items():
                if name in parameters:
                    seen = versions[version_seen(self.pipeline, stage, first)]
                    parameters[name].data = seen[name].clone()
            found.append(self.device.step_of(model, loss_fn, batches))
            versions.append(_descended(versions[-1], found[-1].gradients))
        for name, value in versions[-1].items():
            parameters[name].data = value
        return found

    @cached_property
    def _homes(self) -> dict[str, int]:
        """Parameter name -> its stage."""
        stages = enumerate(self._stages)
        return {spec.name: number for number, stage in stages for spec in stage.parameters}

    # --- the plan

    def _rehearsed(self, model: nn.Module, parts: Sequence[Batch]) -> VersionedRehearsal:
        """A step of the plan on simulated ranks, from a model's parameters and buffers."""
        inputs = [named_inputs(self.whole, batch) for batch in parts]
        buffers = dict(model.named_buffers(remove_duplicate=False))
        objective = self.whole.objective
        shares = objective.shares(equal_parts(objective, [each | prefixed_buffers(buffers) for each in inputs]))
        rehearsal = VersionedRehearsal(
            self.whole,
            self._stages,
            micro_batches=len(parts),
            parameters=dict(model.named_parameters()),
            buffers=buffers,
            shares=objective.shares_of_groups(shares, self.pipeline.update_every),
            draws=draws_of(self.whole, self.device, self.pipeline.update_every),
        )
        rehearsal.run(actions_of(self.whole.plan), inputs.__getitem__)
        return rehearsal

    def _losses(self, rehearsal: VersionedRehearsal) -> Iterator[Ranks]:
        """The loss of every update, on the ranks of the last stage."""
        every = self.pipeline.update_every
        weighted = [[s * x for x in rehearsal.losses[i]] for i, s in enumerate(rehearsal.shares)]
        for i in range(0, len(weighted), every):
            yield [torch.stack(ranks).sum(0) for ranks in zip(*weighted[i : i + every], strict=True)]

    @torch.no_grad()
    def _take(self, model: nn.Module, rehearsal: VersionedRehearsal) -> None:
        """Gives a model what a step has made of its parameters and buffers."""
        for spec in self.whole.parameters:
            value = whole_of_shards(spec, rehearsal.stored[spec.name], self.whole.plan)
            model.get_parameter(spec.name).copy_(value)
        for name, ranks in rehearsal.updates.items():
            model.get_buffer(name).copy_(ranks[0])


class VersionedRehearsal(Rehearsal):
    """All stages of a plan that update inside of a step, each with the versions of its parameters.

    The arguments and attributes are those of `Rehearsal`; `stored` are the newest parameters.
    """

    def __init__(self, whole: Program, stages: Sequence[Program], **arguments: Any) -> None:
        super().__init__(whole, stages, **arguments)
        assert whole.plan.pipeline is not None, "only a plan with stages has versions"
        self._whole = whole
        self._seen = WeightVersions(whole.plan.pipeline, arguments["micro_batches"]).seen
        self._versions = [[self._newest(stage.parameters)] for stage in stages]

    def _newest(self, specs: Iterable[TensorSpec]) -> dict[str, Ranks]:
        return {spec.name: self._leaves[spec.name] for spec in specs}

    def _leaves_of(self, stage: int, micro_batch: int) -> Mapping[str, Ranks]:
        return self._versions[stage][self._seen[stage][micro_batch]]

    def _update(self, stage: int, micro_batch: int) -> None:
        """A step of SGD with the gradients of the version that the micro-batch saw."""
        used = self._leaves_of(stage, micro_batch)
        for spec in self.stages[stage].parameters:
            if spec.name not in self._whole.frozen:
                gradients = self._returned(spec, used[spec.name])
                pairs = zip(self.stored[spec.name], gradients, strict=True)
                self._place_shards(spec, [x.detach() - _RATE * g for x, g in pairs], self._whole)
        self._versions[stage].append(self._newest(self.stages[stage].parameters))

    def _returned(self, spec: TensorSpec, leaves: Ranks) -> Ranks:
        """The gradients of leaves as the shards lie; the leaves have none after it."""
        how = self._whole.storage(spec.name)
        shards = [torch.zeros_like(x).requires_grad_() for x in self.stored[spec.name]]
        residents = lockstep.convert(shards, spec.dims, how.storage, how.resident, self.mesh)
        self._return_gradient(residents, leaves)
        for leaf in leaves:
            leaf.grad = None
        return [held_gradient(x) for x in shards]


def _values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def _descended(values: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """A step of SGD."""
    found = {name: gradients.get(name) for name in values}
    return {name: x if (g := found[name]) is None else x - _RATE * g.detach() for name, x in values.items()}
