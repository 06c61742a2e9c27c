"""Hooks on the backward of the user's model, which a captured program does not call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from autopar._torch import has_backward_hooks

_MOST_NAMED = 5


def backward_hooks(model: nn.Module) -> list[str]:
    """What of a model has hooks on its backward, in words: parameters, then modules.

    Forward hooks are not among them: they are called while the model is captured, and what they
    compute is part of the graph.
    """
    parameters = [
        f"parameter {name!r}" for name, p in model.named_parameters() if has_backward_hooks(p)
    ]
    modules = [
        f"module {name!r}" if name else "the model itself"
        for name, module in model.named_modules()
        if has_backward_hooks(module)
    ]
    return parameters + modules


def warn_of_hooks(owners: Sequence[str]) -> None:
    """Warns, once for all owners, that their hooks are not called."""
    if not owners:
        return
    rest = len(owners) - _MOST_NAMED
    named = ", ".join(owners[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    warnings.warn(
        f"There are backward hooks on {named}. They are not run by the captured program: do what they "
        "do with the gradients after `step`, before the optimizer's.",
        stacklevel=2,
    )
