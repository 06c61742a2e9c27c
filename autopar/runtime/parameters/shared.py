"""Parameters and buffers that several pipeline stages use, such as an embedding that is tied to the head.

Every rank that needs such a parameter holds it whole or its shard, with equal values. What a step adds to its gradient
is added up over those ranks, so that their optimizers make the same of it.

Buffers are whole on every rank. One stage of a program changes a buffer, and another program may read it on another
stage: after each run every rank gets the new values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import StepError
from autopar.ir import PIPELINE_AXIS, Pipeline
from autopar.ops.collectives import group_name
from autopar.program.program import Program
from autopar.runtime.parameters.parameters import ParameterStore
from autopar.runtime.parameters.stage_partition import Users
from autopar.runtime.ranks.world import Pipe


class SharedParameters:
    """The parameters of this rank that other positions of the pipeline hold too.

    Args:
        users: parameter name -> the stages that hold it, of the first program: later ones may use it on
            fewer of them.
        pipeline: where they lie.
        store: the parameters of this rank.
    """

    def __init__(self, users: Users, pipeline: Pipeline, store: ParameterStore) -> None:
        self._pipe, self._device = store.world.pipe, store.world.device
        assert self._pipe is not None
        self._holders = {name: _ranks(own, pipeline) for name, own in users.items()}
        several = dict.fromkeys(ranks for ranks in self._holders.values() if len(ranks) > 1)
        groups = {ranks: self._group(ranks) for ranks in several}
        self._shared: dict[str, tuple[nn.Parameter, str]] = {
            name: (store.kept[name].parameter, groups[ranks])
            for name, ranks in self._holders.items()
            if len(ranks) > 1 and self._pipe.rank in ranks
        }

    def _group(self, ranks: tuple[int, ...]) -> str:
        """The c10d name of the group of these positions; every rank makes the groups of all, in one order."""
        assert self._pipe is not None
        if len(ranks) == self._pipe.group.size():
            return self._pipe.group_name
        lines = _torch.lines_along(self._pipe.device_mesh, PIPELINE_AXIS)
        own, _ = dist.new_subgroups_by_enumeration([[line[r] for r in ranks] for line in lines])
        return group_name(own) if own is not None and self._pipe.rank in ranks else ""

    def holders(self, name: str) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
        """The positions that hold a parameter of this rank, and their group if there are several."""
        group = _torch.resolve_group(self._shared[name][1]) if name in self._shared else None
        return self._holders[name], group

    @contextlib.contextmanager
    def summed(self, used: Container[str]) -> Iterator[None]:
        """Context of a step: sums what the step adds to shared gradients over the stages that share them.

        `used` are the parameters that some stage of the program uses.
        """
        shared = [pair for name, pair in self._shared.items() if name in used]
        before = [parameter.grad for parameter, _ in shared]
        for parameter, _ in shared:
            parameter.grad = None
        try:
            yield
            for parameter, group in shared:
                if parameter.requires_grad:
                    self._sum(parameter, group, self._device)
        finally:
            for (parameter, _), gradient in zip(shared, before, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def refuse_backward(self, used: Container[str]) -> None:
        """Raises StepError for parameters whose gradients a backward outside of a step would not add up."""
        pairs = ((name, pair[0]) for name, pair in self._shared.items() if name in used)
        shared = [name for name, parameter in pairs if parameter.requires_grad]
        if shared:
            raise StepError(
                f"Several pipeline stages use the parameter {shared[0]}, and only model.step adds up its gradients "
                "over them. Give autopar.compile the loss as loss_fn and train with model.step(*batch), untie the "
                "parameter, or plan without stages."
            )

    @staticmethod
    @torch.no_grad()
    def _sum(parameter: nn.Parameter, group: str, device: torch.device) -> None:
        if parameter.grad is None:
            _torch.accumulate_gradient(parameter, torch.zeros_like(_torch.local_tensor(parameter)))
        gradient: Tensor = _torch.local_gradient(parameter)
        near = gradient.to(device)  # itself, unless the parameter is stored on the host
        dist.all_reduce(near, group=_torch.resolve_group(group))
        if near is not gradient:
            gradient.copy_(near)


class ChangedBuffers:
    """The buffers that the stages of a program change, which another program may read on other stages.

    Args:
        stages: programs of all stages.
        pipeline: where they lie.
        pipe: this rank's place along the pipeline.
        model: the module that has the buffers.
    """

    def __init__(self, stages: Sequence[Program], pipeline: Pipeline, pipe: Pipe, model: nn.Module) -> None:
        self._pipe, self._model = pipe, model
        self._names: dict[int, list[str]] = {}  # by the position that changes them
        for number, stage in enumerate(stages):
            self._names.setdefault(pipeline.rank_of(number), []).extend(stage.mutated.values())

    @torch.no_grad()
    def share(self) -> None:
        """Gives every rank the new values after a run, in one message from each position that made some."""
        for source, names in sorted(self._names.items()):
            if names:
                _broadcast([self._model.get_buffer(name) for name in names], source, self._pipe)


def _broadcast(buffers: Sequence[Tensor], source: int, pipe: Pipe) -> None:
    """Overwrites buffers of any formats, which lie on one device, by those of one position of the pipeline."""
    sizes = [x.nbytes for x in buffers]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=buffers[0].device)
    if pipe.rank == source:
        torch.cat([x.reshape(-1).view(torch.uint8) for x in buffers], out=flat)
    dist.broadcast(flat, pipe.peer(source), group=pipe.group)
    if pipe.rank != source:
        for x, part in zip(buffers, flat.split(sizes), strict=True):
            # A copy begins where a value of any format may begin.
            x.copy_(part.clone().view(x.dtype).view(x.shape))


def _ranks(stages: Sequence[int], pipeline: Pipeline) -> tuple[int, ...]:
    """The positions along the pipeline on which some stages lie, in order."""
    return tuple(sorted({pipeline.rank_of(stage) for stage in stages}))
