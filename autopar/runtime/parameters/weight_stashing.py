"""The versions of a stage's parameters inside a step, and the optimizer that makes them; see `autopar.pipeline`.

The newest version is the parameters at rest, which the optimizer updates. Where a micro-batch still needs the values
that it is about to write over, the parameters at rest first become copies, and the old tensors stay as they are: what
autograd saved of them is unchanged, and backward runs on the very leaves that the forward took.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import StepError
from autopar.ir import Pipeline
from autopar.pipeline.weight_stashing import last_uses
from autopar.runtime.parameters.parameters import Residents
from autopar.runtime.parameters.reducer import Reducer


def refuse_gradients(pipeline: Pipeline | None, asked: str) -> None:
    """Raises StepError for a feature that needs the gradients of a whole step, if the schedule updates inside steps."""
    if pipeline is not None and pipeline.update_every:
        raise StepError(
            f"{asked} needs the gradients of a whole step, but the schedule {pipeline.schedule} updates parameters "
            "inside of the step and keeps no gradients. Leave it out and train by model.step(*batch), or take the "
            "schedule 1f1b."
        )


class HeldOptimizer:
    """The optimizer that steps call themselves, under a schedule that updates inside of a step."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None

    def hold(self, optimizer: Optimizer) -> None:
        """Takes an optimizer, in place of one that was held."""
        if not isinstance(optimizer, Optimizer):
            raise StepError(
                f"attach_optimizer was given {type(optimizer).__name__}, but takes an optimizer of torch.optim, such "
                "as torch.optim.AdamW(model.parameters())."
            )
        self._optimizer = optimizer

    def check(self, pipeline: Pipeline | None) -> None:
        """Raises StepError if steps update parameters and there is no optimizer, or the other way round."""
        is_inside = pipeline is not None and pipeline.update_every > 0
        if is_inside and self._optimizer is None:
            assert pipeline is not None
            raise StepError(
                f"The schedule {pipeline.schedule} updates parameters inside of a step, but no optimizer was given. "
                "Call model.attach_optimizer(optimizer) once, on every rank, before the first step."
            )
        if not is_inside and self._optimizer is not None:
            raise StepError(
                "An optimizer was attached, but the plan has no schedule that updates parameters inside of a step. "
                "Leave attach_optimizer out and call optimizer.step() after each step, or ask for such a schedule: "
                "mesh={'pp': 2}, schedule='pipedream', micro_batches=8."
            )

    def step(self) -> None:
        """A step of the optimizer."""
        assert self._optimizer is not None, "checked before the step"
        self._optimizer.step()


class StageVersions:
    """The versions of one stage's parameters in a step; made when the newest is on the device.

    Args:
        residents: the stage's parameters, whose `leaves` are those of the version in use.
        reducer: reducer of their gradients.
        seen: version that each micro-batch sees.
    """

    def __init__(self, residents: Residents, reducer: Reducer, seen: Sequence[int]) -> None:
        self._residents, self._reducer = residents, reducer
        self._seen, self._last = seen, last_uses(seen)
        self._newest = 0
        self._leaves: dict[int, list[Tensor]] = {0: residents.leaves}

    def use(self, micro_batch: int) -> None:
        """Before the forward or the backward of a micro-batch: takes its version."""
        self._residents.leaves = self._leaves[self._seen[micro_batch]]

    @torch.no_grad()
    def update(self, micro_batch: int, optimizer: HeldOptimizer) -> None:
        """Makes the next version from the gradients that have arrived by the end of a micro-batch's backward."""
        old = self._leaves[self._newest]
        # Those that a micro-batch after this one sees.
        self._leaves = {v: x for v, x in self._leaves.items() if self._last.get(v, -1) > micro_batch}
        self._residents.leaves = list(old)
        if self._newest in self._leaves:
            self._residents.copy_at_rest()
        optimizer.step()
        for kept in self._residents.kept:
            kept.parameter.grad = None
        if self._residents.refresh():
            self._reducer.attach()
        self._newest += 1
        self._leaves[self._newest] = self._residents.leaves

    def end(self) -> None:
        """After a step, also a failed one: uses the newest version and frees the others."""
        self._residents.leaves = self._leaves[self._newest]
        self._leaves = {}
