"""Runs one op on parts: cuts its operands, runs it on every part, and joins the results.

A choice of a rule is right if this gives the same results and gradients as the op on whole tensors. All parts run in
one process, on real tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.ir import P, State

Results = tuple[Tensor, ...]
Run = Callable[..., Results]


def on_parts(run: Run, operands: Sequence[State], results: Sequence[State], count: int) -> Run:
    """`run` on `count` parts of its operands, as a function of the whole ones.

    An operand is cut along d for S(d), given whole for V, and written as a sum of unequal addends for P. Results are
    joined along d for S(d) and added up for P; for V the first part's result is taken.
    """

    def together(*tensors: Tensor) -> Results:
        each = zip(zip(*run_parts(run, tensors, operands, count), strict=True), results, strict=True)
        return tuple(join(parts, state) for parts, state in each)

    return together


def run_parts(run: Run, tensors: Sequence[Tensor], states: Sequence[State], count: int) -> list[Results]:
    """The results of every part, with operands cut by their `states`."""
    cut = [_cut(x, state, count) for x, state in zip(tensors, states, strict=True)]
    return [run(*(parts[i] for parts in cut)) for i in range(count)]


def _cut(x: Tensor, state: State, count: int) -> Sequence[Tensor]:
    if state.kind == "S":
        return x.chunk(count, state.dim)
    if state == P:
        total = count * (count + 1) // 2
        return [x * ((i + 1) / total) for i in range(count)]
    return [x] * count


def join(parts: Sequence[Tensor], state: State) -> Tensor:
    """Puts the parts of a result together."""
    if state.kind == "S":
        return torch.cat(list(parts), state.dim)
    return torch.stack(list(parts)).sum(0) if state == P else parts[0]


def difference(left: Run, right: Run, operands: Sequence[Tensor], wanted: Sequence[int]) -> float:
    """The largest difference of the results and gradients of two functions of the same operands.

    Args:
        operands: arguments of both functions.
        wanted: positions of the operands whose gradient is compared.

    Returns:
        The largest difference relative to the largest value, or to 1 where that is less; inf where
        shapes, dtypes, numbers of results or integer values differ, or where only one is finite.
    """
    pairs = [with_gradients(run, operands, wanted) for run in (left, right)]
    if len(pairs[0]) != len(pairs[1]):
        return math.inf
    return max((distance(*pair) for pair in zip(*pairs, strict=True)), default=0.0)


def with_gradients(run: Run, operands: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """Results, then the gradients of their weighted sum; zeros where there is none."""
    leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(operands)]
    with torch.enable_grad():
        results = run(*leaves)
        ends = [y for y in results if y.requires_grad]
        inputs = [leaves[i] for i in wanted]
        if not ends or not inputs:
            return [y.detach() for y in results]
        grads = torch.autograd.grad(ends, inputs, [weights(y) for y in ends], allow_unused=True, materialize_grads=True)
    return [*(y.detach() for y in results), *map(dense, grads)]


def kept_bytes(run: Run, operands: Sequence[Tensor], wanted: Sequence[int]) -> int:
    """Bytes of the tensors that autograd keeps of a function for the gradients of these operands."""
    leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(operands)]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = run(*leaves)  # held, so that no memory is given out twice
    del results
    return sum(kept.values())


def dense(gradient: Tensor) -> Tensor:
    """A gradient as a dense tensor; gradients of lookups may be sparse."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def weights(y: Tensor) -> Tensor:
    """A gradient for a result: unequal numbers, the same at every call."""
    steps = torch.linspace(1, 2, y.numel(), dtype=torch.float64, device=y.device)
    return steps.reshape(y.shape).to(y.dtype)


def distance(got: Tensor, want: Tensor) -> float:
    """The distance of two tensors. It is inf if an entry is infinite or NaN in one tensor alone."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not got.numel() or torch.equal(got, want):
        return 0.0
    if not (got.is_floating_point() or got.is_complex()):
        return math.inf
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return math.inf
    gaps, sizes = (got - want)[finite].detach().abs(), want[finite].detach().abs()
    return float(gaps.max() / sizes.max().clamp(min=1)) if gaps.numel() else 0.0
