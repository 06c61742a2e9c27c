"""A graph with three layers of a list of layers -> the graph with all of them, as a capture of the whole model gives.

    %x1 = layers.0(%x0); %x2 = layers.1(%x1); %x3 = layers.2(%x2)
    -> %x1 = layers.0(%x0); %x2 = layers.1(%x1); %x3 = layers.2(%x2); ...; %x32 = layers.31(%x31)

The middle layer is copied. What a copy reads from the layer before it is found by comparing the middle layer
with the last one: wherever the last layer reads a result of the middle layer, a copy reads that of its
predecessor; wherever both read the same node (a mask, the encoder's result), so does every copy.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar._torch import code_when_called
from autopar.capture.captured import Captured
from autopar.errors import CaptureError
from autopar.ir import Stack
from autopar.ops.nodes import module_path
from autopar.passes.cleanup.name_nodes import named

Copies = dict[str, tuple[str, ...]]
_MODULES = "nn_module_stack"  # where torch.export notes the modules around a node


def unroll_layers(captured: Captured, stacks: Sequence[Stack]) -> tuple[Captured, Copies]:
    """Adds the layers for which a captured middle layer stands, without another capture.

    Args:
        captured: a capture, cleaned up, that has `stack.captured` layers of every stack.
        stacks: the stacks with the number of layers that the whole model has.

    Returns the capture of the whole model, and for every op, parameter and buffer of the short graph its names
    in the long one. Raises CaptureError where the middle layer cannot stand for the others.
    """
    copies: Copies = {}
    for stack in stacks:
        if stack.captured < stack.layers:
            captured, found = _Unroller(captured, stack).run()
            copies = _through(copies, found)
    return captured, copies


def _through(first: Copies, second: Copies) -> Copies:
    """Name in the first graph -> names after both of two rewrites."""
    if not first:
        return second
    return {name: tuple(new for old in names for new in second[old]) for name, names in first.items()}


class _Unroller:
    """Adds the layers of one list of layers to one captured graph."""

    def __init__(self, captured: Captured, stack: Stack) -> None:
        self.captured, self.stack = captured, stack
        self.times = stack.layers - stack.captured  # copies beside the captured middle layer
        nodes = list(captured.module.graph.nodes)
        self.nodes = nodes
        layers = [self._layer(node) for node in nodes]
        try:
            begin, end = layers.index(stack.middle), layers.index(stack.middle + 1)
        except ValueError:
            raise self._refusal("it has no ops of a middle and a last layer") from None
        self.middle = nodes[begin:end]
        self.after = nodes[end : end + len(self.middle)]
        if any(layer == stack.middle for layer in (*layers[:begin], *layers[end:])):
            raise self._refusal("its layers do not run one after the other")
        self.inside = set(self.middle)
        self.named = {**captured.parameters, **captured.buffers}
        self.own = {node for node in nodes if stack.index(self.named.get(node.name, "")) == stack.middle}
        if any(stack.index(name) is not None for name in captured.mutated.values()):
            raise self._refusal("they write to buffers")
        self.chain = self._chain()
        self._check_readers(nodes[end:])

    def _layer(self, node: fx.Node) -> int | None:
        return self.stack.index(module_path(node)) if node.op == "call_function" else None

    def _refusal(self, why: str) -> CaptureError:
        return CaptureError(
            f"The {self.stack.captured} captured layers of {self.stack.path} cannot represent all {self.stack.layers}: "
            f"{why}. Give the whole model, as package.module:function."
        )

    def _chain(self) -> dict[fx.Node, fx.Node]:
        """Node of the layer before that the middle layer reads -> node of the middle layer that the last one reads."""
        chain: dict[fx.Node, fx.Node] = {}
        ends = {*self.middle}
        if len(self.after) < len(self.middle):
            raise self._refusal("the last layer has fewer ops than the middle one")
        for node, counterpart in zip(self.middle, self.after, strict=True):
            if node.target != counterpart.target and not _has_body(node):
                raise self._refusal(f"{node.name} is {node.target}, {counterpart.name} {counterpart.target}")
            pairs = zip(node.all_input_nodes, counterpart.all_input_nodes, strict=False)
            for read, then in pairs:
                if then in ends and read not in ends:
                    chain[read] = then
        return chain

    def _check_readers(self, later: Sequence[fx.Node]) -> None:
        """Raises CaptureError if another node than the next layer reads a result of the middle layer."""
        following = set(self.after)
        for node in later:
            read = self.inside.intersection(node.all_input_nodes)
            if read and node not in following and not read <= set(self.chain.values()):
                raise self._refusal(f"{node.name} reads {next(iter(read)).name} of every layer")

    # --- writing

    def run(self) -> tuple[Captured, Copies]:
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.made: dict[fx.Node, list[fx.Node]] = {}  # a node -> itself and its copies
        pending: list[fx.Node] = []
        for node in self.nodes:
            if pending and node not in self.own:
                self._write_placeholders(pending)
                pending = []
            if node is self.after[0]:
                self._write_copies()
            self._write(node)
            pending += [node] if node in self.own else []
        return self._result()

    @property
    def _numbers(self) -> range:
        """Indices of the layers that are added."""
        return range(self.stack.middle + 1, self.stack.middle + 1 + self.times)

    def _write(self, node: fx.Node) -> None:
        """Copies a node; the layers after the middle one get their numbers in the whole model."""
        qualified = self.named.get(node.name, "")
        index = self.stack.index(qualified)
        moves = index is not None and index > self.stack.middle
        name = self._placeholder(node, index, index + self.times) if moves else node.name  # type: ignore[operator, arg-type]
        layer = self._layer(node)
        later = layer is not None and layer > self.stack.middle
        modules = self._modules(node, layer, layer + self.times) if later else None  # type: ignore[operator, arg-type]
        self.new[node] = self._copied(node, self.new, name, modules)
        self.made[node] = [self.new[node]]

    def _copied(self, node: fx.Node, known: Mapping[fx.Node, fx.Node], name: str, modules: Any = None) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        target = name if node.op == "placeholder" else node.target
        copy = self.graph.create_node(node.op, target, args, kwargs, name=name)
        copy.meta = dict(node.meta) if modules is None else {**node.meta, _MODULES: modules}
        return copy

    def _write_placeholders(self, placeholders: Sequence[fx.Node]) -> None:
        """Adds the placeholders of all copies of the middle layer, layer by layer, as the whole model has them."""
        for number in self._numbers:
            for node in placeholders:
                name = self._placeholder(node, self.stack.middle, number)
                self.made[node].append(self._copied(node, {}, name))

    def _placeholder(self, node: fx.Node, index: int, number: int) -> str:
        """The name of a layer's placeholder in another layer."""
        old, new = (_flat(f"{self.stack.path}.{i}.") for i in (index, number))
        return node.name.replace(old, new, 1)

    def _write_copies(self) -> None:
        for turn, number in enumerate(self._numbers, start=1):
            known = dict(self.new)
            known |= {node: self.made[node][turn] for node in self.own}
            known |= {read: self.made[then][turn - 1] for read, then in self.chain.items()}
            for node in self.middle:
                layer = self._layer(node)
                modules = None if layer is None else self._modules(node, layer, number)
                known[node] = self._copied(node, known, node.name, modules)
                self.made[node].append(known[node])
        for node in self.middle:  # what follows reads the last copy
            self.new[node] = self.made[node][-1]

    def _modules(self, node: fx.Node, index: int, number: int) -> dict[str, Any]:
        """The metadata of the modules around a node, with the number of another layer."""
        inside = re.compile(rf"^((?:L__self__)?model\.{re.escape(self.stack.path)}\.){index}(?=[.@]|$)")

        def moved(path: str) -> str:
            return inside.sub(rf"\g<1>{number}", path)

        stack = node.meta.get(_MODULES) or {}
        return {moved(key): (moved(path), kind) for key, (path, kind) in stack.items()}

    # --- the result

    def _result(self) -> tuple[Captured, Copies]:
        """The capture of the whole model with its final names, and for every node the names of its copies."""
        graph = named(self.graph)
        with code_when_called():  # of thousands of nodes, and a search does not run them
            long = fx.GraphModule(self.captured.module, graph)
        final = {old: new.name for old, new in zip(self.graph.nodes, graph.nodes, strict=True)}
        copies = {
            node.name: tuple(final[copy] for copy in made)
            for node, made in self.made.items()
            if node.op == "call_function"
        }
        copies |= {name: self._names(name) for name in self.named.values()}
        c = self.captured
        return dataclasses.replace(
            c,
            module=long,
            parameters=self._placeholders(c.parameters, final),
            buffers=self._placeholders(c.buffers, final),
            tied={
                new: first
                for name, owner in c.tied.items()
                for new, first in zip(self._names(name), self._names(owner), strict=False)
            },
            frozen=frozenset(new for name in c.frozen for new in self._names(name)),
            stored={new: dtype for name, dtype in c.stored.items() for new in self._names(name)},
            mutated={position: self._names(name)[0] for position, name in c.mutated.items()},
        ), copies

    def _placeholders(self, named: Mapping[str, str], final: Mapping[fx.Node, str]) -> dict[str, str]:
        """Name of a placeholder in the long graph -> name of its parameter or buffer, in the order of the graph.

        Args:
            named: name of a placeholder of the short graph -> name of its parameter or buffer.
            final: node of the long graph -> its final name.
        """
        found = {
            final[copy]: title
            for node, made in self.made.items()
            if node.name in named
            for copy, title in zip(made, self._names(named[node.name]), strict=True)
        }
        return {name: found[name] for name in final.values() if name in found}

    def _names(self, name: str) -> tuple[str, ...]:
        """The names in the whole model of a parameter or buffer; several for one of the middle layer."""
        index, path = self.stack.index(name), self.stack.path
        if index is None or index < self.stack.middle:
            return (name,)
        rest = name.removeprefix(f"{path}.{index}.")
        if index > self.stack.middle:
            return (f"{path}.{index + self.times}.{rest}",)
        return tuple(f"{path}.{number}.{rest}" for number in (index, *self._numbers))


def _flat(path: str) -> str:
    """A module path in the form that names of placeholders have."""
    return re.sub(r"[^a-zA-Z0-9]", "_", path).lower()


def _has_body(node: fx.Node) -> bool:
    """Whether a node computes a graph of its own, as joined experts do."""
    return isinstance(getattr(node.target, "body", None), fx.GraphModule)
