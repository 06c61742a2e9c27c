"""Steps with stages or micro-batches that a script runs as `loss = model(...)` and `loss.backward()`.

Such a step runs forward and backward together, in the order of its schedule. So its gradients are computed before the
script asks for them. They are kept, and the loss gets a node of autograd's graph, which returns them multiplied with
the gradient of the loss:

    loss = model(x, y)        every micro-batch runs forward and backward; `.grad` stays as it was
    (loss / 2).backward()     `.grad` grows by half of the gradients of the step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import StepError
from autopar.runtime.parameters.loss_scale import gradients_of


def with_deferred_gradients(run: Callable[[], list[Tensor]], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Runs a step; its results are differentiable, and their backward returns the gradients of the step.

    Args:
        run: function that runs the step, and returns its results with the loss as the last.
        parameters: the trained parameters that this rank holds.

    The backward of the results raises StepError if another result than the loss gets a gradient, and if it runs a
    second time.
    """
    results, gradients = gradients_of(run, parameters)
    used = [i for i, gradient in enumerate(gradients) if gradient is not None]
    handed_out: tuple[Tensor, ...] = _HandOut.apply(
        [gradients[i] for i in used], len(results), *results, *(parameters[i] for i in used)
    )
    return list(handed_out)


class _HandOut(torch.autograd.Function):
    """The results of a step; the backward returns each parameter's gradient and drops it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.count = gradients, count
        results = tuple(x.view_as(x) for x in tensors[:count])
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return results

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Tensor | None, ...]:
        *others, of_loss = arrived
        if any(gradient is not None for gradient in others):
            raise StepError(
                "A gradient arrives at a result of model(...) that is not the loss. Through pipeline stages or "
                "micro-batches the backward has run with the forward, and only for the loss: add to the loss, inside "
                "the model, everything else that needs gradients."
            )
        if ctx.gradients is None:
            raise StepError(
                "The backward of this loss runs a second time, but the first has taken its gradients. Call "
                "model(...) again."
            )
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            for gradient in gradients:
                local = _torch.local_tensor(gradient)
                local.mul_(of_loss.to(local) if of_loss is not None else 0)
        return None, None, *(None,) * ctx.count, *gradients


class LossAlone:
    """Results of `model(...)` with stages or micro-batches, for a model that returns its loss with other results.

    Attributes:
        loss: loss of the batch, of shape `()`.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise _loss_only(repr(key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _loss_only(name)


def _loss_only(name: str) -> StepError:
    return StepError(
        f"The result of model(...) has only its loss, and no {name}: with pipeline stages or micro-batches a step "
        "gives its loss, and any extras that are returned as (loss, extras) (docs/training.md). Call model(...) under "
        "torch.no_grad() for the whole result, on a batch that fits at once."
    )
