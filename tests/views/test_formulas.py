import sympy

from autopar.views.formulas import typeset
from autopar.views.page import Formula

a, b = sympy.symbols("a b", positive=True)


def test_a_fraction():
    assert typeset(a / b) == ('<math display="block"><mrow><mfrac><mi>a</mi><mi>b</mi></mfrac></mrow></math>')


def test_names_are_words_with_a_short_subscript():
    words = sympy.Symbol("memory_bytes_per_second")
    assert typeset(words).count("<mi>memory\xa0bytes\xa0per\xa0second</mi>") == 1
    assert "<msub><mi>bandwidth</mi><mtext>tp</mtext></msub>" in typeset(sympy.Symbol("bandwidth_tp"))


def test_sums_have_a_row_for_every_summand():
    found = typeset(a + b**2 - 3 * a * b)
    assert found.count("<mtr>") == 3 and "<mo>\N{MINUS SIGN}</mo>" in found


def test_large_and_small_numbers_are_powers_of_ten():
    found = typeset(989400000000000 * a + sympy.Float(2.5e-6))
    assert "<mn>989.4</mn>" not in found
    assert "<mrow><mn>9.894</mn><mo>·</mo><msup><mn>10</mn><mn>14</mn></msup></mrow>" in found
    assert "<msup><mn>10</mn><mn>\N{MINUS SIGN}6</mn></msup>" in found


def test_names_cannot_be_markup():
    found = typeset(sympy.Symbol("<script>alert(1)</script>") + sympy.Symbol("&lt;"))
    assert "<script" not in found and "&lt;script&gt;" in found


def test_everything_the_cost_model_uses_is_typeset():
    found = typeset(sympy.Max(a, b, evaluate=False) + sympy.log(a) / sympy.log(2) + sympy.ceiling(a / b))
    assert "<mo>max</mo>" in found and "<mo>⌈</mo>" in found and "entity" not in found


def test_long_expressions_stand_as_text():
    found = typeset(sympy.Add(*(sympy.Symbol(f"x{i}") * i for i in range(900))))
    assert found.startswith("<details>") and "x899" in found


def test_endless_expressions_are_not_printed():
    grown = a
    for _ in range(60):  # written out, 2**60 terms
        grown = sympy.Mul(grown + 1, grown + 2, evaluate=False)
    assert "Too long to print" in typeset(grown)


def test_numbers_are_formulas_too():
    assert "<mn>0</mn>" in typeset(Formula("bubble", 0, "0 s").expression)
