"""What the two halves of a backward take, op by op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.ir import Graph
from autopar.pipeline.split_seconds import SplitSeconds
from autopar.planning.planning import prepare_step
from tests.search.toy import TOY

HOST_SECONDS = 0.05e-3


class Halved(nn.Module):
    """A norm and three products, of which the first has a frozen weight and the last a masked one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm, self.frozen, self.out = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.pruned = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("mask", torch.ones(4, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.out(torch.relu(self.frozen(self.norm(self.embedding(tokens)))))
        return (x @ (self.pruned * self.mask)).sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return prepare_step(Halved(), (torch.zeros(2, 3, dtype=torch.int64),)).analysis.graph


def halves(graph: Graph, parameter: str, seconds: float) -> tuple[float, float]:
    """Milliseconds in the second half, and beyond a whole backward, of the op that uses a parameter."""
    name = graph.parameters[parameter]
    op = next(op for op in graph.ops if name in op.operands)
    item = WorkItem(op.kind, op.kind, COMPUTE, "backward", "layers", 1, seconds, 0, of=op.name)
    split = SplitSeconds(graph, replace(TOY, host_seconds=HOST_SECONDS)).halves(item)
    return 1e3 * split.second_seconds, 1e3 * split.extra_seconds


def test_a_product_divides_and_a_norm_runs_twice(graph: Graph) -> None:
    """The example of docs/pipeline.md; the walk takes 0.4 x 0.05 ms for each."""
    assert halves(graph, "out.weight", 10e-3) == pytest.approx((5.0, 0.02))
    assert halves(graph, "norm.weight", 1e-3) == pytest.approx((1.0, 1.02))


def test_what_only_parameters_need_waits_and_what_they_do_not_need_runs_once(graph: Graph) -> None:
    assert halves(graph, "embedding.weight", 1e-3) == pytest.approx((1.0, 0.02))
    assert halves(graph, "frozen.weight", 1e-3) == pytest.approx((0.0, 0.02))


def test_a_masked_weight_waits_and_its_product_divides(graph: Graph) -> None:
    split = SplitSeconds(graph, TOY)
    assert halves(graph, "pruned", 1e-3) == pytest.approx((1.0, 0.02))
    product = next(op for op in graph.ops if "matmul" in op.kind or "mm" in op.kind)
    assert split.runs_in_both(product)


def test_small_products_take_what_the_host_takes(graph: Graph) -> None:
    """A kernel for the first half, four for the second, and 0.4 for the walk, in place of one."""
    assert halves(graph, "out.weight", 1e-6) == pytest.approx((4 * 0.05, (1 + 4 + 0.4 - 1) * 0.05))


def test_a_message_of_activations_belongs_to_the_first_half(graph: Graph) -> None:
    item = WorkItem("all_reduce", "all_reduce", "tp", "backward", "layers", 1, 1.0, 8, of=graph.ops[0].name)
    split = SplitSeconds(graph, TOY)
    assert split.halves(replace(item, carries="activation")) == (0.0, 0.0)
    assert split.halves(replace(item, carries="gradient")) == (1.0, 0.0)
