"""Inputs that require a gradient get that of one process, where the loss is outside of the model, on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.support.loop import batches, mlp, whole
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"recipe": "ddp"},
    "zero3": {"recipe": "zero3"},
    "tp": {"recipe": "tp"},
    "dtensor": {"recipe": "ddp", "outputs": "dtensor"},
    "pp": {"mesh": {"pp": 2}},
}


def gradients(judge: nn.Module, maker: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradients of an input of one model that feeds another, and of the first model's parameters."""
    x = x.clone().requires_grad_()
    F.mse_loss(whole_of(judge(maker(x))), y).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in maker.parameters() if p.grad is not None)]


def whole_of(x: Tensor) -> Tensor:
    """A DTensor whole, differentiably; a tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((whole(a) - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return mlp(6, 8, 3).double(), mlp(6, 8, 6).double()


@captured_once()
def distance(way: str, rows: int) -> float:
    (x, y), *_ = batches(1, rows)
    found = gradients(*(autopar.compile(each, **WAYS[way]) for each in models()), x, y)
    expected = gradients(*models(), x, y)
    return apart(found[:1], expected[:1]) if way == "pp" else apart(found, expected)


@pytest.mark.parametrize(("way", "rows"), [("ddp", 7), ("zero3", 8), ("tp", 8), ("dtensor", 8), ("pp", 8)])
def test_a_model_gives_its_inputs_the_gradients_of_one_process(two_ranks: Ranks, way: str, rows: int) -> None:
    assert max(two_ranks.run(distance, way, rows)) < 1e-14


@captured_once()
def distance_behind_frozen_layers(way: str) -> float:
    """As in SAC: a critic learns, and is frozen while its input learns from it."""
    (x, y), *_ = batches(1)
    found = []
    for judge, maker in (tuple(autopar.compile(each, **WAYS[way]) for each in models()), models()):
        judge(x)
        judge.requires_grad_(False)
        found.append(gradients(judge, maker, x, y))
    return apart(*found)


@pytest.mark.parametrize("way", ["zero3", "pp"])
def test_a_frozen_model_gives_its_inputs_the_gradients_of_one_process(two_ranks: Ranks, way: str) -> None:
    assert max(two_ranks.run(distance_behind_frozen_layers, way)) < 1e-14


@captured_once()
def distance_of_parts() -> float:
    """With rows of its own a rank's input has the gradient of its own loss, and the generator that of the mean."""
    rank, ((x, y), *_) = dist.get_rank(), batches(1)
    own = slice(4 * rank, 4 * rank + 4)
    options: dict[str, Any] = {"batch": "local", "recipe": "ddp"}
    found = gradients(*(autopar.compile(each, **options) for each in models()), x[own], y[own])
    first, *others = gradients(*models(), x, y)
    return apart(found, [2 * first[own], *others])


def test_rows_of_a_rank_get_the_gradient_of_its_own_loss(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(distance_of_parts)) < 1e-14


@captured_once()
def penalized(way: str) -> tuple[float, str]:
    """The distance of gradients of a gradient penalty from those of one process; what is refused."""
    (x, _), *_ = batches(1)
    found = []
    for judge in (autopar.compile(copy.deepcopy(models()[0]), **WAYS[way]), models()[0]):
        given = x.clone().requires_grad_()
        try:
            (slope,) = torch.autograd.grad(judge(given).sum(), given, create_graph=True)
        except autopar.StepError as error:
            return 0.0, str(error)
        (slope.norm(2, dim=1) - 1).pow(2).mean().backward()
        found.append([p.grad for p in judge.parameters() if p.grad is not None])
    return apart(*found), ""  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["zero3", "tp", "pp"])
def test_a_gradient_penalty_is_that_of_one_process_or_refused_through_stages(two_ranks: Ranks, way: str) -> None:
    off, refused = equal_on_all(two_ranks.run(penalized, way))
    assert off < 1e-14 and ("create_graph=True" in refused) == (way == "pp")


@captured_once()
def read_through_stages() -> float:
    """The distance of a loss of DTensors through stages, which all ranks have, from that of one process."""
    (x, _), *_ = batches(1)
    made = autopar.compile(models()[0], mesh={"pp": 2}, outputs="dtensor")
    return abs(made(x).square().mean().item() - models()[0](x).square().mean().item())


def test_a_number_of_results_through_stages_is_not_one_stages(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(read_through_stages)) < 1e-14
