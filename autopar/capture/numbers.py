"""Numbers that change between steps, as inputs of a captured program: floats, ints, and tensors without dims.

A capture builds every number that it reads (`model.beta`, a weight in a closure of the loss) into the program. When
such a number has changed, the model is captured again with a zero-dim tensor in its place. The tensor is a constant of
the program, and the runtime writes the number's value into it before every run. So one program serves all values of an
annealed weight.

Where the number is a tensor itself, so is what takes its place, and nothing else is different. Python treats a tensor
unlike a number of its own: a tensor cannot choose a branch, a size or a keyword, and it changes the dtype
of a product. Therefore `_Arithmetic` computes with these tensors in float64, as Python computes with numbers, until
they meet another tensor; and `computes_the_same` accepts the new program only if it has the ops of the capture with
the plain number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.captured import Captured, results_of
from autopar.capture.guards.guards import NumberInput, Place
from autopar.capture.guards.values import SeenTensor, is_number, seen

log = logging.getLogger("autopar")

# Methods and functions that return a Python value computed from a tensor's value. A program that is traced through
# one of them is right for that value alone.
_VALUE_METHODS = frozenset(
    {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose"}
    | {
        f"__{name}__"
        for name in (
            "bool",
            "int",
            "float",
            "index",
            "complex",
            "hash",
            "format",
            "repr",
            "str",
            "contains",
            "array",
            "round",
            "floor",
            "ceil",
            "trunc",
        )
    }
)
_TORCH = Path(torch.__file__).parent
_COMMUTATIVE = ("add", "mul")  # the tensor is the first operand, on whichever side Python has the number
_CLOSE = 1e-6  # relative: a number is rounded to the format of a tensor that it meets


class _ValueRequested(Exception):
    """The model asks for the Python value of a tensor that stands for a number."""


def with_numbers(capture: Callable[[], Captured], places: Sequence[Place]) -> Captured:
    """Captures the model with the numbers at some places as inputs; a number that cannot be an input is built in.

    Args:
        capture: function that captures the model.
        places: places of numbers that have changed since an earlier capture.
    """
    plain = capture()
    places = [p for p in places if p in plain.guards and is_number(p.get())]
    if not places:
        return plain
    found = _tried(capture, plain, places)
    if found is None and len(places) > 1:
        alone = [place for place in places if _tried(capture, plain, [place]) is not None]
        found = _tried(capture, plain, alone) if alone else None
    return plain if found is None else found


def _tried(capture: Callable[[], Captured], plain: Captured, places: Sequence[Place]) -> Captured | None:
    """Captures the model with all these numbers as inputs; None if the program differs from the plain capture."""
    words = ", ".join(place.words for place in places)
    try:
        with _as_tensors(places) as numbers:
            found = capture()
    except Exception as error:  # a model may raise any error for a tensor where it takes a number
        log.info("Built in: %s, which no tensor can replace (%s).", words, error)
        return None
    for number in numbers:
        number.take()
    if _written(plain) != _written(found) or not computes_the_same(plain, found, numbers):
        log.info("Built in: %s, as more than arithmetic depends on it.", words)
        return None
    return replace(found, guards=found.guards.without(places), numbers=numbers)


def _written(captured: Captured) -> list[object]:
    """The values that a forward writes to attributes, with their types, so that a tensor differs from a number."""
    return [(id(w.attributes), w.name, type(w.value), repr(w.value), w.adds) for w in captured.writes]


@contextlib.contextmanager
def _as_tensors(places: Sequence[Place]) -> Iterator[tuple[NumberInput, ...]]:
    """Context in which tensors replace the numbers at these places, and arithmetic treats them as numbers.

    The tensors have other values than the numbers. If the capture builds such a value in, it differs from that of the
    plain capture, and the comparison finds it.
    """
    values = [place.get() for place in places]
    numbers = tuple(
        NumberInput(place, _another(value), seen(value)) for place, value in zip(places, values, strict=True)
    )
    for each in numbers:
        each.place.put(each.tensor)
    try:
        with _Arithmetic(numbers):
            yield numbers
    finally:
        for place, value in zip(places, values, strict=True):
            place.put(value)


def _another(value: float | Tensor) -> Tensor:
    """A tensor of another value: in float64 for a number of Python, else of the kind of the tensor."""
    if isinstance(value, Tensor):
        return (1.37 * value + 0.173).to(value.dtype)
    return torch.tensor(1.37 * value + 0.173, dtype=torch.float64, device="cpu")


class _Arithmetic(TorchFunctionMode):
    """Computes with numbers in float64; an op with another tensor has the dtype that a Python number would give.

    Args:
        numbers: all inputs, of which those for tensors are tensors like any others here.
    """

    def __init__(self, numbers: Sequence[NumberInput]) -> None:
        super().__init__()
        self._inputs = [each for each in numbers if not isinstance(each.taken, SeenTensor)]
        self._made: dict[int, Tensor] = {id(each.tensor): each.tensor for each in self._inputs}

    def __torch_function__(self, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # Export replaces the tensors by fake ones while it traces.
        known = {**self._made, **{id(x): x for x in (each.place.get() for each in self._inputs)}}
        others = [x for x in tensors if id(x) not in known]
        if len(others) == len(tensors):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in _VALUE_METHODS and not _is_torchs(sys._getframe(1)):
            raise _ValueRequested(f"{name} needs its value")
        if others:
            dtype = _dtype_beside(others)
            args, kwargs = pytree.tree_map(lambda x: x.to(dtype) if dtype and id(x) in known else x, (args, kwargs))
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self._made.update((id(x), x) for x in made)
        return result


def _is_torchs(frame: types.FrameType | None) -> bool:
    """Whether torch's tracer makes the call. Calls by torch.nn count as the user's: the user gave them the number."""
    while frame is not None and Path(frame.f_code.co_filename).parent == _TORCH:
        frame = frame.f_back  # a method of Tensor that calls another
    if frame is None:
        return True
    place = Path(frame.f_code.co_filename)
    return place.is_relative_to(_TORCH) and not place.is_relative_to(_TORCH / "nn")


def _dtype_beside(others: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype to which a number is converted before it meets other tensors; None leaves it in float64.

    A zero-dim tensor does not change the dtype of a result that has dims, but it does change that of another zero-dim
    tensor.
    """
    if any(x.is_complex() or (x.is_floating_point() and x.ndim) for x in others):
        return None
    floats = [x.dtype for x in others if x.is_floating_point()]
    return functools.reduce(torch.promote_types, floats) if floats else torch.get_default_dtype()


