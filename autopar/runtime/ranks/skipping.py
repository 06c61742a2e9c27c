"""Skips steps whose loss or gradients are not finite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.program.program import Program


class Skipping:
    """Undoes a step whose loss or gradients hold a NaN or an infinity: `begin` before each step, `end` after it.

    Gradients become None, so torch's optimizers skip the parameters: neither moments nor weights decay. Buffers that
    the step wrote, such as the statistics of batch norm, get their old values back.

    Args:
        model: the model that was compiled.
        wanted: whether such steps are skipped.

    Attributes:
        count: number of steps skipped so far.
    """

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self._model, self._wanted = model, wanted
        self._buffers: dict[str, Tensor] = {}
        self.count = 0

    def begin(self, program: Program) -> None:
        """Keeps the buffers that a step will write."""
        if self._looks():
            names = program.mutated.values()
            self._buffers = {name: self._model.get_buffer(name).clone() for name in names}

    def end(self, loss: Tensor, norm: Callable[[], Tensor]) -> None:
        """Undoes the step if it was not finite on any rank.

        Args:
            loss: loss of the step, the same on every rank.
            norm: function that returns the infinity norm of all gradients, the same on every rank.
        """
        if not self._looks() or bool(loss.isfinite().all() & norm().isfinite()):
            return
        self.count += 1
        for parameter in self._model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, value in self._buffers.items():
                self._model.get_buffer(name).copy_(value)

    def _looks(self) -> bool:
        return self._wanted and torch.is_grad_enabled()
