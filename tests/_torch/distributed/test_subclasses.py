"""A subclass of DTensor runs its own `__torch_dispatch__`, under every version of torch."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.subclasses import dispatched

CALLS = []


@dispatched
class Named(DTensor):
    __slots__ = ()

    @staticmethod
    def __new__(cls):
        return Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    def __init__(self) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        CALLS.append(func.__name__)
        return cls()


def test_operators_of_torch_and_of_a_backward_are_dispatched() -> None:
    x = Named().requires_grad_()
    (x * 2).backward(Named())
    assert isinstance(x.grad, Named)
    assert [each for each in CALLS if each.startswith("mul")] == ["mul.Tensor", "mul.Tensor"]
