"""Matrix products: what matmul, linear and einsum keep for backward, copies included."""

from __future__ import annotations

import math

import torch

from autopar.rules.contract import equation
from autopar.rules.kept.rows import row
from autopar.rules.spec import Call, Hidden, Kept, Spec, flattens


def matmul(call: Call, spec: Spec) -> Kept:
    """matmul keeps each factor that the gradient of the other one needs, or a copy of it.

    It copies a factor whose strides do not let it be viewed as the rows of one matrix (where the other factor is a
    single matrix) or as matrices of one batch dim.
    """
    operands, hidden = [], []
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in call.operands))
    for i, x in enumerate(call.operands):
        if 1 - i not in call.wanted:
            continue
        if _is_matrix_already(x, call.operands[1 - i], batch, is_left=i == 0):
            operands.append(i)
        else:
            letters = (*spec.results[0][: len(batch)], *spec.operands[i][-2:])
            hidden.append(Hidden(f"copy{i}", letters, x.dtype))
    return Kept(tuple(operands), (), tuple(hidden))


def _is_matrix_already(x: torch.Tensor, other: torch.Tensor, batch: torch.Size, *, is_left: bool) -> bool:
    """Whether matmul uses the memory of `x` without a copy; see should_fold in ATen/native/LinearAlgebra.cpp."""
    if x.ndim < 3:
        return True
    if other.ndim < 3:
        rows = x if is_left else x.mT
        return flattens(rows, (-1, rows.shape[-1]))
    matrix = x.shape[-2:]
    return flattens(x, (*batch, *matrix), (math.prod(batch), *matrix))


def linear(call: Call, spec: Spec) -> Kept:
    """linear keeps its operands; it copies an input whose strides do not let all leading dims be viewed as rows."""
    x = call.operands[0]
    operands = [i for i, other in ((0, 1), (1, 0)) if other in call.wanted]
    if 0 in operands and not flattens(x, (-1, x.shape[-1])):
        copied = Hidden("copy0", spec.operands[0], x.dtype)
        return Kept(tuple(operands[1:]), (), (copied,))
    return Kept(tuple(operands))


def float8_linear(call: Call, spec: Spec) -> Kept:
    """float8_linear keeps both operands unrounded, because backward rounds the weight along its other dim."""
    return Kept(tuple(i for i, other in ((0, 1), (1, 0)) if other in call.wanted))


def einsum(call: Call, spec: Spec) -> Kept:
    """einsum of two operands is a batched product over the letters that the result lacks; of one it keeps nothing."""
    names, out = equation(call)
    if len(names) == 1:
        return Kept()
    gone = sorted((set(names[0]) & set(names[-1])) - set(out))
    if len(names) > 2 or any(len(set(n)) < len(n) for n in names) or _broadcasts(names, call):
        return row("x0..")(call, spec)
    if not gone:
        return row("x1 for 0; x0 for 1")(call, spec)
    both = [x for x in out if x in names[0] and x in names[1]]
    operands, hidden = [], []
    for i, x in enumerate(call.operands):
        if 1 - i not in call.wanted:
            continue
        own = [n for n in out if n in names[i] and n not in both]
        groups = (both, own, gone) if i == 0 else (both, gone, own)
        order = [names[i].index(n) for group in groups for n in group]
        sizes = [math.prod(x.shape[names[i].index(n)] for n in group) for group in groups]
        if len(order) == x.ndim and flattens(x.permute(order), sizes):
            operands.append(i)
        else:
            hidden.append(Hidden(f"copy{i}", spec.operands[i], x.dtype))
    return Kept(tuple(operands), (), tuple(hidden))


def _broadcasts(names: list[list[str]], call: Call) -> bool:
    """Whether a letter has different sizes in the two operands."""
    left, right = (dict(zip(n, x.shape, strict=True)) for n, x in zip(names, call.operands, strict=True))
    return any(left[n] != right[n] for n in left.keys() & right.keys())
