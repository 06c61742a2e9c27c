"""Private parts of torch.nn: base classes, hooks of all modules, and whether a forward runs."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase

__all__ = ["BatchNormBase", "DropoutBase", "hooks_of_all_modules", "is_computing"]


def hooks_of_all_modules() -> dict[tuple[str, int], Any]:
    """The hooks that run for every module (`register_module_forward_hook` and the like), without those of torch."""
    kinds, module = ("forward_hooks", "forward_pre_hooks", "backward_hooks"), vars(nn.modules.module)
    found = {(kind, number): hook for kind in kinds for number, hook in module[f"_global_{kind}"].items()}
    return {key: hook for key, hook in found.items() if not str(getattr(hook, "__module__", "")).startswith("torch.")}


def is_computing() -> bool:
    """Whether the caller runs for a module that is called, for Dynamo, or for backward, which runs forwards again."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return True
    call = nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Dynamo gives a frame that it has compiled a code object of its own.
        code = frame.f_code
        if code.co_name == call.co_name and code.co_filename == call.co_filename:
            return True
        frame = frame.f_back
    return False
