"""Example tensors without values, made from their descriptions; operators by their names; modes of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_TORCHS = ("aten", "prims")
_OF_FILES = ("from_file",)


def example_tensor(
    mode: FakeTensorMode,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool = False,
    is_parameter: bool = False,
) -> Tensor:
    """A tensor without values. It is made by hand, as an op under the fake mode takes ten times as long."""
    made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    fake: Tensor = FakeTensor(mode, made, device)
    if is_parameter:
        return nn.Parameter(fake, requires_grad)
    return fake.requires_grad_() if requires_grad else fake


def is_torchs_operator(operator: OpOverload) -> bool:
    """Whether torch itself has registered an operator."""
    return operator.namespace in _TORCHS


def operator_named(name: str) -> OpOverload | None:
    """The overload of torch's own with a name such as `aten.add.Tensor`; None where there is none.

    An operator that reads or writes files is not among them.
    """
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in _TORCHS or packet in _OF_FILES:
        return None
    found: Any = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return found if isinstance(found, OpOverload) else None


def argument_names(operator: OpOverload) -> frozenset[str]:
    """Names of the arguments that an operator takes."""
    return frozenset(argument.name for argument in operator._schema.arguments)


def modes_above() -> int:
    """The number of active modes that change ops, and of hooks on all modules."""
    from torch.nn.modules import module

    hooks = sum(
        map(
            len,
            (
                module._global_forward_hooks,
                module._global_forward_pre_hooks,
                module._global_backward_hooks,
                module._global_backward_pre_hooks,
                module._global_buffer_registration_hooks,
                module._global_module_registration_hooks,
                module._global_parameter_registration_hooks,
            ),
        )
    )
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


def has_values(x: Tensor) -> bool:
    """Whether a tensor has memory, which fakes and tensors on the meta device do not."""
    return not isinstance(x, FakeTensor) and x.device.type != "meta"
