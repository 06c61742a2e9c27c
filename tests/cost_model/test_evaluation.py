"""Formulas at numbers, against sympy's own substitution and code."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from autopar.cost_model.evaluation import Formulas

X, Y, Z = sympy.symbols("x y z", positive=True)
FORMULAS = [
    X + 2 * Y,
    sympy.Rational(3, 4) * X / Y,
    sympy.sqrt(X * Y) + Z**-2,
    sympy.Max(X + Y, 3 * Z, Y) - sympy.Min(X, Z),
    sympy.log(X + Y) / sympy.log(2),
    sympy.Integer(7),
    X,
]


def test_numbers_are_what_sympy_substitutes() -> None:
    found = Formulas.of(FORMULAS, [X, Y, Z]).at([2.5, 3.0, 0.5])
    expected = [float(f.subs({X: 2.5, Y: 3.0, Z: 0.5})) for f in FORMULAS]
    assert [float(value) for value in found] == pytest.approx(expected, rel=1e-14)


def test_arrays_are_evaluated_entry_by_entry() -> None:
    formulas = Formulas.of(FORMULAS, [X, Y, Z])
    xs = np.array([1.0, 2.5, 4.0])
    whole = formulas.at([xs, 3.0, 0.5])
    for at, x in enumerate(xs):
        alone = formulas.at([x, 3.0, 0.5])
        entries = [np.broadcast_to(value, xs.shape)[at] for value in whole]
        assert entries == pytest.approx(alone, rel=1e-15)


def test_a_complex_step_gives_the_derivative() -> None:
    """d/dx (x y + x^2) = y + 2 x (Squire and Trapp 1998)."""
    (value,) = Formulas.of([X * Y + X**2], [X, Y]).at([3.0 + 1e-30j, 5.0])
    assert value.imag / 1e-30 == pytest.approx(11.0)


def test_a_shared_part_is_evaluated_once() -> None:
    shared = sympy.sqrt(X + Y)
    formulas = Formulas.of([shared * X, shared * Y, shared], [X, Y])
    assert len(formulas.operations) == 4  # x + y, its root, and two products
