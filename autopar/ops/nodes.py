"""Questions about a node of an fx graph: its operator, its tensors, its arguments by name; and a call in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar._torch import OpOverload, pytree


def reached(starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes of `starts`, those that follow one of them, and so on; `following` gives the next ones of a node."""
    found: set[fx.Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += following(node)
    return found


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an overload of a torch operator, such as `aten.add.Tensor`."""
    return isinstance(node.target, OpOverload)


def schema(node: fx.Node) -> torch.FunctionSchema:
    """The schema of the operator that a node calls."""
    assert is_operator(node), node.target
    return _torch.schema(node.target)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor-valued nodes among the arguments, in order, with repetition."""
    found: list[fx.Node] = []

    def visit(argument: fx.Node) -> fx.Node:
        if isinstance(argument.meta.get("val"), torch.Tensor):
            found.append(argument)
        return argument

    fx.map_arg((node.args, node.kwargs), visit)
    return found


def tensor_results(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns: one, or those of its tuple."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, with defaults."""
    bound = {a.name: a.default_value for a in schema(node).arguments}
    return bound | named_arguments(node, node.args) | dict(node.kwargs)


def named_arguments(node: fx.Node, args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by the names that the schema of the node's operator gives them."""
    return {a.name: x for a, x in zip(schema(node).arguments, args, strict=False)}


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that an op writes in place."""
    for argument in schema(node).arguments if is_operator(node) else ():
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = bound_arguments(node)[argument.name]
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, fx.Node))


def draws(node: fx.Node) -> bool:
    """Whether a node takes random numbers from the default generator.

    Attention and recurrent layers do so only if they are called with dropout.
    """
    if not is_operator(node):
        return bool(getattr(node.target, "draws", False))  # that of a custom function
    return draws_numbers(node.target, node.args, node.kwargs)


def draws_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an overload with these arguments takes random numbers from the default generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [a.name for a in _torch.schema(operator).arguments]
    arguments = {a.name: a.default_value for a in _torch.schema(operator).arguments}
    arguments |= dict(zip(names, args, strict=False)) | dict(kwargs)
    if arguments.get("train") is False:
        return False
    return bool(arguments.get("dropout_p", arguments.get("dropout", True)))


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one result out of a tuple."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The tensor-valued nodes among a graph's outputs, in order."""
    output = next(iter(module.graph.find_nodes(op="output")))
    return tensor_operands(output)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that called a node, without the prefix of the wrapper that capture adds."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def call_like(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with an example value, and with the origin of the node it stands for."""
    new = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    new.meta = {**like.meta, "val": target(*values, **named)}
    return new
