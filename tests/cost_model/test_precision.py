"""Prices of a mixed-precision policy: what is gathered, reduced and held, each in its own format."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autopar.cost_model import Sizes, conversion_seconds, find_hardware, parameter_bytes
from autopar.cost_model.items import FULL, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.pricer import Pricer
from autopar.ir import Mesh, MixedPrecision, ParameterPlan, R, S, Tensor, V
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request.request import Request
from tests.cost_model.test_price import MACHINE

MESH = Mesh.of({"dp": 4})
# 8 x 32 = 256 elements: 4 bytes at rest, 2 in use, 4 of a gradient
CAST = Tensor("w", ((8,), (32,)), (("a",), ("b",)), 2, True, 4, 4)


@pytest.mark.parametrize(
    ("plan", "parameter", "gradient", "optimizer"),
    [
        (ParameterPlan((R,), (V,)), 4 * 256 + 2 * 256, 4 * 256, 8 * 256),
        (ParameterPlan((S(0),), (V,)), 4 * 64 + 2 * 256, 4 * 256, 8 * 64),
        (ParameterPlan((S(0),), (V,), "micro_batch"), 4 * 64 + 2 * 256, 4 * 64, 8 * 64),
        (ParameterPlan((S(0),), (S(0),)), 4 * 64 + 2 * 64, 4 * 64, 8 * 64),
    ],
    ids=["ddp", "zero1", "zero2", "zero3"],
)
def test_bytes_by_hand(plan: ParameterPlan, parameter: int, gradient: int, optimizer: int) -> None:
    assert parameter_bytes(CAST, plan, Sizes(MESH)) == (parameter, gradient, optimizer)


@pytest.mark.parametrize(
    ("plan", "gradient"),
    [
        (ParameterPlan((R,), (V,)), 4 * 256),  # the sum takes 2 * 256, `.grad` twice that
        (ParameterPlan((S(0),), (V,)), 2 * 256),  # the sum, for `.grad` is of a quarter: 4 * 64
        (ParameterPlan((S(0),), (V,), "micro_batch"), 4 * 64),
        (ParameterPlan((S(0),), (S(0),)), 4 * 64),
    ],
    ids=["ddp", "zero1", "zero2", "zero3"],
)
def test_gradients_end_in_the_format_of_the_optimizer(plan: ParameterPlan, gradient: int) -> None:
    """With `reduce=bf16` gradients are summed in bfloat16, and `.grad` is in float32 all the same."""
    tensor = dataclasses.replace(CAST, gradient_itemsize_bytes=2)
    assert parameter_bytes(tensor, plan, Sizes(MESH)).gradient == gradient


def test_gathers_in_the_format_of_use_and_reductions_in_their_own() -> None:
    def seconds(tensor: Tensor) -> tuple[float, float]:
        return conversion_seconds(tensor, (S(0),), (V,), sizes=Sizes(MESH), hardware=MACHINE)

    plain = dataclasses.replace(CAST, stored_itemsize_bytes=None, gradient_itemsize_bytes=None)
    wide = dataclasses.replace(plain, itemsize_bytes=4)
    assert seconds(CAST) == (seconds(plain)[0], seconds(wide)[1])
    assert seconds(wide)[1] > seconds(plain)[1]


def held(dtype: torch.dtype, policy: MixedPrecision | None, training_state: TrainingState) -> dict[str, float]:
    """Bytes of a rank by kind, of an MLP under ZeRO-1, and of what its gradients' reductions send."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    batch = (torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype))
    prepared = prepare_step(model, batch, loss_fn=nn.functional.mse_loss, precision=policy)
    hardware = find_hardware("cpu-gloo")
    plan = make_plan(prepared, Request(hardware, mesh=MESH, recipe="zero1"))
    pricer = Pricer(
        prepared.analysis.graph,
        plan,
        sizes=Sizes(MESH),
        hardware=hardware,
        links=[hardware.link(MESH, 0)],
        training_state=training_state,
    )
    found: dict[str, float] = {}
    for holding in pricer.holdings():
        found[holding.kind] = found.get(holding.kind, 0) + holding.bytes
    for item in pricer.items():
        if item.phase in ("gather", "reduce"):
            found[item.kind] = found.get(item.kind, 0) + item.traffic_bytes
    return found


def test_casting_float32_holds_what_bfloat16_with_masters_does() -> None:
    cast = held(torch.float32, MixedPrecision("bf16", "fp32"), FULL)
    masters = held(torch.bfloat16, None, MIXED_FLOAT32_GRADIENTS)
    kinds = ("parameters", "gradients", "optimizer")
    assert sum(cast[k] for k in kinds) == sum(masters[k] for k in kinds)
    assert [cast[k] for k in ("all_gather", "reduce_scatter")] == [masters[k] for k in ("all_gather", "reduce_scatter")]
    assert cast["cast"] == (4 + 2) * 552 / 4  # once a step a shard of the 552 elements is read and written
    assert cast["gradients"] == 4 * 552
