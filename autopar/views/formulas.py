"""Formulas as presentation MathML, which browsers typeset by themselves."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any

import sympy
from sympy.printing.mathml import MathMLPresentationPrinter

from autopar.views.markup import Markup, join, tag
from autopar.views.page import Formula

LONGEST, LONGEST_TEXT = 2500, 25_000  # nodes that are still typeset, and still written as text
NO_BREAK = "\N{NO-BREAK SPACE}"
SUBSCRIPT = 3  # letters: numbers and mesh axes, as in `bandwidth_tp`
ROWS = 3  # from this many summands on, each gets a row of its own


def formulas(found: Sequence[Formula]) -> Markup:
    """Every formula with its name and value."""
    return tag("dl", *(part for each in found for part in _entry(each)), class_="formulas")


def _entry(formula: Formula) -> tuple[Markup, Markup]:
    name = tag("dt", formula.name, " ", tag("span", formula.value, class_="value"))
    return name, tag("dd", typeset(formula.expression), class_="scroll", tabindex=0)


def typeset(expression: sympy.Expr) -> Markup:
    """An expression as a `math` element; sums are broken, one summand a row."""
    expression = sympy.sympify(expression)
    size = _size(expression)
    if size > LONGEST:
        return _as_text(expression, size)
    if isinstance(expression, sympy.Add) and len(expression.args) >= ROWS:
        return _sum(expression)
    return tag("math", _mathml(expression), display="block")


def _size(expression: sympy.Expr) -> int:
    """Number of nodes of the expression up to a limit; with shared parts the full count can be huge."""
    found = itertools.islice(sympy.preorder_traversal(expression), LONGEST_TEXT + 1)
    return sum(1 for _ in found)


def _as_text(expression: sympy.Expr, size: int) -> Markup:
    if size > LONGEST_TEXT:
        return tag("p", f"Too long to print: more than {LONGEST_TEXT:,} terms.", class_="quiet")
    return tag("details", tag("summary", f"{size:,} terms, as text"), tag("code", str(expression)))


def _sum(expression: sympy.Add) -> Markup:
    rows = []
    for index, term in enumerate(expression.as_ordered_terms()):
        negative = term.could_extract_minus_sign()
        sign = "\N{MINUS SIGN}" if negative else "+" if index else ""
        cells = (tag("mtd", tag("mo", sign)), tag("mtd", _mathml(-term if negative else term)))
        rows.append(tag("mtr", *cells))
    return tag("math", tag("mtable", *rows, class_="sum", displaystyle="true"), display="block")


def _mathml(expression: sympy.Expr) -> Markup:
    return _serialised(_FormulaPrinter({"mul_symbol": "dot"})._print(expression))


def _serialised(node: Any) -> Markup:
    """A DOM node as markup. Sympy's own writer lets text through unescaped."""
    if node.nodeType == node.TEXT_NODE:
        # Sympy names invisible characters by entity; names of symbols are escaped all the same.
        return join((html.unescape(node.data),))
    attributes = dict(node.attributes.items()) if node.attributes else {}
    return tag(node.tagName, *map(_serialised, node.childNodes), **attributes)


class _FormulaPrinter(MathMLPresentationPrinter):
    """Names as words, with a short last one as a subscript, and numbers short enough to read."""

    def _print_Symbol(self, symbol: sympy.Symbol, style: str = "plain") -> Any:
        *words, last = symbol.name.strip("_").split("_")
        if not words or len(last) > SUBSCRIPT:
            return self._element("mi", NO_BREAK.join((*words, last)) or symbol.name)
        # Products have a dot, so that words with a space between them are one name.
        name = self._element("mi", NO_BREAK.join(words))
        return self._element("msub", name, self._element("mtext", last))

    def _print_Integer(self, number: sympy.Integer) -> Any:
        return self._number(float(number)) if abs(number) >= 10**7 else self._short(number)

    def _print_Float(self, number: sympy.Float) -> Any:
        return self._number(float(number))

    def _short(self, number: sympy.Integer) -> Any:
        return self._element("mn", str(number).replace("-", "\N{MINUS SIGN}"))

    def _number(self, number: float) -> Any:
        """Four digits, and a power of ten where the number is very large or small."""
        digits, _, exponent = f"{number:.4g}".replace("-", "\N{MINUS SIGN}").partition("e")
        mantissa = self._element("mn", digits)
        if not exponent:
            return mantissa
        power = str(int(exponent.replace("\N{MINUS SIGN}", "-"))).replace("-", "\N{MINUS SIGN}")
        ten = self._element("msup", self._element("mn", "10"), self._element("mn", power))
        return self._element("mrow", mantissa, self._element("mo", "·"), ten)

    def _element(self, name: str, *children: Any) -> Any:
        element = self.dom.createElement(name)
        for child in children:
            text = isinstance(child, str)
            element.appendChild(self.dom.createTextNode(child) if text else child)
        return element
