"""Captures as JSON, and back.

    {"graph": {"nodes": [...], ...}, "parameters": {"p_weight": "layers.0.weight"}, ...,
     "guards": [[3, true, "beta", "model.layers.0.beta", "model.py:12"], ...]}

Objects of the user's, such as the module whose attribute is guarded, are written as their numbers in the state of
Python (`autopar.capture.stored.python_state`), and are those of the reading process when they are read. A constant that
the model holds is such an object, too; one that the capture has made itself is written with its values.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import FakeTensor, pytree
from autopar.capture.captured import Captured
from autopar.capture.casts import dtype_of
from autopar.capture.guards.guards import Guard, Guards, Place
from autopar.capture.guards.values import seen
from autopar.capture.guards.writes import Write
from autopar.capture.stored.graph_text import SCALARS, Json, read_graph, write_graph
from autopar.capture.stored.python_state import NoText, PythonState
from autopar.capture.stored.state_text import bytes_of
from autopar.ir import MixedPrecision

# Fields that are JSON as they are, but for the type that they are given back.
_PLAIN = {
    "parameters": dict,
    "tied": dict,
    "frozen": frozenset,
    "buffers": dict,
    "inputs": dict,
    "is_step": bool,
    "training": bool,
    "has_loss_fn": bool,
    "has_more": bool,
    "differentiable": frozenset,
    "whole_outputs": bool,
    "forms": tuple,
    "is_clean": bool,
}
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def write_captured(captured: Captured, state: PythonState) -> Json:
    """A capture as JSON. Raises NoText if a part of it has no text.

    Args:
        captured: the capture.
        state: the Python values that it was made from.
    """
    plain = {name: _list(getattr(captured, name)) for name in _PLAIN}
    return plain | {
        "graph": write_graph(captured.module),
        "constants": {name: _constant(x, state) for name, x in captured.constants.items()},
        "result": _spec(captured.out_spec),
        "mutated": list(captured.mutated.items()),
        "stored": {name: str(dtype) for name, dtype in captured.stored.items()},
        "guards": [_place(guard.place, state) for guard in captured.guards],
        "writes": [_write(each, state) for each in captured.writes],
    }


def read_captured(
    document: Json, state: PythonState, arguments: Arguments, precision: MixedPrecision | None
) -> Captured:
    """The capture that `write_captured` has written.

    What it raises for another document may be any exception. No text of the document is run as code.

    Args:
        document: the JSON.
        state: the Python values of this process, which are equal to those of the process that has written.
        arguments: arguments that the model would be captured with.
        precision: mixed-precision policy of the capture.
    """
    leaves, in_spec = pytree.tree_flatten((arguments[0], dict(arguments[1])))
    places = [_read_place(each, state) for each in document["guards"]]
    return Captured(
        **{name: kind(document[name]) for name, kind in _PLAIN.items()},
        module=read_graph(document["graph"]),
        constants={name: _read_constant(x, state) for name, x in document["constants"].items()},
        in_spec=in_spec,
        literals={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)},
        out_spec=pytree.read_tree(document["result"]),
        mutated=dict(document["mutated"]),
        precision=precision,
        stored={name: dtype_of(dtype.removeprefix("torch.")) for name, dtype in document["stored"].items()},
        guards=Guards(Guard(place, seen(place.get())) for place in places),
        writes=tuple(_read_write(each, state) for each in document["writes"]),
    )


def _list(value: Any) -> Json:
    """A value as JSON; a set in order."""
    return sorted(value) if isinstance(value, frozenset) else value


def _spec(spec: pytree.TreeSpec) -> Json:
    try:
        return pytree.write_tree(spec)
    except ValueError as error:
        raise NoText(f"the results have a form without a text ({error})") from None


def _constant(x: Tensor, state: PythonState) -> Json:
    """A constant of the graph: the number of a tensor that the user holds, or the values of one that nobody holds."""
    number = state.number(x)
    if number is not None:
        return {"held": number}
    if type(x) is not Tensor or isinstance(x, FakeTensor) or x.is_meta or x.layout != torch.strided:
        raise NoText(f"a constant is a {type(x).__name__} on {x.device}")
    if x.is_quantized or state.shares_memory(x):
        raise NoText("a constant is a part of another tensor")
    values = base64.b64encode(bytes_of(x)).decode()
    return {"shape": list(x.shape), "dtype": str(x.dtype), "device": str(x.device), "bytes": values}


def _read_constant(document: Json, state: PythonState) -> Tensor:
    if "held" in document:
        found = state.object(document["held"])
        if not isinstance(found, Tensor):
            raise NoText("a constant is not a tensor any more")
        return found
    dtype = dtype_of(document["dtype"].removeprefix("torch."))
    values = bytearray(base64.b64decode(document["bytes"], validate=True))
    if math.prod(document["shape"]) * dtype.itemsize != len(values):
        raise NoText("a constant has another number of values")
    made = torch.empty(document["shape"], dtype=dtype)
    if values:
        made = torch.frombuffer(values, dtype=dtype).reshape(document["shape"])
    return made.to(document["device"])


def _place(place: Place, state: PythonState) -> Json:
    if place.key is not None and not isinstance(place.key, str):
        raise NoText(f"{place.words} has a key that is not text")
    return [*state.address(place), place.key, place.words, place.line]


def _read_place(document: Json, state: PythonState) -> Place:
    number, is_space, key, words, line = document
    return Place(state.holder(number, is_space), key, words, line)


def _write(write: Write, state: PythonState) -> Json:
    place = Place(write.attributes, write.name, write.name, "the forward")
    if type(write.value) not in SCALARS:
        raise NoText(f"the forward sets {write.name} to a {type(write.value).__name__}")
    return [*state.address(place), write.name, write.value, write.adds]


def _read_write(document: Json, state: PythonState) -> Write:
    number, is_space, name, value, adds = document
    return Write(state.holder(number, is_space), name, value, adds)
