"""Sizes that torch.export leaves open: what a trace has found of them, and their values for given shapes.

An open size is a symbol. The trace computes with it, and wherever Python or torch had to compare it, the trace notes
the answer as a condition (torch calls it a guard). The graph is right for all sizes that meet the conditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from autopar._torch import pytree
from autopar._torch.tensors import example_tensor

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OtherSizes(Exception):
    """The graph was traced with open sizes and is not valid for the given shapes; the text says why."""


def depends_on_values(x: object) -> bool:
    """Whether a size or number depends on the values of a tensor, so that it is unknown before the graph runs."""
    if not isinstance(x, SYMBOLIC):
        return False
    # One without any symbols is a value on which the trace has an assertion.
    return not x.node._expr.free_symbols or bool(free_unbacked_symbols(x.node._expr))


def keeping_sizes_open(operands: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Context in which an op on these example tensors reads no open size as a number, as `matmul` of torch 2.11 does.

    As in an export, torch then takes the Python implementation of an op, if it has one.
    """
    if any(isinstance(size, torch.SymInt) for x in operands for size in x.shape):
        return enable_python_dispatcher()
    return nullcontext()


class SizeValues:
    """The values of a graph's open sizes for given shapes of its inputs.

    Args:
        inputs: example tensors of the graph's inputs.
        shapes: their shapes, without open sizes.

    Raises OtherSizes if the graph is not valid for these shapes.
    """

    def __init__(self, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
        env = next((e for e in map(_environment, inputs) if e is not None), None)
        self._known: dict[Any, Any] = {}
        self._values: dict[sympy.Basic, sympy.Integer] = {}
        pairs = list(_sizes(inputs, shapes))
        for made, size in pairs:
            if isinstance(made, torch.SymInt) and made.node._expr.is_Symbol:
                self._values.setdefault(made.node._expr, sympy.Integer(size))
        if env is not None:
            self._replace(env)
        for made, size in pairs:
            if self.number(made) != size:
                raise OtherSizes(f"the model fixes a size to {made}, but another is given")
        if env is not None:
            self._check(env)

    def number(self, x: Any) -> Any:
        """The value of an open size or of an expression of open sizes; any other object is returned unchanged."""
        if not isinstance(x, SYMBOLIC):
            return x
        expression = x.node._expr
        if expression not in self._known:
            self._known[expression] = self._plain(expression)
        return self._known[expression]

    def example(self, x: Any) -> Any:
        """An example tensor with these sizes; a tensor without open sizes, and any other object, as it is."""
        if not isinstance(x, Tensor):
            return self.number(x)
        if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())):
            return x
        assert isinstance(x, FakeTensor), "the trace makes no other tensors with open sizes"
        shape, strides = (list(map(self.number, each)) for each in (x.shape, x.stride()))
        return example_tensor(x.fake_mode, shape, strides, x.dtype, x.device, requires_grad=x.requires_grad)

    def examples(self, tree: Any) -> Any:
        """A tree of the same structure, in which `example` replaces every leaf."""
        return pytree.tree_map(self.example, tree)

    def _replace(self, env: ShapeEnv) -> None:
        """Computes the symbols that the trace has expressed by other symbols."""
        for symbol, expression in env.replacements.items():
            value = expression.xreplace(self._values)
            if self._values.setdefault(symbol, value) != value:
                raise OtherSizes(f"the model fixes a size to {expression}, but another is given")

    def _check(self, env: ShapeEnv) -> None:
        for symbol, value in self._values.items():
            span = env.var_to_range.get(symbol)
            if span is not None and not (span.lower <= value <= span.upper):
                bound = f"under {span.lower}" if value < span.lower else f"over {span.upper}"
                raise OtherSizes(f"the model takes another branch for a size {bound}")
        conditions = [guard.expr for guard in env.guards]
        conditions += [each.expr for some in env.deferred_runtime_asserts.values() for each in some]
        for condition in conditions:
            if condition.xreplace(self._values) != sympy.true:
                raise OtherSizes(f"the model takes another branch where not {condition}")

    def _plain(self, expression: sympy.Basic) -> int | float | bool:
        value = expression.xreplace(self._values)
        if value in (sympy.true, sympy.false):
            return bool(value)
        if not value.is_number:
            raise OtherSizes(f"the number {expression} is read from a tensor's values")
        return int(value) if value.is_integer else float(value)


def _environment(example: Tensor) -> ShapeEnv | None:
    """The symbols and conditions that the trace of an example tensor has recorded."""
    mode = getattr(example, "fake_mode", None)
    return None if mode is None else mode.shape_env


def _sizes(inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[int | torch.SymInt, int]]:
    """Pairs every size of the example tensors with the size in the given shapes."""
    for example, shape in zip(inputs, shapes, strict=True):
        if example.ndim != len(shape):
            raise OtherSizes(f"an input has {len(shape)} dims, but had {example.ndim} at capture")
        yield from zip(example.shape, shape, strict=True)
