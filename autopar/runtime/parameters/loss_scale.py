"""The scale of the loss in backward, which keeps small gradients of float16 from becoming zero.

Gradients below 6e-8 are zero in float16. So backward begins with a large number in place of 1, the gradients at the
parameters are divided by it again, and a step in which they overflow is skipped and the number made smaller
(Micikevicius et al. 2018, section 3.2). The rule is that of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir import MixedPrecision
from autopar.runtime.ranks.all_ranks import warn_together

Result = TypeVar("Result")


@dataclass(frozen=True)
class LossScaling:
    """Loss scaling for backward; the defaults are those of `torch.amp.GradScaler`.

    Attributes:
        initial: first scale, above zero.
        growth: factor of the scale after `growth_steps` steps in a row without overflow, at least 1.
        backoff: factor of the scale after a step that overflows, above zero and at most 1.
        growth_steps: number of steps without overflow after which the scale grows, at least 1.

    Raises AutoparError for a value out of its range.

    >>> import autopar
    >>> autopar.LossScaling(initial=2.0**10)
    LossScaling(initial=1024.0, growth=2.0, backoff=0.5, growth_steps=2000)
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_steps: int = 2000

    def __post_init__(self) -> None:
        ranges = (
            ("initial", 0 < self.initial < math.inf, "above 0 and finite"),
            ("growth", 1 <= self.growth < math.inf, "1 or more, and finite"),
            ("backoff", 0 < self.backoff <= 1, "above 0 and at most 1"),
            ("growth_steps", self.growth_steps >= 1, "1 or more"),
        )
        for name, is_right, words in ranges:
            if not is_right:
                raise AutoparError(f"LossScaling was given {name}={getattr(self, name)!r}, which must be {words}.")

    @classmethod
    def of(cls, given: LossScaling | float | None, precision: MixedPrecision | None) -> LossScaling | None:
        """Reads the argument `loss_scale` of `compile` for a precision policy; None if the loss is not scaled.

        A number is a scale that stays. None is the default scaling where parameters or gradients are of float16.

        Raises AutoparError for a value that is not a scale.
        """
        if given is None:
            used = () if precision is None else (precision.param_dtype, precision.reduce_dtype)
            return cls() if "float16" in used else None
        if isinstance(given, cls):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise AutoparError(
                f"loss_scale={given!r} is not a scale; give a number such as 1024, or autopar.LossScaling(...)."
            )
        return cls(float(given), growth=1.0, backoff=1.0)


class LossScaler:
    """The scale of one model's loss, the same on every rank.

    Args:
        scaling: rule of its changes; None for losses that are not scaled.

    Attributes:
        scale: scale of the next step.
        skipped: number of steps that overflowed and were skipped.
    """

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.scale = 1.0 if scaling is None else scaling.initial
        self.skipped = 0
        self._good_steps = 0  # in a row, since the scale last changed
        self._warned = False

    def step(
        self, run: Callable[[float], Result], trained: Callable[[], Sequence[nn.Parameter]], norm: Callable[[], Tensor]
    ) -> Result:
        """Runs a step, and leaves gradients without the scale; if they overflow, it leaves none of them.

        Args:
            run: function that runs a step whose backward begins with the given number.
            trained: function that returns the trained parameters of this rank.
            norm: function that returns the infinity norm of all gradients, the same on every rank.
        """
        if self._scaling is None or not torch.is_grad_enabled():
            return run(1.0)
        parameters = trained()
        (result, found), gradients = gradients_of(lambda: (run(self.scale), norm()), parameters)
        is_finite = bool(found.isfinite())
        for p, gradient in zip(parameters, gradients, strict=True):
            _leave(p, gradient if is_finite else None, self.scale, skips=not is_finite)
        self._change(self._scaling, is_finite)
        return result

    def warn_of_forward(self) -> None:
        """Warns once that the loss of `model(...)` is not scaled, because the caller runs its backward."""
        if self._scaling is not None and not self._warned and torch.is_grad_enabled():
            self._warned = True
            warn_together(
                "model(...) was called with autograd on, but its backward is not scaled: gradients below 6e-8 are zero "
                "in float16. Train with model.step(*batch), which scales, or multiply the loss by a scale of "
                "torch.amp.GradScaler before its backward.",
                stacklevel=4,
            )

    def state(self) -> dict[str, Any]:
        """The scale and its history, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, Any] | None) -> None:
        """Takes the scale from a checkpoint's state; None leaves the first scale."""
        if self._scaling is not None and state is not None and self._scaling.growth > 1:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])

    def _change(self, scaling: LossScaling, is_finite: bool) -> None:
        if not is_finite:
            self.skipped += 1
            before, self._good_steps, self.scale = self.scale, 0, self.scale * scaling.backoff
            if self.scale < 1 <= before:
                warn_together(
                    f"The loss scale fell below 1, to {self.scale:g}, after {self.skipped} skipped steps: gradients "
                    "are NaN or infinite at any scale. autopar.find_nan(model, *batch) names the op that makes them.",
                    stacklevel=5,
                )
            return
        self._good_steps += 1
        if self._good_steps == scaling.growth_steps:
            self._good_steps, self.scale = 0, self.scale * scaling.growth


@torch.no_grad()
def _leave(p: nn.Parameter, gradient: Tensor | None, scale: float, *, skips: bool) -> None:
    """Adds the gradient of a scaled loss to the parameter's gradient; a skipped step leaves none."""
    if skips:
        p.grad = None
    elif gradient is not None:
        _torch.local_tensor(gradient).mul_(1 / scale)
        p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def gradients_of(run: Callable[[], Result], parameters: Sequence[nn.Parameter]) -> tuple[Result, list[Tensor | None]]:
    """Runs a step and returns its gradients; `.grad` of every parameter is left as it was.

    Args:
        run: function that runs the step.
        parameters: the trained parameters that this rank holds.

    Returns:
        The result of `run`, and the gradient of each parameter, None for a parameter without one.
    """
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        result = run()
        return result, [p.grad for p in parameters]
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


def scaled(loss: Tensor, scale: float) -> Tensor:
    """A loss whose gradient is multiplied by `scale` on its way back."""
    result: Tensor = loss if scale == 1 else _Scaled.apply(loss, scale)
    return result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
