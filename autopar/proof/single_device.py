"""The reference: runs a model eagerly on one device, without autopar, in its own dtypes or in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar._torch import AskedLimits, Float64Arithmetic, pytree
from autopar.capture.captured import Captured
from autopar.capture.export import LossFunction, run_with_loss
from autopar.proof.noise import drawn_shapes
from autopar.proof.streams import Streams
from autopar.rules.trial import dense

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a micro-batch
Between = Callable[[nn.Module], None]  # what a script changes between two steps


@dataclass(frozen=True)
class Results:
    """The results of one step on a single device.

    Attributes:
        loss: mean over the micro-batches, of shape `()`.
        gradients: parameter name -> gradient, or None for a parameter that the model does not use.
        buffers: buffer name -> value after the step.
        changed: first name of every buffer that the step changed.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    changed: tuple[str, ...]

    @property
    def has_nan(self) -> bool:
        """Whether a number of the loss, a gradient or a buffer is not a number."""
        return bool(self.not_numbers)

    @property
    def not_numbers(self) -> list[str]:
        """The loss, gradients and buffers that have an entry which is not a number, in words."""
        every = {"the loss": self.loss}
        every |= {f"the gradient of {name}": x for name, x in self.gradients.items() if x is not None}
        every |= {f"the buffer {name}": x for name, x in self.buffers.items()}
        return [words for words, x in every.items() if x.isnan().any()]


@dataclass(frozen=True)
class SingleDevice:
    """A model with its loss, on one device.

    Attributes:
        model: the model; every run takes a copy.
        loss_fn: the loss function, as in `compile`.
        captured: the captured step, which names the parameters and the precision.
        streams: the draws of the captured step.
    """

    model: nn.Module
    loss_fn: LossFunction | None
    captured: Captured
    streams: Streams

    def run(self, steps: Sequence[Sequence[Batch]], between: Between | None) -> list[Results]:
        """Runs steps one after the other on one copy of the model, without updating the weights.

        Args:
            steps: the micro-batches of every step.
            between: function to call with the copy between two steps; None for none.
        """
        model, loss_fn = copied(self.model, self.loss_fn)
        results: list[Results] = []
        for batches in steps:
            if results and between is not None:
                between(model)
            results.append(self.step_of(model, loss_fn, batches))
        return results

    def repeats(self, batches: Sequence[Batch]) -> bool:
        """Whether a second step on the same micro-batches gives the same loss and gradients, bit by bit.

        If not, the model holds state that a step changes. What it draws is the same in every step.
        """
        first, second = self.run([batches, batches], None)
        pairs = [(first.loss, second.loss)]
        for name, gradient in first.gradients.items():
            other = second.gradients[name]
            if (gradient is None) != (other is None):
                return False
            if gradient is not None and other is not None:
                pairs.append((gradient, other))
        return all(_is_same(x, y) for x, y in pairs)

    def drawn(self, batch: Batch) -> list[tuple[int, ...]]:
        """The shapes of the random draws of the model and its loss in a forward, in order."""
        model, loss_fn = copied(self.model, self.loss_fn)
        args, kwargs = batch
        return drawn_shapes(lambda: run_with_loss(model, args, kwargs, loss_fn, self.captured.precision))

    def widened(self) -> SingleDevice:
        """A copy with weights, buffers and other tensors in float64; run it inside of `float64_arithmetic`."""
        model, loss_fn = copied(self.model, self.loss_fn)
        holders = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
        for holder in holders:
            for x in _tensors_of(holder):
                x.data = x.data.to(_torch.widened_dtype(x.dtype))
        return SingleDevice(model, loss_fn, self.captured, self.streams)

    def step_of(self, model: nn.Module, loss_fn: LossFunction | None, batches: Sequence[Batch]) -> Results:
        """Runs forward and backward of a step on copies of the model and loss, without updating the weights."""
        before = {name: x.clone() for name, x in model.named_buffers()}
        model.zero_grad()
        losses = []
        for number, (args, kwargs) in enumerate(batches):
            with self.streams.on_one_device(number):
                loss = run_with_loss(model, args, kwargs, loss_fn, self.captured.precision)
                (loss / len(batches)).backward()
            _torch.own_gradients(model.parameters())
            losses.append(loss.detach())
        parameters = dict(model.named_parameters())
        found = {name: parameters[name].grad for name in self.captured.parameters.values()}
        gradients = {name: g if g is None else dense(g) for name, g in found.items()}
        after = {n: x.clone() for n, x in model.named_buffers(remove_duplicate=False)}
        changed = tuple(name for name, x in before.items() if not _is_same(x, after[name]))
        return Results(torch.stack(losses).mean(0), gradients, after, changed)


@contextmanager
def float64_arithmetic(limits: AskedLimits) -> Iterator[None]:
    """A context in which every operator computes in float64, and new floating-point tensors are float64.

    Args:
        limits: the types whose limits the model's code asks for in its own arithmetic, which it is given again.
    """
    ordinary = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Arithmetic(), limits.given():
            yield
    finally:
        torch.set_default_dtype(ordinary)


def widened_tensors(tree: Any) -> Any:
    """A tree in which the floating-point tensors are float64."""
    return pytree.tree_map(lambda x: x.to(_torch.widened_dtype(x.dtype)) if isinstance(x, Tensor) else x, tree)


def copied(model: nn.Module, loss_fn: LossFunction | None) -> tuple[nn.Module, LossFunction | None]:
    """A deep copy of a model and its loss function; if the loss function refers to the model, its copy does too.

    Tensors with an autograd graph, which an earlier run left in attributes, are copied without the graph.
    """
    left = [x for x in _tensors_of(model) if not x.is_leaf]
    return copy.deepcopy((model, loss_fn), {id(x): x.detach().clone() for x in left})


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Every tensor that the attributes of a model's modules hold, once."""
    state = [x for module in model.modules() for x in pytree.tree_leaves(list(vars(module).values()))]
    return list({id(x): x for x in state if isinstance(x, Tensor)}.values())


def _is_same(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors are equal bit by bit; equal nans count as equal."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    bits = (dense(x).contiguous().reshape(-1).view(torch.uint8) for x in (before, after))
    return torch.equal(*bits)
