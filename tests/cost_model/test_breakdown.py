"""The text of formulas."""

from __future__ import annotations

import sympy

from autopar.cost_model.breakdown import Breakdown

x, y, z = sympy.symbols("x y z", positive=True)


def test_every_formula_is_printed_as_sympy_prints_it() -> None:
    """Terms that the parts share are printed once; signs, fractions and brackets stay as they are."""
    inner = -sympy.sqrt(x) / 3 - (x - y) / z**2
    outer = (x + 1) * sympy.Max(x + y, 2 / z**2) - inner * (y - 1)
    tree = Breakdown(
        "step",
        "seconds",
        outer + inner,
        3.0,
        (Breakdown("a", "seconds", outer, 2.0), Breakdown("b", "seconds", inner, 1.0)),
    )
    document = tree.to_json()
    assert document["expression"] == str(outer + inner)
    assert [part["expression"] for part in document["parts"]] == [str(outer), str(inner)]