def computes_the_same(plain: Captured, found: Captured, numbers: Sequence[NumberInput]) -> bool:
    """Whether a capture with inputs for numbers computes the same as the one with the numbers built in.

    Both have the same ops with the same operands in the same order, of the same shapes and dtypes. Where an operand
    is computed of numbers alone, it has the value that stands in the plain capture. Every number is used.
    """
    tensors = {id(each.tensor): each for each in numbers}
    own = {name: x for name, x in found.constants.items() if id(x) in tensors}
    if len(own) < len(numbers):
        return False
    of_python = {n: x for n, x in own.items() if not isinstance(tensors[id(x)].taken, SeenTensor)}
    values = _values(found.module.graph, of_python)
    before = [n for n in plain.module.graph.nodes if not _asserts(n)]
    after = [n for n in found.module.graph.nodes if not _asserts(n) and n not in values]
    comparison = _Comparison(_places(before), _places(after), values)
    return len(before) == len(after) and all(map(comparison.is_same, before, after))


def _places(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(nodes)}


def _asserts(node: fx.Node) -> bool:
    return "_assert" in str(node.target)


def _values(graph: fx.Graph, numbers: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    """The nodes that depend on numbers alone, each with its present value."""
    values: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        if node.name in numbers:
            values[node] = numbers[node.name]
        elif node.op == "call_function" and operands and all(x in values for x in operands):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


@dataclass(frozen=True)
class _Comparison:
    """Compares the nodes of two captures one by one.

    Attributes:
        before: the place of every node of the plain capture.
        after: the place of every node of the other one, numbers left out.
        values: the values of the numbers.
    """

    before: Mapping[fx.Node, int]
    after: Mapping[fx.Node, int]
    values: Mapping[fx.Node, Tensor]

    def is_same(self, plain: fx.Node, found: fx.Node) -> bool:
        """Whether two nodes compute the same."""
        if plain.op != found.op or results_of(plain) != results_of(found):
            return False
        if plain.op == "placeholder":
            return plain.name == found.name
        (op, operands), (other, others) = _call(plain), _call(found)
        if other in _COMMUTATIVE and len(others) == 2 and others[0] in self.values:
            others = others[::-1]
        return op == other and self._same(operands, others)

    def _same(self, plain: Any, found: Any) -> bool:
        if isinstance(found, (list, tuple)):
            is_alike = isinstance(plain, (list, tuple)) and len(plain) == len(found)
            return is_alike and all(map(self._same, plain, found))
        if isinstance(found, fx.Node) and found in self.values:
            value = self.values[found].item()
            return type(plain) in (float, int) and math.isclose(plain, value, rel_tol=_CLOSE)
        if isinstance(found, fx.Node):
            return isinstance(plain, fx.Node) and self.before[plain] == self.after[found]
        return type(plain) is type(found) and repr(plain) == repr(found)


def _call(node: fx.Node) -> tuple[str, list[Any]]:
    """The op without its overload, and its operands. `rsub(x, 2)`, which is `2 - x`, is returned as `sub(2, x)`."""
    op = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    operands = [*node.args, *(x for pair in sorted(node.kwargs.items()) for x in pair)]
    if op == "rsub" and len(operands) == 2:
        return "sub", operands[::-1]
    return op, operands
