"""Hooks on the backward of the user's model, which a captured program does not call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from autopar._torch import backward_hooks_of
from autopar.capture.guards.refusals import BACKEND_RUNS_IT
from autopar.capture.guards.user_code import line_of
from autopar.errors import CaptureError

_MOST_NAMED = 5


def backward_hooks(model: nn.Module) -> list[str]:
    """The hooks on a model's backward in words: those of parameters, then those of modules.

    Forward hooks are not among them: they are called while the model is captured, what they compute is part
    of the graph, and what they store is refused.
    """
    found = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    modules = list(model.named_modules())
    found += [(f"module {name!r}" if name else "the model itself", m) for name, m in modules]
    return [f"{owner} ({line})" for owner, x in found for line in _lines(x)]


def _lines(x: Tensor | nn.Module) -> Iterator[Any]:
    for hook in backward_hooks_of(x):
        yield line_of(hook)


def refuse_hooks(hooks: list[str]) -> None:
    """Raises CaptureError where there are hooks, by owner and line."""
    if not hooks:
        return
    rest = len(hooks) - _MOST_NAMED
    named = ", ".join(hooks[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    raise CaptureError(
        f"There are backward hooks on {named}. A captured program does not call them: do what they do with the "
        "gradients between `step` and the optimizer's, and remove the hooks. For work that must run inside backward "
        f"write an autograd.Function, or an operation on tensors in forward. {BACKEND_RUNS_IT}"
    )
