"""Slices have one form, and those of all of a dim are gone where only ATen ops read them."""

import torch
from torch import fx

from autopar.passes.cleanup.plain_slices import plain_slices

aten = torch.ops.aten


def test_slices_have_one_form():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6)
    calls = [(x,), (x, 1, None, 3), (x, 1, 0, 9, 1), (x, 1, 2, None, 1), (x, 1, 0, 6, 2)]
    sines = [graph.call_function(aten.sin.default, (graph.call_function(aten.slice.Tensor, c),)) for c in calls]
    whole = graph.call_function(aten.slice.Tensor, (x, 0, 0, 4))
    graph.output((*sines, whole))
    module = fx.GraphModule({}, graph)
    plain_slices(module)
    found = {n.name: n.args[1:] for n in graph.find_nodes(op="call_function", target=aten.slice.Tensor)}
    assert found == {
        "slice_tensor_1": (1, 0, 3),
        "slice_tensor_3": (1, 2, 2**63 - 1),
        "slice_tensor_4": (1, 0, 6, 2),
        "slice_tensor_5": (0, 0, 4),
    }
    assert sines[0].args == sines[2].args == (x,)
