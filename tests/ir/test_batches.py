"""A graph at another batch is what a capture at that batch gives."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import SearchError
from autopar.ir import Graph
from autopar.ir.batches import captured_batch, fits_graph, with_batch
from autopar.models import Transformer, build, example_inputs
from autopar.planning.planning import prepare_step
from autopar.search import search
from tests.search.graphs import Builder
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

SMALL = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 32, "max_positions": 8}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_is_what_a_capture_gives(family: str) -> None:
    description = Transformer.from_dimensions(family, **SMALL)

    def captured(batch: int) -> Graph:
        with torch.device("meta"):
            model = build(description)
        return prepare_step(model, example_inputs(description, batch, 8)).analysis.graph

    eight = captured(8)
    assert captured_batch(eight) == 8
    assert with_batch(eight, 8) is eight
    assert with_batch(eight, 4) == captured(4)


def test_a_plan_fits_as_long_as_there_is_a_batch_to_split() -> None:
    graph = residual(2, Sizes(batch=8))
    plan = search(graph, {"dp": 4}, hardware=TOY, recipe="ddp")
    assert fits_graph(plan, with_batch(graph, 6)) and fits_graph(plan, with_batch(graph, 2))
    assert not fits_graph(plan, with_batch(graph, 1))


def test_refuses_a_graph_without_a_batch() -> None:
    b = Builder({"s": 4})
    b.output(b.op("relu", "s -> s", [b.input("x", "s")]))
    with pytest.raises(SearchError, match=r"give micro_batches=\.\.\."):
        with_batch(b.graph(), 2)
