"""Example tensors made from descriptions, operators by name, and the switches of torch."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from autopar import _torch


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_example_is_as_it_is_described(requires_grad, is_parameter):
    mode = _torch.FakeTensorMode()
    made = _torch.example_tensor(
        mode, (2, 3), (1, 2), torch.float16, torch.device("cpu"), requires_grad=requires_grad, is_parameter=is_parameter
    )
    assert isinstance(made, _torch.FakeTensor) and made.fake_mode is mode
    assert isinstance(made, nn.Parameter) == is_parameter and made.requires_grad == requires_grad
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)
    assert made.device == torch.device("cpu")
    with mode:
        assert (made + made).shape == (2, 3)


def test_operators_are_found_by_their_names():
    for operator in (torch.ops.aten.add.Tensor, torch.ops.aten.linear.default):
        assert _torch.operator_named(str(operator)) is operator
        assert _torch.is_torchs_operator(operator)
    assert _torch.operator_named("aten.add.none_of_it") is None
    assert _torch.operator_named("aten.none_of_it.default") is None
    assert _torch.operator_named("os.system") is None
    assert _torch.operator_named("aten.__class__.mro") is None
    assert _torch.operator_named("aten.from_file.default") is None
    assert _torch.argument_names(torch.ops.aten.add.Tensor) == {"self", "other", "alpha"}


def test_modes_and_hooks_of_all_modules_are_counted():
    assert _torch.modes_above() == 0
    with torch.device("meta"):
        assert _torch.modes_above() == 1
    with _torch.FakeTensorMode():
        assert _torch.modes_above() == 1
    handle = module.register_module_forward_hook(lambda *_: None)
    assert _torch.modes_above() == 1
    handle.remove()
    assert _torch.modes_above() == 0


def test_switches_tell_what_is_set():
    before = _torch.switches()
    with torch.no_grad():
        assert _torch.switches() != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _torch.switches() != before
    with torch.backends.mkldnn.flags(enabled=False):
        assert _torch.switches() != before
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert _torch.switches() != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert _torch.switches() == before
