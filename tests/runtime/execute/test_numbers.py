"""Numbers of Python that change between steps, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import StepError
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess

PLANS: list[tuple[dict[str, int], str, int]] = [({"dp": 2}, "zero3", 2), ({"dp": 2}, "ddp", 1), ({"pp": 2}, "1f1b", 2)]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.beta
        return x * (1 - self.beta / 2)


def losses(model: Any, step: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(4):
        batch = [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
        model.beta = 0.8**number
        optimizer.zero_grad()
        found.append(step(*batch).item())
        optimizer.step()
    return found


def plain() -> list[float]:
    model = Annealed()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return losses(model, step)


def compiled(mesh: dict[str, int], recipe: str, micro_batches: int) -> tuple[list[float], int]:
    model = autopar.compile(Annealed(), loss_fn=F.mse_loss, mesh=mesh, recipe=recipe, micro_batches=micro_batches)
    found = losses(model, model.step)
    return found, len(model._kept.ready[True])


@pytest.mark.parametrize(("mesh", "recipe", "micro_batches"), PLANS)
def test_an_annealed_number_takes_two_programs_on_all_ranks(
    two_ranks: Ranks, mesh: dict[str, int], recipe: str, micro_batches: int
) -> None:
    expected = plain()
    for found, programs in two_ranks.run(compiled, mesh, recipe, micro_batches):
        assert found == pytest.approx(expected, rel=1e-12)
        assert programs == 2


def refused(numbers: list[list[float]]) -> str:
    """What a step says whose ranks were given such numbers, one list for each rank."""
    model = autopar.compile(Annealed(), loss_fn=F.mse_loss, mesh={"dp": 2}, recipe="ddp")
    batch = torch.ones(4, 8, dtype=torch.float64), torch.ones(4, 8, dtype=torch.float64)
    try:
        for beta in [1.0, *numbers[dist.get_rank()]]:
            model.beta = beta
            model.step(*batch)
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("numbers", [[[0.5], [0.25]], [[0.5, 0.4], [0.5, 0.3]]])
def test_ranks_with_other_numbers_are_refused(two_ranks: Ranks, numbers: list[list[float]]) -> None:
    """At the capture that makes it an input, and at any step after it."""
    first, second = (each[-1] for each in numbers)
    for found in two_ranks.run(refused, numbers):
        assert "Python values of the model differ between ranks" in found
        assert f"model.beta = {first}; model.beta = {second}" in found
