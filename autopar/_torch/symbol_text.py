"""Open sizes of a traced graph as JSON, and back: their expressions, and the conditions that the trace has noted.

An expression is a number, the name of a symbol, or a list of the name of a function and its operands:
`["Add", ["Mul", 4, "s0"], 1]` is `4 * s0 + 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuard, SLoc
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

Json = Any
_SYMPYS = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Rational")
_TORCHS = ("FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilDiv", "Max", "Min")
_KINDS: Mapping[str, Any] = {
    **{getattr(sympy, name).__name__: getattr(sympy, name) for name in _SYMPYS},
    **{name: getattr(functions, name) for name in _TORCHS},
}


def _write(expression: Any) -> Json:
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return expression.name
    kind = type(expression)
    if _KINDS.get(kind.__name__) is not kind or kind is sympy.Rational:
        raise ValueError(f"the size {expression} has no text")
    return [kind.__name__, *map(_write, expression.args)]


def _read(text: Json, symbols: Mapping[str, Any]) -> Any:
    if isinstance(text, bool):
        return sympy.true if text else sympy.false
    if isinstance(text, int):
        return sympy.Integer(text)
    if isinstance(text, str):
        return symbols[text]
    name, *operands = text
    return _KINDS[name](*(_read(each, symbols) for each in operands))


def write_sizes(env: ShapeEnv) -> Json:
    """The symbols of a trace, their ranges and conditions as text. Raises ValueError for symbols that have no text."""
    if env.deferred_runtime_asserts or env.unbacked_symint_counter:
        raise ValueError("a size depends on the values of a tensor")
    return {
        "symbols": {
            str(symbol): [
                int(env.backed_var_to_val[symbol]) if symbol in env.backed_var_to_val else None,
                int(span.lower),
                None if span.upper is int_oo else int(span.upper),
                bool(symbol.is_positive),
            ]
            for symbol, span in env.var_to_range.items()
        },
        "replacements": {str(symbol): _write(e) for symbol, e in env.replacements.items()},
        "conditions": [_write(guard.expr) for guard in env.guards],
    }


def write_size(size: int | torch.SymInt) -> Json:
    """A size as JSON. Raises ValueError for one that has no text."""
    return size if isinstance(size, int) else _write(size.node._expr)


class ReadSizes:
    """The open sizes that `write_sizes` has written.

    Args:
        document: the JSON.

    Attributes:
        mode: the mode of the example tensors that have these sizes.
    """

    def __init__(self, document: Json) -> None:
        self._env = env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=env)
        self._symbols: dict[str, sympy.Symbol] = {}
        for name, (value, lower, upper, positive) in document["symbols"].items():
            if not name.isidentifier():  # torch puts it into the source of its conditions
                raise ValueError(f"{name!r} is not a name of a size")
            symbol = sympy.Symbol(name, positive=positive or None, integer=True)
            self._symbols[name] = symbol
            if value is not None:
                env.backed_var_to_val[symbol] = sympy.Integer(value)
            env.var_to_range[symbol] = ValueRanges(lower, int_oo if upper is None else upper)
        replacements = document["replacements"].items()
        self._replacements = {self._symbols[name]: self._expression(e) for name, e in replacements}
        conditions = map(self._expression, document["conditions"])
        self._guards = [ShapeGuard(e, SLoc(None, "a stored capture"), False) for e in conditions]
        self._replace()

    def _replace(self) -> None:
        self._env.replacements.clear()
        self._env.replacements.update(self._replacements)
        # torch 2.11 has no counter of replacements: it keeps no expression that one could make invalid.
        before = getattr(self._env, "_replacements_version_counter", 0)
        self._env._replacements_version_counter = before + 1

    def _expression(self, text: Json) -> Any:
        return _read(text, self._symbols)

    def size(self, text: Json) -> int | torch.SymInt:
        """A size that `write_size` has written."""
        expression = self._expression(text)
        if isinstance(text, int):
            return text
        hint = int(expression.xreplace(self._env.backed_var_to_val))
        return torch.SymInt(SymNode(expression, self._env, int, hint))

    def settle(self) -> None:
        """Notes the conditions of the trace in place of those that making example tensors has added.

        As after an export, no more are noted.
        """
        self._env.guards[:] = self._guards
        self._replace()
        self._env.freeze()
