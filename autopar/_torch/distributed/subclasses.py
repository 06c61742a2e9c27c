"""`__torch_dispatch__` of subclasses of DTensor under torch 2.11, which takes them for DTensors and never calls it.

From torch 2.12 on it is called, and all of this is left out. Under 2.11 a mode calls it: around each function of torch
that takes such a tensor, and around each backward, whose operators no function of Python calls.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import autograd
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# torch 2.11 does not call it, and torch 2.12 does.
NEEDS_A_MODE = torch.__version__ < "2.12"


class _Dispatching(TorchDispatchMode):
    """A mode in which an operator on a tensor of the subclass runs the subclass's `__torch_dispatch__`."""

    def __init__(self, subclass: Any) -> None:
        super().__init__()
        self.subclass = subclass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if any(isinstance(x, self.subclass) for x in _pytree.tree_leaves((args, given))):
            return self.subclass.__torch_dispatch__(func, types, args, given)
        return func(*args, **given)


def dispatched(subclass: Any) -> Any:
    """A decorator of a subclass of DTensor, whose `__torch_dispatch__` is then called under every version of torch."""
    if not NEEDS_A_MODE:
        return subclass

    def call(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        _in_each_backward(subclass)
        with torch._C.DisableTorchFunctionSubclass(), _Dispatching(subclass):
            return func(*args, **(kwargs or {}))

    subclass.__torch_function__ = staticmethod(call)
    return subclass


@functools.cache
def _in_each_backward(subclass: Any) -> None:
    """Runs each backward of the process, from now on, in the mode of the subclass."""
    module: Any = autograd
    run = module._engine_run_backward

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _Dispatching(subclass):
            return run(*args, **kwargs)

    module._engine_run_backward = run_backward
