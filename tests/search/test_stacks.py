"""A captured layer that stands for many: the plan and the price of the whole model from three layers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autopar.cost_model import H100
from autopar.ir import Graph, Plan, Stack
from autopar.ir.recompute import Recompute
from autopar.pipeline.composed import composed, cost_of
from autopar.planning.planning import prepare_step
from autopar.search import search, search_with_cost
from tests.support.llama import Llama

MESH = {"dp": 2, "tp": 2}


@functools.cache
def graph_of(layers: int, vocab: int = 64) -> Graph:
    with torch.device("meta"):
        model = Llama(vocab=vocab, width=32, inner=64, heads=4, kv_heads=2, layers=layers)
        tokens = torch.zeros(4, 16, dtype=torch.int64)
    return prepare_step(model, (tokens, tokens)).analysis.graph


@pytest.mark.parametrize("recipe", [pytest.param("dp:ddp,tp:tp", marks=pytest.mark.slow), "dp:zero3,tp:tp+sp", "auto"])
def test_three_layers_price_like_seven(recipe: str) -> None:
    whole = search_with_cost(graph_of(7), MESH, hardware=H100, recipe=recipe)
    short = replace(graph_of(3), stacks=(Stack("layers", 7, 3),))
    found = search_with_cost(short, MESH, hardware=H100, recipe=recipe)
    assert found.cost.seconds == pytest.approx(whole.cost.seconds, rel=1e-9)
    assert found.cost.memory_bytes == whole.cost.memory_bytes
    assert found.plan.ops[short.ops[30].name] == whole.plan.ops[short.ops[30].name]


@functools.cache
def planned(layers: int, vocab: int) -> tuple[Graph, Plan]:
    """Seven layers, or three that stand for them."""
    graph = graph_of(layers, vocab)
    graph = graph if layers == 7 else replace(graph, stacks=(Stack("layers", 7, layers),))
    return graph, search(graph, MESH, hardware=H100, recipe="dp:ddp,tp:tp")


@pytest.mark.parametrize("recompute", ["none", 3, "full"])
@pytest.mark.parametrize("vocab", [64, 8192])
def test_three_layers_recompute_like_seven(recompute: Recompute, vocab: int) -> None:
    """A layer that runs again is the peak of a small vocabulary; of a large one the loss is, which is over by then."""
    peaks = []
    for graph, plan in (planned(7, vocab), planned(3, vocab)):
        peaks.append(composed(graph, replace(plan, recompute=recompute), H100).peak_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-9)


def test_a_stack_that_leaves_nothing_out_changes_nothing() -> None:
    graph = graph_of(3)
    plan = search_with_cost(graph, MESH, hardware=H100).plan
    noted = replace(graph, stacks=(Stack("layers", 3, 3),))
    assert cost_of(noted, plan, H100) == cost_of(graph, plan, H100)


def test_a_parameter_knows_its_layer() -> None:
    stack = Stack("layers", 7, 3)
    assert stack.index("layers.2.mlp.up.weight") == 2
    assert stack.index("layers.norm.weight") is None
    assert stack.index("decoder.layers.2") is None
    assert stack.middle == 1
