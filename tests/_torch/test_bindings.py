"""Python functions of operators: each calls what the overload calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch import BINDINGS

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    """Positive numbers, of which logarithms and roots can be taken."""
    return torch.linspace(0.5, 2.0, torch.Size(shape).numel()).reshape(shape)


X, IMAGE, BIAS = _x(4, 6), _x(2, 4, 5, 5), _x(6)

# Arguments, positional and named, in the forms that captured graphs have.
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.abs.default: [((X,), {})],
    aten.add.Tensor: [((X, X), {}), ((X, 2), {}), ((X, X), {"alpha": 2})],
    aten.addmm.default: [((BIAS, X, _x(6, 6)), {}), ((BIAS, X, _x(6, 6)), {"beta": 2})],
    aten.avg_pool2d.default: [((IMAGE, [2, 2]), {}), ((IMAGE, [2, 2], [1, 1], [1, 1], True, False), {})],
    aten.bmm.default: [((_x(2, 3, 4), _x(2, 4, 5)), {})],
    aten.cat.default: [(([X, X],), {}), (([X, X], -1), {})],
    aten.clamp.default: [((X, 0.7), {}), ((X, None, 1.0), {}), ((X,), {"max": 1.0})],
    aten.conv1d.default: [((_x(2, 4, 6), _x(3, 4, 2)), {}), ((_x(2, 4, 6), _x(4, 1, 2), _x(4), [1], [2], [1], 4), {})],
    aten.conv2d.default: [
        ((IMAGE, _x(3, 4, 2, 2)), {}),
        ((IMAGE, _x(3, 4, 2, 2), _x(3), [2, 2], [1, 1], [1, 1], 1), {}),
    ],
    aten.cos.default: [((X,), {})],
    aten.div.Tensor: [((X, X), {}), ((X, 2.0), {})],
    aten.embedding.default: [((X, torch.tensor([1, 3])), {}), ((X, torch.tensor([1, 3]), 0, False, False), {})],
    aten.eq.Scalar: [((X, 0.5), {})],
    aten.exp.default: [((X,), {})],
    aten.expand.default: [((X, [3, 4, 6]), {}), ((X, [-1, 6]), {"implicit": False})],
    aten.flatten.using_ints: [((IMAGE,), {}), ((IMAGE, 1, 2), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.group_norm.default: [((IMAGE, 2), {}), ((IMAGE, 2, _x(4), _x(4), 1e-5, False), {})],
    aten.layer_norm.default: [((X, [6]), {}), ((X, [6], BIAS, BIAS, 1e-5, False), {})],
    aten.linear.default: [((X, _x(3, 6)), {}), ((X, _x(3, 6), _x(3)), {})],
    aten.log.default: [((X,), {})],
    aten.masked_fill.Scalar: [((X, X > 1, float("-inf")), {})],
    aten.matmul.default: [((X, _x(6, 3)), {}), ((_x(2, 3, 4), _x(4)), {})],
    aten.mean.default: [((X,), {}), ((X,), {"dtype": torch.float64})],
    aten.mean.dim: [((X, [1]), {}), ((X, [0, 1], True), {"dtype": torch.float64}), ((X, None), {})],
    aten.mm.default: [((X, _x(6, 3)), {})],
    aten.mul.Tensor: [((X, X), {}), ((X, 2), {})],
    aten.neg.default: [((X,), {})],
    aten.permute.default: [((IMAGE, [0, 2, 3, 1]), {})],
    aten.pow.Tensor_Scalar: [((X, 2), {}), ((X, 0.5), {})],
    aten.relu.default: [((X,), {})],
    aten.reshape.default: [((X, [2, -1]), {}), ((X.t(), [24]), {})],
    aten.rms_norm.default: [((X, [6]), {}), ((X, [6], BIAS, 1e-5), {})],
    aten.rsqrt.default: [((X,), {})],
    aten.scaled_dot_product_attention.default: [
        ((_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4)), {}),
        ((_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4), None, 0.0, True), {"scale": 0.3}),
        ((_x(1, 4, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(3, 3)), {"enable_gqa": True}),
    ],
    aten.select.int: [((X, 1, -1), {})],
    aten.sigmoid.default: [((X,), {})],
    aten.sin.default: [((X,), {})],
    aten.softmax.int: [((X, -1), {}), ((X, 0, torch.float64), {})],
    aten.squeeze.dim: [((_x(2, 1, 3), 1), {})],
    aten.stack.default: [(([X, X],), {}), (([X, X], -1), {})],
    aten.sub.Tensor: [((X, X), {}), ((X, 2), {}), ((X, X), {"alpha": 2})],
    aten.sum.default: [((X,), {}), ((X,), {"dtype": torch.float64})],
    aten.sum.dim_IntList: [((X, [1]), {}), ((X, [0, 1], True), {"dtype": torch.float64}), ((X, None), {})],
    aten.t.default: [((X,), {})],
    aten.tanh.default: [((X,), {})],
    aten.transpose.int: [((IMAGE, 1, -1), {})],
    aten.unsqueeze.default: [((X, 1), {})],
    aten.view.default: [((X, [2, -1]), {})],
    aten.where.self: [((X > 1, X, X), {})],
}


class _Recording(TorchDispatchMode):
    """Notes the operators that run below autograd, with their arguments as text."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(f"{func} {_shown((args, kwargs or {}))}")
        return func(*args, **(kwargs or {}))


def _shown(values: Any) -> str:
    """Arguments as text, tensors by shape, strides and dtype."""
    leaves, spec = pytree.tree_flatten(values)
    words = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
    return f"{words} {spec}"


def _outcome(function: Any, args: Any, kwargs: Any) -> tuple[list[str], list[torch.Tensor]]:
    """What a call runs below autograd, forward and backward; its result and the gradients of its operands."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [
        x.detach().clone().as_strided(x.shape, x.stride()).requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in leaves
    ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with _Recording() as recording:
        result = function(*args, **kwargs)
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    gradients = [x.grad for x in leaves if isinstance(x, torch.Tensor) and x.grad is not None]
    return recording.ran, [result.detach(), *gradients]


def _cases() -> Iterator[Any]:
    for overload, calls in CALLS.items():
        for number, (args, kwargs) in enumerate(calls):
            yield pytest.param(overload, args, kwargs, id=f"{overload}-{number}")


@pytest.mark.parametrize(("overload", "args", "kwargs"), _cases())
def test_a_binding_calls_the_overload_itself(overload: Any, args: Any, kwargs: Any) -> None:
    ran, values = _outcome(overload, args, kwargs)
    again, same = _outcome(BINDINGS[overload], args, kwargs)
    assert again == ran
    assert len(same) == len(values)
    for mine, theirs in zip(same, values, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_every_binding_is_called_here() -> None:
    assert set(CALLS) == set(BINDINGS)


@pytest.mark.parametrize("overload", BINDINGS)
def test_bindings_are_functions_of_c(overload: Any) -> None:
    """A function in Python would take longer than the overload, and might decide for itself which operator runs."""
    kinds = {"builtin_function_or_method", "method_descriptor"}
    assert type(BINDINGS[overload]).__name__ in kinds
