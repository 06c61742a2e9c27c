"""Steps that are not finite: warns once of the loss, with the first input or parameter; undoes them where asked."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.program.program import Program


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
