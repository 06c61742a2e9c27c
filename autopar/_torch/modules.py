"""Private parts of torch.nn: base classes, hooks of all modules, whether a forward runs; and modes of torch."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase

__all__ = ["BatchNormBase", "DropoutBase", "hooks_of_all_modules", "is_computing", "modes_above", "switches"]


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


def modes_above() -> int:
    """The number of active modes that change ops, and of hooks on all modules."""
    tables = vars(nn.modules.module).items()
    hooks = sum(len(table) for name, table in tables if name.startswith("_global_") and name.endswith("hooks"))
    return hooks + torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


def switches() -> dict[str, object]:
    """Name -> value of each global setting of torch on which a trace may depend, except autocast."""
    backends = torch.backends
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "mha fastpath": backends.mha.get_fastpath_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": backends.mkldnn.enabled,
        "cudnn": backends.cudnn.enabled,
        "cudnn benchmark": backends.cudnn.benchmark,
        "cudnn deterministic": backends.cudnn.deterministic,
        "cudnn tf32": backends.cudnn.allow_tf32,
        "flash sdp": backends.cuda.flash_sdp_enabled(),
        "math sdp": backends.cuda.math_sdp_enabled(),
        "efficient sdp": backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn sdp": backends.cuda.cudnn_sdp_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }
