"""Sensitivity of a plan's time to every symbol, and the largest size that fits into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from autopar.cost_model.steps.run import total
from autopar.cost_model.symbols import factor_symbols, symbol
from autopar.errors import AutoparError
from autopar.explanation.costs import STAGES, PlanCost

_TINY = 1e-30  # size of the complex step; its square underflows


@dataclass(frozen=True)
class LargestFit:
    """The largest value of one size, such as `batch`, with which a plan fits into the memory of a rank.

    Attributes:
        name: name of the size among the symbols of the memory formula.
        value: `limit` rounded down to a multiple of the number of ranks that split this size.
        limit: the real number at which the memory of a rank would be exactly full.
        expression: formula of `limit` in the other symbols and `memory_bound_bytes`; None if the memory is not
            linear in the size. The peak memory is a maximum over moments and pipeline stages. The formula is for the
            moment and stage with the maximum at `limit`; it is wrong for values at which another one has the maximum.
    """

    name: str
    value: int
    limit: float
    expression: sympy.Expr | None


def sensitivity(cost: PlanCost) -> dict[str, float]:
    """Symbol -> relative change of a step's seconds per 1 % more, see `Explanation.sensitivity`."""
    cost = cost.closed_form
    fixed = {axis for axis, size in cost.plan.mesh.axes if size == 1}
    fixed |= {"stages", "chunks"} if cost.run.stages == 1 else set()
    names = [name for name in cost.values if name not in fixed]
    moved = {
        name: np.where(np.arange(len(names)) == i, cost.values[name] * (1 + _TINY * 1j), cost.values[name])
        for i, name in enumerate(names)
    }
    slopes = np.imag(cost.at(**moved).seconds()) / _TINY
    changes = {
        name: 0.01 * float(slope) / cost.step_seconds for name, slope in zip(names, slopes, strict=True) if slope
    }
    return dict(sorted(changes.items(), key=lambda pair: (-abs(pair[1]), pair[0])))


def solve_for(cost: PlanCost, name: str) -> LargestFit:
    """The largest value of a size with which the plan fits into memory, see `Explanation.solve_for`."""
    cost = cost.closed_form
    x = symbol(name)
    stages = {stage: total(cost.symbolic.memory(stage)) for stage in STAGES}
    symbols = set().union(*(each.free_symbols for each in stages.values()))
    if x not in symbols:
        known = ", ".join(sorted(map(str, symbols)))
        raise AutoparError(f"The memory does not depend on {name!r}; it depends on {known}.")
    limit = _largest(cost, name)
    full = cost.at(**{name: limit})
    expression = stages[max(STAGES, key=lambda stage: float(total(full.memory(stage))))]
    step = _granule(cost, name)
    value = int(limit // step) * step
    if value < 1:
        raise AutoparError(
            f"No {name} fits: the memory of a rank is full at {limit:.3g}, and the axes of the "
            f"mesh {cost.plan.mesh} need a multiple of {step}."
        )
    at_limit = {symbol(n): v for n, v in cost.values.items()} | {x: limit}
    branch = _active(expression, at_limit)
    return LargestFit(name, value, limit, _solved(branch, x, symbol("memory_bound_bytes")))


def _largest(cost: PlanCost, name: str) -> float:
    """The value of a size at which memory equals the bound, by bisection (memory grows with every size)."""

    def peak(value: float) -> float:
        step = cost.at(**{name: value})
        return max(float(total(step.memory("first"))), float(total(step.memory("last"))))

    if peak(2 * cost.values[name]) <= peak(cost.values[name]):
        raise AutoparError(f"More {name} needs no more memory: any number fits, or none.")
    low, high = 0.0, 1.0
    while peak(high) <= cost.bound_bytes and high < 1e15:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if peak(middle) <= cost.bound_bytes else (low, middle)
    return low


def _granule(cost: PlanCost, name: str) -> int:
    """The number of which a size must be a multiple, so that every axis that splits it divides it."""
    symbols = {factor: str(s) for factor, s in factor_symbols(cost.graph).items()}
    axes = {
        axis
        for op in cost.graph.ops
        for axis, label in enumerate(cost.plan.ops[op.name])
        if symbols.get(op.choice(label).factor) == name
    }
    return math.prod(cost.plan.mesh.sizes[axis] for axis in axes)


def _active(expression: sympy.Expr, numbers: Mapping[sympy.Symbol, float]) -> sympy.Expr:
    """The expression with every maximum and minimum replaced by the argument that it takes at these numbers."""

    def chosen(best: Callable[..., Any]) -> Callable[..., sympy.Expr]:
        return lambda *args: best(args, key=lambda arg: float(arg.xreplace(numbers)))

    return expression.replace(sympy.Max, chosen(max)).replace(sympy.Min, chosen(min))


def _solved(expression: sympy.Expr, x: sympy.Symbol, bound: sympy.Symbol) -> sympy.Expr | None:
    """The solution of `expression = bound` for `x`; None if the expression is not linear in `x`."""
    slope = sympy.expand(expression).coeff(x, 1)
    rest = sympy.expand(expression) - sympy.expand(slope * x)
    return None if rest.has(x) or slope.has(x) or slope == 0 else (bound - rest) / slope
