"""Shares of a graph's work: of all products, and of all bytes that are sent."""

from __future__ import annotations

import torch
from torch import fx, nn

from autopar.ops.work import shares_of_work

aten, autopar_ops = torch.ops.aten, torch.ops.autopar


def test_collectives_count_three_quarters_of_products() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    whole = graph.call_function(autopar_ops.all_gather.default, (x, [0], 2, "dp", "reduce_scatter"))  # 4 x 4
    first = graph.call_function(aten.mm.default, (whole, w))  # 4 x 8
    second = graph.call_function(aten.mm.default, (x, w))  # 2 x 8
    total = graph.call_function(autopar_ops.all_reduce.default, (second, [], 2, "dp", "vary"))
    graph.output((first, total))
    examples = [((2, 4), torch.float32), ((4, 8), torch.float32)]
    found = shares_of_work(fx.GraphModule(nn.Module(), graph), examples, torch.device("cpu"))
    assert (found[first], found[second]) == (2 / 3, 1 / 3)
    assert (found[whole], found[total]) == (0.75 / 2, 0.75 / 2)  # 16 numbers each
