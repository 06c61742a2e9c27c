"""Numbers of Python that change between steps, as inputs of a captured program.

A number that a capture reads (`model.beta`, a weight in a closure of the loss) is built into the program. Once
it has changed, the model is captured with a tensor of no dims in its place. The tensor is a constant of the program
and takes the number's value before every run, so that one program serves an annealed weight.

A tensor is no number to Python: it chooses no branch, no size and no keyword, and it widens what it is multiplied
with. So numbers are computed with in float64, as Python does, until they meet a tensor (`_Arithmetic`); and the
program is taken only where it computes what the capture with the plain number computes (`computes_the_same`).
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
from autopar.capture.captured import Captured
from autopar.capture.guards import NumberInput, Place

log = logging.getLogger("autopar")

# What makes a Python value of a tensor's value, or asks for one: then a program is right for that value alone.
_ASKING = frozenset(
    {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose"}
    | {f"__{name}__" for name in (
        "bool", "int", "float", "index", "complex", "hash", "format", "repr", "str", "contains", "array",
        "round", "floor", "ceil", "trunc",
    )}
)  # fmt: skip
_TORCH = Path(torch.__file__).parent
_COMMUTATIVE = ("add", "mul")  # Python asks the tensor first, wherever the number stands
_CLOSE = 1e-6  # relative: a number is rounded to the format of a tensor that it meets


class _NotArithmetic(Exception):
    """The value of a number is asked for."""


def with_numbers(capture: Callable[[], Captured], places: Sequence[Place]) -> Captured:
    """A capture in which the numbers at some places are inputs, or built in where they cannot be.

    Args:
        capture: captures the model.
        places: where floats stand that have changed since an earlier capture.
    """
    plain = capture()
    places = [p for p in places if p in plain.guards and type(p.get()) is float]
    if not places:
        return plain
    found = _tried(capture, plain, places)
    if found is None and len(places) > 1:
        alone = [place for place in places if _tried(capture, plain, [place]) is not None]
        found = _tried(capture, plain, alone) if alone else None
    return plain if found is None else found


def _tried(
    capture: Callable[[], Captured], plain: Captured, places: Sequence[Place]
) -> Captured | None:
    """The capture with all these numbers as inputs; None where it is not the plain one for other numbers."""
    words = ", ".join(place.words for place in places)
    try:
        with _as_tensors(places) as numbers:
            found = capture()
    except Exception as error:  # Python says in many ways that a tensor is no number
        log.info("Built in: %s, for which no tensor can stand (%s).", words, error)
        return None
    for number in numbers:
        number.take()
    if _written(plain) != _written(found) or not computes_the_same(plain, found, numbers):
        log.info("Built in: %s, as more than arithmetic depends on it.", words)
        return None
    return replace(found, guards=found.guards.without(places), numbers=numbers)


def _written(captured: Captured) -> list[object]:
    """What a forward writes to attributes, with the types of the values: a tensor is no number here."""
    return [
        (id(w.attributes), w.name, type(w.value), repr(w.value), w.adds) for w in captured.writes
    ]


@contextlib.contextmanager
def _as_tensors(places: Sequence[Place]) -> Iterator[tuple[NumberInput, ...]]:
    """Inside, tensors stand at the places of numbers, and are computed with as numbers are.

    The tensors have other values than the numbers, so that what is built in of them shows.
    """
    values = [place.get() for place in places]
    numbers = tuple(
        NumberInput(place, torch.tensor(1.37 * value + 0.173, dtype=torch.float64, device="cpu"))
        for place, value in zip(places, values, strict=True)
    )
    for each in numbers:
        each.place.put(each.tensor)
    try:
        with _Arithmetic(numbers):
            yield numbers
    finally:
        for place, value in zip(places, values, strict=True):
            place.put(value)


class _Arithmetic(TorchFunctionMode):
    """Numbers among themselves are float64; beside a tensor they take part as a Python number does."""

    def __init__(self, numbers: Sequence[NumberInput]) -> None:
        super().__init__()
        self._inputs = numbers
        self._made: dict[int, Tensor] = {id(each.tensor): each.tensor for each in numbers}

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # Export lets fakes stand in the places of tensors while it traces.
        known = {**self._made, **{id(x): x for x in (each.place.get() for each in self._inputs)}}
        others = [x for x in tensors if id(x) not in known]
        if len(others) == len(tensors):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in _ASKING and not _is_torchs(sys._getframe(1)):
            raise _NotArithmetic(f"{name} asks for its value")
        if others:
            dtype = _dtype_beside(others)
            args, kwargs = pytree.tree_map(
                lambda x: x.to(dtype) if dtype and id(x) in known else x, (args, kwargs)
            )
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self._made.update((id(x), x) for x in made)
        return result


def _is_torchs(frame: types.FrameType | None) -> bool:
    """Whether torch asks, which traces; its layers and their functions ask for what the user gives them."""
    while frame is not None and Path(frame.f_code.co_filename).parent == _TORCH:
        frame = frame.f_back  # the methods of tensors
    if frame is None:
        return True
    place = Path(frame.f_code.co_filename)
    return place.is_relative_to(_TORCH) and not place.is_relative_to(_TORCH / "nn")


def _dtype_beside(others: Sequence[Tensor]) -> torch.dtype | None:
    """The format in which a number takes part in arithmetic with tensors; None for float64.

    A tensor of no dims does not widen one with dims, but does widen another of no dims.
    """
    if any(x.is_complex() or (x.is_floating_point() and x.ndim) for x in others):
        return None
    floats = [x.dtype for x in others if x.is_floating_point()]
    return functools.reduce(torch.promote_types, floats) if floats else torch.get_default_dtype()


def computes_the_same(plain: Captured, found: Captured, numbers: Sequence[NumberInput]) -> bool:
    """Whether a capture with inputs for numbers computes what the one with the numbers built in does.

    Both have the same ops with the same operands in the same order, of the same shapes and dtypes. Where an operand
    is computed of numbers alone, it has the value that stands in the plain capture. Every number is used.
    """
    tensors = {id(each.tensor): each.tensor for each in numbers}
    own = {name: x for name, x in found.constants.items() if id(x) in tensors}
    if len(own) < len(numbers):
        return False
    values = _values(found.module.graph, own)
    before = [n for n in plain.module.graph.nodes if not _asserts(n)]
    after = [n for n in found.module.graph.nodes if not _asserts(n) and n not in values]
    comparison = _Comparison(_places(before), _places(after), values)
    return len(before) == len(after) and all(map(comparison.is_same, before, after))


def _places(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(nodes)}


def _asserts(node: fx.Node) -> bool:
    return "_assert" in str(node.target)


def _values(graph: fx.Graph, numbers: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    """The nodes that compute with numbers alone, each with its value now."""
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
        if plain.op != found.op or _results(plain) != _results(found):
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
            return type(plain) is float and math.isclose(plain, value, rel_tol=_CLOSE)
        if isinstance(found, fx.Node):
            return isinstance(plain, fx.Node) and self.before[plain] == self.after[found]
        return type(plain) is type(found) and repr(plain) == repr(found)


def _call(node: fx.Node) -> tuple[str, list[Any]]:
    """The op without its overload, and its operands; what Python writes as `number - tensor` is a difference."""
    op = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    operands = [*node.args, *(x for pair in sorted(node.kwargs.items()) for x in pair)]
    if op == "rsub" and len(operands) == 2:
        return "sub", operands[::-1]
    return op, operands


def _results(node: fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return repr([(tuple(x.shape), x.dtype) for x in values if isinstance(x, Tensor)])
