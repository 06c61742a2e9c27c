"""`autopar.explain`: a plan and its cost from a module, without devices or weights."""

from __future__ import annotations

import pytest
import torch

import autopar
from tests.support.llama import Llama


def test_a_model_on_the_meta_device_is_explained() -> None:
    with torch.device("meta"):
        model = Llama(vocab=512, width=64, inner=128, heads=8, kv_heads=4, layers=2)
        tokens = torch.zeros(8, 32, dtype=torch.int64)
    e = autopar.explain(
        model, (tokens, tokens), mesh={"dp": 4, "tp": 2}, cluster="h100x8", recipe="dp:zero1,tp:tp", micro_batches=2
    )
    assert e.plan.micro_batches == 2
    assert e.step_seconds > 0
    assert e.fits
    assert {part.name for part in e.traffic.parts} == {"along dp", "along tp"}
    assert e.what_if(link_bandwidth=2).step_seconds < e.step_seconds
    assert "mlp.up.weight" in str(e)
    (product,) = (line for line in str(e).splitlines() if "mlp.up" in line and "linear" in line)
    assert "S(0)@dp S(2)@tp" in product and product.rstrip().endswith("s")  # its result's layout, and seconds


def test_an_unknown_cluster_is_named_with_the_nearest() -> None:
    with pytest.raises(autopar.AutoparError, match="h100"):
        autopar.explain(
            torch.nn.Linear(4, 4), torch.zeros(4, 4), mesh={"dp": 2}, cluster="h1000x8", loss_fn=lambda y: y.sum()
        )


def test_ranks_that_fill_a_part_of_a_node_are_named_as_such() -> None:
    model, batch = torch.nn.Linear(4, 4), torch.zeros(4, 4)
    e = autopar.explain(model, batch, mesh={"dp": 2}, cluster="cpu-gloo", loss_fn=lambda y: y.sum())
    assert "predicted on cpu-gloox2x1" in str(e) and e.cluster.ranks == 64
    assert e.to_json()["cluster"] == {"name": "cpu-gloox2x1", "ranks": 2}
