"""The price of a mixture of experts: its grouped products at the rate of their format and shape, and what it moves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cost_model import H100, Sizes, find_cluster
from autopar.cost_model.compute import OpPrice, backward_passes, is_product
from autopar.cost_model.machines.software import with_eager_runs
from autopar.explanation.advice import Question
from autopar.ir import Graph, Mesh, Op
from autopar.models.presets import PRESETS
from autopar.planning.planning import prepare_step
from autopar.search.request.request import Request
from tests.support.experts import Integers, routes

ROWS, SLOTS, EXPERTS, WIDTH, INNER = 4096, 2, 4, 256, 1024
MACHINE = replace(H100, matmul_half_size=64)


class Loss(nn.Module):
    """Two grouped products in bfloat16, and what came before them."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.layer = Integers(WIDTH, INNER, EXPERTS).bfloat16()
        self.layer.up.requires_grad_(trains)
        self.layer.down.requires_grad_(trains)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(x, ids).square().mean()


def layer(**options: bool) -> tuple[Graph, Op]:
    batch = torch.randn(ROWS, WIDTH).bfloat16(), routes("even", ROWS)
    graph = prepare_step(Loss(**options), batch).analysis.graph
    (op,) = (op for op in graph.ops if op.kind == "autopar.analysis.experts")
    return graph, op


def product_seconds(rows_of_an_expert: float, experts: float, width: int, columns: int) -> float:
    """A grouped product in bfloat16: its FLOPs at the rate of one expert's product, or what it reads and writes."""
    sides = (rows_of_an_expert, width, columns)
    reached = MACHINE.matmul_efficiency * math.prod(side / (side + 64) for side in sides)
    rows = rows_of_an_expert * experts
    flops = 2 * rows * width * columns
    moved = 2 * (rows * width + experts * width * columns + rows * columns) + 4 * experts
    return max(flops / (MACHINE.flops_per_second(2) * reached), moved_seconds(moved))


def moved_seconds(size_bytes: float) -> float:
    return size_bytes / (MACHINE.memory_bytes_per_second * MACHINE.memory_efficiency)


@pytest.mark.parametrize(
    ("ranks", "label", "experts", "rows"),
    [(1, "t>e", 4, 2048), (2, "t>e", 2, 2048), (4, "t>e", 1, 2048), (2, "t", 4, 1024)],
)
def test_a_layer_is_its_grouped_products_and_what_it_moves(ranks: int, label: str, experts: int, rows: int) -> None:
    """On one rank, under an exchange, and split by rows alone: of 8192 rows each of 4 experts has 2048."""
    graph, op = layer()
    assert is_product(op) and op.flops == 2 * ROWS * SLOTS * WIDTH * INNER * 2
    forward, backward = OpPrice.of(op, (label,), graph.tensors, Sizes(Mesh.of({"ep": ranks})), MACHINE)
    local = experts * rows
    products = product_seconds(rows, experts, WIDTH, INNER) + product_seconds(rows, experts, INNER, WIDTH)
    # ids: sorted, and their order sorted; rows: put in order, and back; between the products: relu.
    others = [3 * 8 * local] * 2 + [2 * 2 * local * WIDTH] * 2 + [2 * 2 * local * INNER]
    assert forward.passes * forward.seconds == pytest.approx(products + sum(map(moved_seconds, others)))
    assert forward.passes * forward.flops == op.flops / ranks
    # Both orders have no backward; each product has one for its rows and one for its weights.
    assert backward.passes * backward.seconds == pytest.approx(2 * products + sum(map(moved_seconds, others[2:])))


def test_frozen_experts_have_one_product_less_in_backward() -> None:
    (graph, op), (frozen, of_frozen) = layer(), layer(trains=False)
    assert (backward_passes(op, graph.tensors), backward_passes(of_frozen, frozen.tensors)) == (2, 1)


CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def test_a_configuration_costs_what_the_preset_of_its_model_does(tmp_path: Path) -> None:
    """The preset's experts have a capacity, the configuration's take all rows; evenly used they do the same work.

    Shares of the router are float32 in the configuration, and so is what its experts return.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = PRESETS["mixtral-8x7b"]
    preset = replace(found, description=replace(found.description, layers=2))
    place = with_eager_runs(find_cluster("h100x8"))
    asked = Request.on(place, batch=64, mesh=Mesh.of({"dp": 8}), recipe="zero3", micro_batches=1)
    models = (preset, str(tmp_path / "config.json"))
    ours, theirs = (Question(model, asked, 4096).answer() for model in models)
    assert theirs.step_seconds == pytest.approx(ours.step_seconds, rel=0.05)
    assert theirs.mfu == pytest.approx(ours.mfu, rel=0.05)
