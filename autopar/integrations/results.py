"""The results of a prepared model, whole on every rank when they are read."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.errors import CaptureError, StepError


def whole(value: Any) -> Any:
    """The value with every DTensor in it gathered; gradients flow back to the ranks' parts.

    >>> whole({"loss": 1.0})
    {'loss': 1.0}
    """
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, value)


def in_float32(value: Any) -> Any:
    """The value with every tensor of half precision in it in float32, as accelerate gives results under autocast."""
    half = (torch.float16, torch.bfloat16)
    return pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in half else x, value)


class WholeResults(dict[str, Any]):
    """Results by name, as models of transformers return them; those in shards are gathered when they are read.

    A result is read as `results["logits"]`, `results.logits`, or by its position. All ranks must read the same results,
    because a read may gather: `if rank == 0: print(results.logits)` waits for the others.

    >>> import torch
    >>> results = WholeResults(loss=torch.tensor(2.0), logits=torch.zeros(4, 3))
    >>> results.logits.shape, results[0].item(), [name for name, _ in results.items()]
    (torch.Size([4, 3]), 2.0, ['loss', 'logits'])
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            value = whole(super().__getitem__(key))
            return value if key == "loss" else _not_differentiable(value, super().get("loss"))
        return self.to_tuple()[key]

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"The model's results are {', '.join(self)}; there is no {name}.")
        return self[name]

    def get(self, key: str, default: Any = None) -> Any:
        """The result of this name, or the default."""
        return self[key] if key in self else default  # noqa: SIM401

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Names and results, each gathered when the iteration comes to it."""
        return ItemsView(_Gathered(self))

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The results, each gathered when the iteration comes to it."""
        return ValuesView(_Gathered(self))

    def to_tuple(self) -> tuple[Any, ...]:
        """All results, in order."""
        return tuple(self.values())


def _not_differentiable(value: Any, loss: Any) -> Any:
    """A result beside a loss that alone has gradients; a gradient that arrives at it is an error, not lost."""
    if not (isinstance(value, Tensor) and isinstance(loss, Tensor) and loss.requires_grad):
        return value
    if value.requires_grad or not value.is_floating_point():
        return value
    return _LossOnly.apply(value, loss)


class _LossOnly(torch.autograd.Function):
    """A result whose backward raises StepError."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise StepError(
            "A gradient arrives at a result of model(**batch) that is not its loss, but the planned step has run the "
            "backward of the loss alone. Train with the model's own loss, or give loss_outside=True to the trainer or "
            "accelerator, which makes every result differentiable."
        )


class _Gathered(Mapping[str, Any]):
    """The view of results that `ItemsView` reads by keys."""

    def __init__(self, results: WholeResults) -> None:
        self._results = results

    def __getitem__(self, key: str) -> Any:
        return self._results[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results.keys())

    def __len__(self) -> int:
        return len(self._results)


def readable(result: Any) -> Any:
    """A forward's result for the script: by name and lazily where it has names, else gathered at once."""
    if isinstance(result, Mapping):
        return WholeResults(result)
    return whole(result)


class LossOutsideError(CaptureError):
    """The model returns no loss, so that the script computes one from its results."""


def loss_and_rest(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss function of a model that returns its loss: `(loss, other tensors by name)`.

    Other entries, such as a cache of keys and values, are left out. Raises LossOutsideError for a result without a
    loss.

    >>> import torch
    >>> loss_and_rest({"loss": torch.tensor(2.0), "past_key_values": None})
    (tensor(2.), {})
    """
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        rest = {k: v for k, v in result.items() if k != "loss" and isinstance(v, Tensor)}
        return result["loss"], rest
    raise LossOutsideError("The model returns no loss.")
