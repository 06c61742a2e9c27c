"""Pins: single choices that a user fixes, by glob patterns over names of parameters or ops.

    {"layers.*.mlp.up.weight": "S(0)@tp"}     state (R or S) in which parameters are stored along an axis
    {"linear_*": "j@tp"}                      label of the choice of ops along an axis

Pins that leave ops to one rank, such as `{"left.*": "@0"}`, are those of `autopar.search.request.single_rank_ops`.

If the text is a state, the pattern is matched against names of parameters; otherwise, against names of ops. The search
decides along axes that the text does not name. Two pins for the same name and axis must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from autopar.errors import LayoutError, MeshError, RecipeError
from autopar.ir import WHOLE, Graph, Mesh, Op, S, State, Tensor

AxisStates = tuple[tuple[int, State], ...]
AxisLabels = tuple[tuple[int, str], ...]
_T = TypeVar("_T", State, str)


@dataclass(frozen=True)
class Pins:
    """Pins resolved against a graph and a mesh.

    Attributes:
        storage: parameter name -> the storage state on some axes.
        labels: op name -> the label of its choice on some axes.
    """

    storage: Mapping[str, AxisStates] = field(default_factory=dict)
    labels: Mapping[str, AxisLabels] = field(default_factory=dict)


def resolve_pins(pins: Mapping[str, str] | None, graph: Graph, mesh: Mesh) -> Pins:
    """Matches every pin with the names of a graph. Raises RecipeError for a pin that cannot be satisfied."""
    storage: Pinned[State] = Pinned(mesh)
    labels: Pinned[str] = Pinned(mesh)
    for pattern, text in (pins or {}).items():
        parts = [_axis_of(part, pattern, text, mesh) for part in text.split()]
        if not parts:
            raise RecipeError(f"The pin {pattern!r} says nothing; write a state such as S(0)@tp.")
        if all(_is_state(value) for value, _ in parts):
            _pin_storage(pattern, parts, graph, mesh, storage)
        else:
            _pin_labels(pattern, parts, graph, mesh, labels)
    return Pins(storage.resolved(), labels.resolved())


class Pinned(Generic[_T]):
    """The pinned values by name and axis, each with the pattern that pinned it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._found: dict[str, dict[int, tuple[_T, str]]] = {}

    def add(self, name: str, axis: int, value: _T, pattern: str) -> None:
        """Adds a pinned value. Raises RecipeError if another pin has another value for the same name and axis."""
        earlier, by = self._found.setdefault(name, {}).setdefault(axis, (value, pattern))
        if earlier != value:
            at = self._mesh.names[axis]
            raise RecipeError(
                f"The pins {by!r} ({earlier}@{at}) and {pattern!r} ({value}@{at}) both match {name}, but differ; leave "
                "one out, or make its pattern narrower."
            )

    def resolved(self) -> dict[str, tuple[tuple[int, _T], ...]]:
        """Name -> pairs of axis and pinned value, in the order of the axes."""
        return {
            name: tuple((axis, value) for axis, (value, _) in sorted(by_axis.items()))
            for name, by_axis in self._found.items()
        }


def _axis_of(part: str, pattern: str, text: str, mesh: Mesh) -> tuple[str, int]:
    value, at, axis = part.partition("@")
    if not at:
        raise RecipeError(f"The pin {pattern!r}: {text!r} names no axis; write {value}@{mesh.names[0]}.")
    try:
        return value, mesh.index(axis)
    except MeshError as error:
        raise RecipeError(f"The pin {pattern!r}: {text!r} cannot hold: {error}") from None


def _is_state(text: str) -> bool:
    try:
        State.parse(text)
    except LayoutError:
        return False
    return True


def _matching(pattern: str, names: Iterable[str], what: str) -> list[str]:
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join(names[:3])
        raise RecipeError(
            f"The pin {pattern!r} matches no {what} of the model, whose {len(names)} {what}s are named like {some}."
        )
    return found


def _pin_storage(pattern: str, parts: list[tuple[str, int]], graph: Graph, mesh: Mesh, storage: Pinned[State]) -> None:
    for name in _matching(pattern, graph.parameters, "parameter"):
        tensor = graph.tensors[graph.parameters[name]]
        for text, axis in parts:
            state = _storable(State.parse(text), tensor, axis, mesh, f"{pattern!r} on {name}")
            storage.add(name, axis, state, pattern)


def _storable(state: State, tensor: Tensor, axis: int, mesh: Mesh, where: str) -> State:
    """The state in which a pinned parameter is stored; S(d) becomes S(d.*) if only whole dims divide.

    Raises RecipeError if the parameter cannot be stored so.
    """
    axis_name, size = mesh.axes[axis]
    if state.kind == "R":
        return state
    if state.kind != "S" or state.factor > 0:
        raise RecipeError(
            f"The pin {where} asks to store it as {state}, but a pin stores a parameter as R or S(dim). (Owners O(i) "
            "come from the recipes data-parallel, parameter-server and serve, or from the text of a plan.)"
        )
    if state.dim >= len(tensor.dims):
        raise RecipeError(f"The pin {where} asks for dim {state.dim}, but its shape is {tensor.shape}.")
    factors = tensor.dims[state.dim]
    if state.factor == 0 and factors and (factors[0] % size == 0 or (len(factors) == 1 and factors[0] > size)):
        return state
    if math.prod(factors) % size:
        raise RecipeError(
            f"The pin {where} cannot hold: dim {state.dim} has size {math.prod(factors)}, which "
            f"{axis_name}={size} does not divide."
        )
    return S(state.dim, WHOLE)


def _pin_labels(pattern: str, parts: list[tuple[str, int]], graph: Graph, mesh: Mesh, labels: Pinned[str]) -> None:
    for name in _matching(pattern, graph.by_name, "op"):
        for label, axis in parts:
            _check_label(graph, graph.by_name[name], label, mesh.axes[axis], pattern)
            labels.add(name, axis, label, pattern)


def _check_label(graph: Graph, op: Op, label: str, axis: tuple[str, int], pattern: str) -> None:
    axis_name, size = axis
    found = [choice for choice in op.choices if choice.label == label]
    if not found:
        known = ", ".join(choice.label for choice in op.choices)
        raise RecipeError(
            f"The pin {pattern!r} asks {op.name} ({op.kind}) for the choice {label!r}, but its choices are {known}."
        )
    if not graph.can_cut(found[0], size):
        axis_text = f"{axis_name}={size}"
        why = f"which {axis_text} does not divide" if found[0].needs_equal else f"too few for the ranks of {axis_text}"
        raise RecipeError(
            f"The pin {pattern!r} on {op.name} cannot hold: its factor {label} has size {found[0].size}, {why}."
        )
