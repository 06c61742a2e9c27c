"""Operators of torch.ops, and torch's kernel for products of float8 with a scale for each 1x128 numbers."""

import pytest
import torch

from autopar import _torch
from autopar.ops.collectives import group_name
from autopar.ops.float8 import quantized

CUDA = torch.device("cuda", 0)
HAS_KERNEL = torch.cuda.is_available() and _torch.multiplies_tiles(CUDA, torch.bfloat16)


def test_below_autograd_an_op_records_nothing(group):
    x = torch.ones(2, requires_grad=True)
    call = (x, [], 1, group_name(group), "vary")
    assert _torch.autopar_op("all_reduce")(*call).requires_grad
    with _torch.below_autograd():
        assert not _torch.autopar_op("all_reduce")(*call).requires_grad


def test_operators_say_how_many_arguments_they_must_be_given():
    found = [_torch.required_arguments(name) for name in ("mean", "mse_loss", "no_such_operator")]
    assert found == [1, 2, None]


def test_a_schema_names_the_arguments_of_an_overload():
    found = _torch.schema(torch.ops.aten.add.Tensor)
    assert found.name == "aten::add"
    assert [a.name for a in found.arguments] == ["self", "other", "alpha"]
    assert isinstance(torch.ops.aten.add.Tensor, _torch.OpOverload)


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


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_other_devices_have_no_such_kernel(kind):
    assert not _torch.multiplies_tiles(torch.device(kind), torch.bfloat16)


def test_the_format_of_the_result_is_asked_before_the_device():
    assert not _torch.multiplies_tiles(CUDA, torch.float64)


@pytest.mark.skipif(not HAS_KERNEL, reason="no GPU of compute capability 9.0")
def test_the_kernel_gives_what_its_operands_stand_for():
    torch.manual_seed(0)
    left, right = (quantized(torch.randn(rows, 256, device=CUDA)) for rows in (64, 128))
    found = _torch.product_of_tiles(left, right, torch.bfloat16)
    expected = left.values() @ right.values().t()
    assert torch.allclose(found.float(), expected, rtol=2**-8, atol=2**-6)
