"""Captured graphs as JSON, and back.

    {"nodes": [["placeholder", "x", "x", {"tuple": []}, {"dict": []}, 0, ...],
               ["call_function", "add", "aten.add.Tensor", {"tuple": [{"node": 0}, 1.0]}, {"dict": []}, 0, ...]],
     "tensors": [[[8, 32], [32, 1], "float32", "cpu", false, false]], ...}

A node has its kind, name, target, arguments, its result, and where it was called. Its result is the index of a row of
`tensors` (shape, strides, dtype, device, whether it requires a gradient, whether it is a parameter), a list of these, a
number, or an open size (`autopar/_torch/symbol_text.py`). What is neither an operator of torch nor plain data, such as
a function with a backward of its own, has no text. Nodes are made by calls. The words of a file that fx puts into its
source as they stand are checked to be names: those of nodes, placeholders and keyword arguments.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar._torch import FakeTensor, OpOverload
from autopar.capture.stored.python_state import NoText

SCALARS = (type(None), bool, int, float, str)
_BY_NAME = (torch.dtype, torch.layout, torch.memory_format)
# What computes with results of several parts, and with open sizes.
_FUNCTIONS = {
    name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "pow")
}
_CONTAINERS = ("builtins", "torch.fx.immutable_collections")  # where the classes of lists and tuples are
Json = Any
Size = Callable[[Json], "int | torch.SymInt"]


class _Shared:
    """Values that many nodes share, each written once."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._places: dict[str, int] = {}

    def place(self, row: Json) -> int:
        """The index of a row, which is added if it is new."""
        key = repr(row)
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        return self._places[key]


def write_graph(module: fx.GraphModule) -> Json:
    """A captured graph as JSON. Raises NoText if a part of it has no text."""
    numbers = {node: i for i, node in enumerate(module.graph.nodes)}
    tensors, texts = _Shared(), _Shared()
    nodes = [_written(node, numbers, tensors, texts) for node in module.graph.nodes]
    tables = {"tensors": tensors.rows, "texts": texts.rows}
    return {"nodes": nodes, **tables, "sizes": sizes_of(module)}


def read_graph(document: Json) -> fx.GraphModule:
    """The graph that `write_graph` has written. Raises KeyError, TypeError, ValueError, NoText ... for another text."""
    sizes = None if document["sizes"] is None else _torch.ReadSizes(document["sizes"])
    mode = _torch.FakeTensorMode() if sizes is None else sizes.mode
    size: Size = int if sizes is None else sizes.size
    examples = [_example(mode, row, size) for row in document["tensors"]]
    texts, graph = document["texts"], fx.Graph()
    nodes: list[fx.Node] = []
    for kind, name, target, args, kwargs, result, stack, line in document["nodes"]:
        found, named = _target(kind, target), _read(kwargs, nodes)
        _check_words(name, found, named)
        made = graph.create_node(kind, found, _read(args, nodes), named, name=name)
        if kind != "output":
            made.meta["val"] = _result(result, examples, size)
        if stack is not None:
            made.meta["nn_module_stack"] = {key: (path, of) for key, path, of in texts[stack]}
        if line is not None:
            made.meta["stack_trace"] = texts[line]
        nodes.append(made)
    if sizes is not None:
        sizes.settle()
    return fx.GraphModule({}, graph)


def _written(node: fx.Node, numbers: dict[fx.Node, int], tensors: _Shared, texts: _Shared) -> list[Json]:
    stack, line = node.meta.get("nn_module_stack"), node.meta.get("stack_trace")
    modules = None if stack is None else [[key, *entry] for key, entry in stack.items()]
    return [
        node.op,
        node.name,
        _name(node),
        _write(node.args, numbers),
        _write(node.kwargs, numbers),
        _result_text(node.meta.get("val"), tensors),
        None if modules is None else texts.place(_checked(modules)),
        None if line is None else texts.place(line),
    ]


def _checked(modules: list[list[str]]) -> Json:
    if not all(isinstance(x, str) for entry in modules for x in entry):
        raise NoText("a module stack has another form than export's")
    return modules


