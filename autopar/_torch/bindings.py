"""Python functions of torch that call one overload of an operator: they read arguments in C++, an overload in Python.

A call of an overload of `torch.ops` takes 1.6 to 5 microseconds more of the host than the function of the same operator
(twelve operators, by `benchmarks/speed/bench_bindings.py`, on 2026-11-27). A small model, or any model on a fast
accelerator, waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

_ATEN = torch.ops.aten

# `tests/_torch/test_bindings.py` calls both sides of every row, and finds the same operators, results and gradients.
BINDINGS: Mapping[OpOverload, Callable[..., Any]] = {
    _ATEN.abs.default: torch.abs,
    _ATEN.add.Tensor: torch.add,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.avg_pool2d.default: functional.avg_pool2d,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.clamp.default: torch.clamp,
    _ATEN.conv1d.default: torch.conv1d,
    _ATEN.conv2d.default: torch.conv2d,
    _ATEN.cos.default: torch.cos,
    _ATEN.div.Tensor: torch.div,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.eq.Scalar: torch.eq,
    _ATEN.exp.default: torch.exp,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.flatten.using_ints: torch.flatten,
    _ATEN.gelu.default: functional.gelu,
    _ATEN.group_norm.default: torch.group_norm,
    _ATEN.layer_norm.default: torch.layer_norm,
    _ATEN.linear.default: functional.linear,
    _ATEN.log.default: torch.log,
    _ATEN.masked_fill.Scalar: torch.masked_fill,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.mean.default: torch.mean,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.permute.default: torch.permute,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.relu.default: torch.relu,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rms_norm.default: torch.rms_norm,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    _ATEN.select.int: torch.select,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.sin.default: torch.sin,
    _ATEN.softmax.int: torch.softmax,
    _ATEN.squeeze.dim: torch.squeeze,
    _ATEN.stack.default: torch.stack,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sum.default: torch.sum,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
    _ATEN.where.self: torch.where,
}
