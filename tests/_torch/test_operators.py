"""Operators of torch.ops: their schemas and their overloads."""

import torch

from autopar import _torch
from autopar.ops.collectives import group_name


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
