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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar._torch import pytree
from autopar.capture.captured import Captured
from autopar.capture.guards import NumberInput, Place

log = logging.getLogger("autopar")

_NUMBER = "number"  # what an operand is called that may be another value in another step
_SWAPPED = {"rsub": "sub"}  # what Python writes as `number - tensor`
_COMMUTATIVE = ("add", "mul")  # Python asks the tensor first, wherever the number stands


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
    words = ", ".join(place.words for place in places)
    try:
        with _as_tensors(places) as numbers:
            found = capture()
    except Exception as error:  # Python says in many ways that a tensor is no number
        log.info("Built in: %s, for which no tensor can stand (%s).", words, error)
        return plain
    if _written(plain) != _written(found) or not computes_the_same(plain, found, numbers):
        log.info("Built in: %s, as more than arithmetic depends on it.", words)
        return plain
    guards = found.guards.without([each.place for each in numbers])
    return replace(found, guards=guards, numbers=numbers)


def _written(captured: Captured) -> list[object]:
    """What a forward writes to attributes, with the types of the values: a tensor is no number here."""
    return [
        (id(w.attributes), w.name, type(w.value), repr(w.value), w.adds) for w in captured.writes
    ]


@contextlib.contextmanager
def _as_tensors(places: Sequence[Place]) -> Iterator[tuple[NumberInput, ...]]:
    """Inside, tensors stand at the places of numbers, and are computed with as numbers are."""
    values = [place.get() for place in places]
    numbers = tuple(
        NumberInput(place, torch.tensor(value, dtype=torch.float64, device="cpu"))
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
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # Export lets fakes stand in the places of tensors while it traces.
        known = {**self._made, **{id(x): x for x in (each.place.get() for each in self._inputs)}}
        others = [x for x in tensors if id(x) not in known]
        if len(others) == len(tensors):
            return function(*args, **kwargs)
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

    Both have the same ops with the same operands in the same order, of the same shapes and dtypes, where any
    float may stand for a number; but for ops on numbers alone, which Python has done before. Every number is used.
    """
    tensors = {id(each.tensor) for each in numbers}
    own = {name for name, constant in found.constants.items() if id(constant) in tensors}
    if len(own) < len(numbers):
        return False
    return _calls(plain.module.graph, ()) == _calls(found.module.graph, own)


def _calls(graph: fx.Graph, inputs: Collection[str]) -> list[object]:
    """What every node computes, but for those that compute with numbers alone."""
    names: dict[fx.Node, object] = {}
    calls: list[object] = []
    for node in graph.nodes:
        if node.name in inputs or _is_number(node, names):
            names[node] = _NUMBER
            continue
        if "_assert" in str(node.target):
            continue
        names[node] = node.name if node.op == "placeholder" else len(calls)
        calls.append((node.op, *_call(node, names)))
    return calls


def _is_number(node: fx.Node, names: dict[fx.Node, object]) -> bool:
    """Whether a node computes with numbers alone."""
    operands = node.all_input_nodes
    return (
        node.op == "call_function"
        and bool(operands)
        and all(names.get(each) == _NUMBER for each in operands)
    )


def _call(node: fx.Node, names: dict[fx.Node, object]) -> tuple[object, ...]:
    """Op, operands, and shapes and dtypes of the results."""
    if node.op == "placeholder":
        return (node.name, _results(node))
    op = str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
    args = [_operand(x, names) for x in node.args]
    if op in _SWAPPED:
        op, args = _SWAPPED[op], [*args[1::-1], *args[2:]]
    if op in _COMMUTATIVE and not node.kwargs:
        args = sorted(args, key=repr)
    kwargs = {name: _operand(x, names) for name, x in node.kwargs.items()}
    return op, repr(args), repr(kwargs), _results(node)


def _operand(x: Any, names: dict[fx.Node, object]) -> object:
    if isinstance(x, (list, tuple)):
        return [_operand(each, names) for each in x]
    if isinstance(x, fx.Node):
        return ("node", names[x]) if names[x] != _NUMBER else _NUMBER
    return _NUMBER if isinstance(x, float) else x


def _results(node: fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return repr([(tuple(x.shape), x.dtype) for x in values if isinstance(x, Tensor)])
