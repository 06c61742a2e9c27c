"""Arithmetic on floats, numpy arrays and sympy expressions alike.

The formulas of the cost model are plain functions. With numbers they price one plan, with arrays thousands of
configurations, and with symbols they give the expressions that an explanation prints, differentiates and solves. This
module has the few functions that need different code for the three types.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import numpy as np
import sympy

Quantity: TypeAlias = Any  # float | np.ndarray | sympy.Expr; the caller knows which


def larger(a: Quantity, b: Quantity) -> Quantity:
    """The larger of two quantities, element by element for arrays."""
    return _extreme(a, b, sympy.Max, np.maximum, max)


def smaller(a: Quantity, b: Quantity) -> Quantity:
    """The smaller of two quantities, element by element for arrays."""
    return _extreme(a, b, sympy.Min, np.minimum, min)


def _extreme(a: Quantity, b: Quantity, symbolic: Any, arrays: Any, numbers: Any) -> Quantity:
    if isinstance(a, sympy.Basic) or isinstance(b, sympy.Basic):
        if not _has_symbols(a) and not _has_symbols(b):
            return numbers(a, b)
        return symbolic(a, b, evaluate=False)  # to compare symbols would cost more than it saves
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return arrays(a, b)
    return numbers(a, b)


def _has_symbols(a: Quantity) -> bool:
    return isinstance(a, sympy.Basic) and bool(a.free_symbols)


def hashable(a: Quantity) -> Hashable:
    """A key for a quantity, equal for equal ones; that of an array has its bytes."""
    return (a.shape, a.dtype.str, a.tobytes()) if isinstance(a, np.ndarray) else a


def where(condition: Quantity, a: Quantity, b: Quantity) -> Quantity:
    """`a` where a condition on numbers holds, else `b`; element by element for arrays of conditions."""
    if isinstance(condition, np.ndarray) and condition.ndim:
        return np.where(condition, a, b)
    return a if condition else b


def power(base: Quantity, exponent: Quantity) -> Quantity:
    """`base` to the power of a real exponent."""
    return base**exponent


def log2(a: Quantity) -> Quantity:
    """The logarithm to base 2 of a positive quantity."""
    if isinstance(a, sympy.Basic):
        return sympy.log(a) / sympy.log(2)
    return np.log2(a)
