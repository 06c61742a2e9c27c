"""Graphs of torch.compile as modules that `autopar.capture.export` takes.

Dynamo gives a graph of torch calls whose arguments are all that the code touched: parameters, buffers,
inputs, and the numbers that sizes were made of. `lift` runs it once on fake tensors to see what it does to
its arguments, and makes a module of it for one set of shapes:

    an argument that requires a gradient  ->  a parameter if it is one of a module, else an input
    a sharded parameter  ->  a parameter
    a buffer, or an argument that is changed in place  ->  a buffer, whose new value is written back
    any other tensor  ->  an input
    a number  ->  a constant

What the graph returns as a view of an argument is made of that argument again (`ReturnedView`), as users may
change either in place and look at the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback

from autopar import _torch
from autopar.backend.effects import effects_of, refuse_shared
from autopar.backend.interpreter import DynamoInterpreter, name_of_target
from autopar.capture.remedies import traced_line
from autopar.errors import CaptureError

_STEP = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
_ADDRESS = re.compile(r"_\d{12,}")  # the `id` of an object, another on each rank


@dataclass(frozen=True)
class Lifted:
    """A graph of torch.compile as a module.

    Attributes:
        module: its forward takes the inputs, and returns the results that are not views and no numbers.
        parameters: name -> position of the argument, for those that are not changed in place.
        buffers: name -> position, for buffers of modules and arguments that are changed in place.
        inputs: positions of all other tensors, in the order of the forward.
        differentiable: positions of the inputs that require a gradient.
        results: for each result of the graph: a view, a number, or None for what the module returns.
    """

    module: nn.Module
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    inputs: tuple[int, ...]
    differentiable: frozenset[int]
    results: tuple[Any, ...]

    @property
    def place(self) -> str:
        """A line that says where in the user's code a run of the module failed, "" if none has."""
        assert isinstance(self.module, _Forward)
        return self.module.place


def argument_names(module: fx.GraphModule) -> list[str]:
    """Readable names of a graph's arguments: that in the model for parameters and buffers."""
    names: list[str] = []
    for node in module.graph.find_nodes(op="placeholder"):
        path = ".".join(_STEP.findall(_torch.dynamo_source(node)))
        name = path or _ADDRESS.sub("", node.name.removeprefix("l_")).rstrip("_")
        names.append(name if name not in names else f"{name}~{len(names)}")
    return names


def _buffers(module: fx.GraphModule) -> list[int]:
    """Positions of the arguments that are buffers of a module."""
    sources = map(_torch.dynamo_source, module.graph.find_nodes(op="placeholder"))
    return [i for i, source in enumerate(sources) if "_buffers['" in source]


def lift(
    module: fx.GraphModule, names: Sequence[str], arguments: Sequence[Any], sharded: frozenset[int] = frozenset()
) -> Lifted:
    """Makes a module from a graph, for arguments of these shapes.

    The arguments at the positions `sharded` are parameters that `autopar.shard_` has cut.

    Raises CaptureError for an argument that is changed in place and requires a gradient or shares memory
    with another argument.
    """
    _refuse_forgotten(module)
    changed, results = effects_of(module, arguments)
    tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    refuse_shared(changed, tensors, names, arguments)
    takes_gradient = [i for i in tensors if arguments[i].requires_grad and torch.is_grad_enabled()]
    parameters = [i for i in tensors if i in sharded or (isinstance(arguments[i], nn.Parameter) and i not in changed)]
    # All of a module's: what batch_norm does to its statistics leaves no trace on fake tensors.
    state = [i for i in _buffers(module) if i in tensors and i not in takes_gradient]
    buffers = sorted({*changed, *state} - {*parameters})
    own = {*parameters, *buffers}
    inputs = tuple(i for i in tensors if i not in own)
    made = _Forward(module, arguments, inputs, results)
    for i in (*parameters, *buffers):
        trained = i in takes_gradient if i in parameters else None
        made._held[i] = _hold(made, names[i], arguments[i].detach(), trained)
    return Lifted(
        module=made,
        parameters={names[i]: i for i in parameters},
        buffers={names[i]: i for i in buffers},
        inputs=inputs,
        differentiable=frozenset(takes_gradient) - frozenset(parameters),
        results=results,
    )


def _refuse_forgotten(module: fx.GraphModule) -> None:
    """Refuses what a captured graph would lose: hooks, nestings of grad mode and autocast ([Note: no_grad regions])."""
    nodes = {name_of_target(node.target): node for node in _all_nodes(module)}
    if "register_hook" in nodes:
        raise CaptureError(
            f"The graph registers a hook on a gradient in {traced_line(nodes['register_hook'])}; compute it in the "
            "backward of a torch.autograd.Function."
        )
    names = [name_of_target(node.target) for node in _all_nodes(module)]
    if "_set_grad_enabled" in names and not torch.is_grad_enabled():
        raise CaptureError("The graph turns autograd on inside torch.no_grad.")
    casts = 0
    for name in names:
        casts += (name == "_enter_autocast") - (name == "_exit_autocast")
        if name == "_set_grad_enabled" and casts:
            raise CaptureError(
                "The graph turns autograd off inside torch.autocast; enter torch.autocast inside torch.no_grad instead."
            )


# --- the module


class _Forward(nn.Module):
    """A module that runs a graph of Dynamo, with the graph's parameters, buffers and numbers as its attributes."""

    def __init__(
        self, graph: fx.GraphModule, arguments: Sequence[Any], inputs: tuple[int, ...], results: tuple[Any, ...]
    ) -> None:
        super().__init__()
        # In a tuple: the graph's constants are not this module's state.
        self._graph = (DynamoInterpreter(graph, lambda x: x),)
        self._numbers = {i: x for i, x in enumerate(arguments) if not isinstance(x, Tensor)}
        self._inputs = inputs
        self._held: dict[int, tuple[nn.Module, str]] = {}
        self._count = len(arguments)
        self._kept = [i for i, result in enumerate(results) if result is None]
        _rename_modules(graph)

    @property
    def place(self) -> str:
        """See `Lifted.place`."""
        return self._graph[0].place

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._inputs, inputs, strict=True)) | self._numbers
        given |= {i: getattr(owner, name) for i, (owner, name) in self._held.items()}
        with fx_traceback.preserve_node_meta():
            results = self._graph[0].run(*(given[i] for i in range(self._count)))
        return tuple(results[i] for i in self._kept)


def _hold(root: nn.Module, name: str, x: Tensor, trained: bool | None) -> tuple[nn.Module, str]:
    """Makes a tensor a parameter, trained or frozen, or a buffer (None) of that qualified name.

    Returns its owner and last name.
    """
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if trained is not None:
        owner.register_parameter(last, nn.Parameter(x, requires_grad=trained))
    else:
        owner.register_buffer(last, x)
    return owner, last


def _rename_modules(graph: fx.GraphModule) -> None:
    """Renames modules as export does, L['self'].h.0 -> model.h.0; repeated layers are found by these names."""
    for node in _all_nodes(graph):
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: ("model" + re.sub(r"^[LG]\['[^']*'\]", "", path), kind) for key, (path, kind) in stack.items()
            }


def _all_nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
