"""`torch.utils.checkpoint`, which decides what is saved for backward and computes nothing of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from autopar._torch import pytree
from autopar._torch.contexts import replaced


def is_checkpointed() -> bool:
    """Whether the caller runs inside of a function that `torch.utils.checkpoint.checkpoint` was given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def saving_nothing() -> contextlib.AbstractContextManager[Any]:
    """Context of work of our own, such as a capture, in which no hook of the caller's sees what autograd saves.

    A checkpoint counts what is saved in forward and again in backward, where a capture is not made anew.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(x: Any) -> Any:
    return x


def plain_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Context in which a checkpointed function runs once, as any other, and gives the gradients that it would give.

    What torch does around it turns autograd off and on, which a trace takes for a `torch.no_grad` of the model's.
    """
    return replaced(checkpoint, _checkpoint_without_reentrant_generator=_nothing, CheckpointFunction=_Reentrant)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces the set-up and clean-up of a function that is checkpointed with `use_reentrant=False`: does nothing."""
    yield


class _Reentrant:
    """A call that is checkpointed with `use_reentrant=True`, as a function of autograd that takes its arguments.

    Its results have gradients if an argument has one, whatever parameters it uses, but for those inside of containers.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
        takes_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        with contextlib.nullcontext() if takes_gradient else torch.no_grad():
            results = function(*arguments)
        if isinstance(results, tuple):
            return tuple(map(_differentiable, results))
        return _differentiable(results)


def _differentiable(result: Any) -> Any:
    """A result, which keeps its gradient if it is a tensor; a container of tensors loses theirs."""
    if isinstance(result, Tensor):
        return result
    return pytree.tree_map_only(Tensor, Tensor.detach, result)
