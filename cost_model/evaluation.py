"""Evaluation of sympy formulas at numbers: each sub-expression is computed once, and no code is generated.

`sympy.lambdify` looks for common sub-expressions by rebuilding every formula, which takes seconds for the
formulas of a plan. These formulas share their sub-expressions already, because prices are built from prices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import sympy

from autopar.cost_model.arith import Quantity


def _fold(combine: Callable[[Quantity, Quantity], Quantity]) -> Callable[..., Quantity]:
    return lambda *operands: functools.reduce(combine, operands)


def _power(base: Quantity, exponent: Quantity) -> Quantity:
    """A power of a float: numpy has no negative powers of its integers, which a maximum of two sizes is."""
    return (1.0 * base) ** exponent


_OPERATIONS: Mapping[type[sympy.Basic], Callable[..., Quantity]] = {
    sympy.Add: _fold(operator.add),
    sympy.Mul: _fold(operator.mul),
    sympy.Pow: _power,
    sympy.Max: _fold(np.maximum),
    sympy.Min: _fold(np.minimum),
    sympy.log: np.log,
}


class Formulas(NamedTuple):
    """Expressions as a list of operations. Every operation uses values that are known before it runs.

    The values are numbered: first those of the symbols, then the constants, then the result of each operation.

    Attributes:
        constants: numbers that occur in the formulas.
        operations: for each operation its function and the indices of its operands.
        results: for each expression the index of its value.
    """

    constants: tuple[Quantity, ...]
    operations: tuple[tuple[Callable[..., Quantity], tuple[int, ...]], ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, expressions: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]) -> Formulas:
        """Lists the operations of expressions in these symbols.

        >>> x, y = sympy.symbols("x y", positive=True)
        >>> Formulas.of([x + y, sympy.Max(x, 2 * y)], [x, y]).at([3.0, 4.0])
        [7.0, np.float64(8.0)]
        >>> Formulas.of([1 / sympy.Max(x, y)], [x, y]).at([2, 4])
        [np.float64(0.25)]
        """
        ordered = _in_order_of_evaluation(expressions)
        constants = [each for each in ordered if each.is_Number]
        composed = [each for each in ordered if each.args]
        places = {each: at for at, each in enumerate([*symbols, *constants, *composed])}
        return cls(
            tuple(int(c) if c.is_Integer else float(c) for c in constants),
            tuple((_OPERATIONS[each.func], tuple(places[arg] for arg in each.args)) for each in composed),
            tuple(places[each] for each in expressions),
        )

    def at(self, values: Sequence[Quantity]) -> list[Quantity]:
        """The values of the expressions, given the values of the symbols: numbers, or arrays of one shape."""
        known: list[Quantity] = [*values, *self.constants]
        for function, operands in self.operations:
            known.append(function(*[known[place] for place in operands]))
        return [known[place] for place in self.results]


def _in_order_of_evaluation(expressions: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """All sub-expressions, each once and after its operands."""
    found: dict[sympy.Expr, None] = {}
    waiting = list(reversed(expressions))
    while waiting:
        expression = waiting[-1]
        missing = [arg for arg in expression.args if arg not in found]
        if missing:
            waiting += missing
        else:
            found.setdefault(waiting.pop())
    return list(found)
