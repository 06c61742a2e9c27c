"""The outer update: new parameters from the mean over all replicas, and the state for the next synchronisation.

The three rules, with their sources, are those of `autopar.ir.meeting`. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.errors import StepError
from autopar.ir import Meeting


class OuterStep:
    """The step that replicas take together, parameter by parameter.

    Args:
        meeting: the rule, with the numbers of the outer optimizer.

    Attributes:
        base: name -> parameter at the last meeting, under the rules that keep it.
        momentum: name -> momentum of the outer optimizer; empty before the first meeting.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.base: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self, parameters: Iterable[tuple[str, Tensor]], momentum: Mapping[str, Tensor]) -> None:
        """Takes parameters as those of a meeting.

        Args:
            parameters: names and values, the same on every replica.
            momentum: momentum of the outer optimizer, by name; empty at the start.
        """
        self.momentum = dict(momentum)
        if self.meeting.copies:
            self.base = {name: x.detach().clone() for name, x in parameters}

    def sent(self, name: str, x: Tensor) -> Tensor:
        """The tensor to average: a parameter, or its difference to the base. The caller may write into it."""
        if not self.meeting.copies:
            return x.clone()
        if name not in self.base:
            raise StepError(
                f"The parameter {name} was unfrozen after the last synchronisation, and no replica kept its value from "
                "then. Compile the model again."
            )
        return x - self.base[name]

    def take(self, name: str, x: Tensor, mean: Tensor) -> None:
        """Gives a parameter its common value.

        Args:
            name: name of the parameter.
            x: the parameter, which is overwritten.
            mean: mean over the replicas of their `sent` tensors; it is overwritten.
        """
        if not self.meeting.copies:
            x.copy_(mean)
            return
        base = self.base[name]
        if self.meeting.rule == "geo":
            base.add_(mean)
        else:
            self._descend(name, base, mean.neg_())
        x.copy_(base)

    def undo(self, name: str, x: Tensor) -> None:
        """Gives a parameter its value at the last meeting or pull; a parameter that was unfrozen since stays."""
        if name in self.base:
            x.copy_(self.base[name])

    def adopt(self, name: str, x: Tensor, common: Tensor, rows: Tensor | None) -> None:
        """Gives a parameter the common value that a server has answered.

        Args:
            name: name of the parameter.
            x: the parameter, which is overwritten.
            common: the common value, which counts in these rows alone.
            rows: indices of the rows that differ from the parameter, or from its base; None for all.
        """
        base = self.base[name]
        if rows is None:
            base.copy_(common)
            x.copy_(base)
        else:
            own = rows.to(x.device)
            base[own] = x[own] = common[rows].to(x.device)

    def _descend(self, name: str, base: Tensor, gradient: Tensor) -> None:
        """A step of the outer optimizer, as torch.optim.SGD(nesterov=True) takes it."""
        factor = self.meeting.momentum
        if name in self.momentum:
            self.momentum[name].mul_(factor).add_(gradient)
        else:
            self.momentum[name] = gradient.clone()
        base.add_(gradient.add_(self.momentum[name], alpha=factor), alpha=-self.meeting.rate)
