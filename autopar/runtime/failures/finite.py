"""Warns once of a loss that is not finite, with the first input or parameter that is not finite."""

from __future__ import annotations

import cmath
from collections.abc import Iterable

import torch
from torch import Tensor

from autopar import _torch


class FiniteLoss:
    """Checks the loss of every step, and finds the first that is NaN or infinite.

    On the CPU the check is immediate. On an accelerator the host would have to wait for the step; there the loss is
    copied asynchronously, and checked after a later step.
    """

    def __init__(self) -> None:
        self._warned = False
        self._copy: tuple[int, Tensor, torch.Event] | None = None  # step, its loss, the end of the copy

    def found(self, loss: Tensor, step: int) -> int | None:
        """The number of the first step whose loss is not finite, once; None before and after.

        Args:
            loss: loss of this step, of shape `()`.
            step: number of this step.
        """
        if self._warned or loss.is_meta:
            return None
        if not _torch.is_accelerator(loss.device):
            return self._first(loss, step)
        known = self._copy
        if known is not None and not known[2].query():
            return None  # it is still on its way
        copy, arrived = _torch.copy_to_host(loss)
        assert arrived is not None, "the loss is on an accelerator"
        self._copy = (step, copy, arrived)
        return None if known is None else self._first(known[1], known[0])

    def _first(self, loss: Tensor, step: int) -> int | None:
        self._warned = not cmath.isfinite(loss.item())  # an op of torch takes the host longer
        return step if self._warned else None


def about_loss(step: int, inputs: Iterable[tuple[str, Tensor]] | None, parameters: Iterable[tuple[str, Tensor]]) -> str:
    """The message for a loss that is not finite: the first input or parameter that is not finite, and a remedy.

    Args:
        step: number of the step.
        inputs: names and values of the batch on this rank; None if a later step has replaced them.
        parameters: names and values of the parameters; of a DTensor, the part of this rank.
    """
    cause = described("input", inputs or ()) or described("parameter", parameters)
    remedy = (
        "Correct the data, or leave such batches out."
        if cause.startswith("input")
        else _cause_of_parameter(step, inputs is not None)
        if cause
        else f"{_finite_words(step, inputs is not None)}: look for a division by zero, the "
        "logarithm or root of zero, or an overflow in half precision (autopar.find_nan(model, *batch) names "
        "the op)."
    )
    said = f"{cause[:1].upper()}{cause[1:]}{remedy}"
    return f"The loss of step {step} is NaN or infinite, and so are its gradients. {said}"


def _cause_of_parameter(step: int, is_latest: bool) -> str:
    """The likely cause of a parameter that is not finite: its initial value, or an earlier update."""
    if step == 1 and is_latest:
        return "It was so before the first step: look at how it is initialized, or at the file that it was read from."
    return "An earlier update caused it: lower the learning rate, or clip (model.clip_grad_norm_)."


def _finite_words(step: int, are_known: bool) -> str:
    if are_known:
        return "Inputs and parameters are finite, so it comes from the forward"
    return (
        f"Parameters are finite. The inputs of step {step} were not checked, because its loss arrived during a later "
        "step: check that batch, and if it is finite, the forward"
    )


def described(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """`input x of shape [8, 16] holds 1 value that is NaN or infinite, the first at [2, 3]. `; "" if none does."""
    for name, given in tensors:
        x = _torch.local_tensor(given).detach()
        if (x.is_floating_point() or x.is_complex()) and not bool(x.isfinite().all()):
            places = (~x.isfinite()).nonzero()
            count = "1 value that is" if len(places) == 1 else f"{len(places)} values that are"
            return (
                f"{kind} {name} of shape {list(x.shape)} holds {count} NaN or infinite, the first at "
                f"{places[0].tolist()}. "
            )
    return ""
