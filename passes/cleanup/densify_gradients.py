"""embedding(w, i, sparse=True) -> embedding(w, i, sparse=False), and the same of embedding_bag and gather."""

from __future__ import annotations

from torch import fx

from autopar.ops.nodes import is_operator, schema

_FLAGS = ("sparse", "sparse_grad")  # as ATen's schemas call them


def densify_gradients(module: fx.GraphModule) -> None:
    """Turns off sparse gradients of lookups, because no collective accepts sparse tensors."""
    for node in module.graph.nodes:
        if is_operator(node):
            for i, argument in enumerate(schema(node).arguments):
                _clear(node, i, argument.name)
    module.recompile()


def _clear(node: fx.Node, position: int, name: str) -> None:
    if name not in _FLAGS:
        return
    if node.kwargs.get(name) is True:
        node.update_kwarg(name, False)
    elif position < len(node.args) and node.args[position] is True:
        node.update_arg(position, False)
