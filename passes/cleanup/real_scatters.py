"""slice_scatter(x, y, dim) of complex x, y -> view_as_complex(slice_scatter(view_as_real(x), view_as_real(y), dim)).

So select_scatter too: what is left of `x[:, :3] = y` once the graph is functional, and PyTorch has no derivative
of either for complex tensors (torch/csrc/autograd/VariableTypeUtils.h, `throw_error_for_complex_autograd`).
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.nodes import bound_arguments, call_like

aten = torch.ops.aten


def real_scatters(module: fx.GraphModule) -> None:
    """Replaces complex scatters. The real view has one more dim at the end, so that negative dims change by one."""
    for target in (aten.slice_scatter.default, aten.select_scatter.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            if node.meta["val"].is_complex():
                _scatter_parts(module.graph, node)
    module.recompile()


def _scatter_parts(graph: fx.Graph, node: fx.Node) -> None:
    x, y, dim, *where = bound_arguments(node).values()
    with graph.inserting_before(node):
        parts = [_parts(graph, node, z) for z in (x, y)]
        dim %= node.meta["val"].ndim
        made = call_like(graph, node, node.target, *parts, dim, *where)
        result = call_like(graph, node, aten.view_as_complex.default, made)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _parts(graph: fx.Graph, node: fx.Node, z: fx.Node) -> fx.Node:
    if not z.meta["val"].is_complex():
        z = call_like(graph, node, aten._to_copy.default, z, dtype=node.meta["val"].dtype)
    # A conjugate is a bit of the tensor, which a view as real numbers has no place for.
    resolved = call_like(graph, node, aten.resolve_conj.default, z)
    return call_like(graph, node, aten.view_as_real.default, resolved)