def _name(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        name = str(node.target)
        if _torch.operator_named(name) is node.target:
            return name
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or _FUNCTIONS.get(name) is not node.target:
        raise NoText(f"{node.name} is not an operator of torch")
    return name


def _check_words(name: str, target: Any, named: dict[str, Any]) -> None:
    """Raises NoText for a word that is not a name; fx would put it into Python source as it stands."""
    takes = _torch.argument_names(target) if isinstance(target, OpOverload) else frozenset[str]()
    words = [name, *([target] if isinstance(target, str) else [])]
    if not all(word.isidentifier() and not keyword.iskeyword(word) for word in words):
        raise NoText(f"{words} are not names")
    if not named.keys() <= takes:
        raise NoText(f"{target} takes no {', '.join(map(str, named.keys() - takes))}")


def _target(kind: str, name: str) -> Any:
    if kind == "placeholder" or (kind, name) == ("output", "output"):
        return name
    if kind != "call_function":
        raise NoText(f"there is no node of the kind {kind}")
    found = _FUNCTIONS.get(name) or _torch.operator_named(name)
    if found is None:
        raise NoText(f"there is no operator {name}")
    return found


def _write(x: Any, numbers: dict[fx.Node, int]) -> Json:
    """An argument of a node as JSON."""
    if type(x) is float and not math.isfinite(x):
        return {"float": repr(x)}
    if type(x) in SCALARS:
        return x
    if isinstance(x, fx.Node):
        return {"node": numbers[x]}
    if isinstance(x, (list, tuple)) and type(x).__module__ in _CONTAINERS:
        found = [_write(each, numbers) for each in x]
        return {"tuple": found} if isinstance(x, tuple) else found
    if isinstance(x, dict):
        return {"dict": [[key, _write(value, numbers)] for key, value in x.items()]}
    if isinstance(x, slice):
        return {"slice": [_write(each, numbers) for each in (x.start, x.stop, x.step)]}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if isinstance(x, _BY_NAME):
        return {"torch": str(x).removeprefix("torch.")}
    if type(x) is complex:
        return {"complex": [x.real, x.imag]}
    raise NoText(f"an argument is a {type(x).__name__}")


def _read(x: Json, nodes: list[fx.Node]) -> Any:
    if isinstance(x, list):
        return [_read(each, nodes) for each in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "node":
        return nodes[value]
    if kind == "tuple":
        return tuple(_read(each, nodes) for each in value)
    if kind == "dict":
        return {key: _read(each, nodes) for key, each in value}
    if kind == "slice":
        return slice(*(_read(each, nodes) for each in value))
    if kind == "device":
        return torch.device(value)
    if kind == "complex":
        return complex(*value)
    if kind == "float" and value in ("inf", "-inf", "nan"):
        return float(value)
    found = vars(torch).get(value) if kind == "torch" else None
    if not isinstance(found, _BY_NAME):
        raise NoText(f"{x} is not an argument")
    return found


def _result_text(value: Any, tensors: _Shared) -> Json:
    """The example result of a node: a row, several, a number."""
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_result_text(x, tensors) for x in value]}
    if type(value) in SCALARS:
        return {"value": value}
    if isinstance(value, torch.SymInt):
        return {"size": _size(value)}
    is_parameter = isinstance(value, nn.Parameter)
    if not isinstance(value, FakeTensor) or (type(value) is not FakeTensor and not is_parameter):
        raise NoText(f"a result is a {type(value).__name__}")
    if value.layout is not torch.strided:
        raise NoText(f"a result is {value.layout}")
    return tensors.place(
        [
            list(map(_size, value.shape)),
            list(map(_size, value.stride())),
            str(value.dtype).removeprefix("torch."),
            str(value.device),
            value.requires_grad,
            is_parameter,
        ]
    )


def sizes_of(module: fx.GraphModule) -> Json:
    """The open sizes of a graph; None for a graph without any."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    env = next((x.fake_mode.shape_env for x in values if isinstance(x, FakeTensor)), None)
    if env is None or not env.var_to_range:
        return None
    try:
        return _torch.write_sizes(env)
    except ValueError as error:
        raise NoText(str(error)) from None


def _size(size: int | torch.SymInt) -> Json:
    try:
        return _torch.write_size(size)
    except ValueError as error:
        raise NoText(str(error)) from None


def _result(value: Json, examples: Sequence[Callable[[], Tensor]], size: Size) -> Any:
    if isinstance(value, dict):
        ((kind, parts),) = value.items()
        if kind == "value":
            return parts
        if kind == "size":
            return size(parts)
        made = (_result(x, examples, size) for x in parts)
        return {"list": list, "tuple": tuple}[kind](made)
    return examples[value]()


def _example(mode: Any, row: Json, size: Size) -> Callable[[], Tensor]:
    """A function that makes one more tensor of a row."""
    shape, strides, dtype, device, requires_grad, is_parameter = row
    options = {"requires_grad": requires_grad, "is_parameter": is_parameter}
    kind, where = _read({"torch": dtype}, []), torch.device(device)
    sizes, steps = list(map(size, shape)), list(map(size, strides))
    return lambda: _torch.example_tensor(mode, sizes, steps, kind, where, **options)
