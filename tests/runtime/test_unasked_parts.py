"""A batch that does not fit whole is cut into micro-batches that nobody asked for, where that changes no result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.runtime.ranks import Ranks
from tests.runtime.training import DP, difference, full_state
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


class Long(nn.Module):
    """Few parameters, and activations of many positions; labels below 0 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.head = nn.Linear(8, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.map(x).sigmoid()).flatten(0, 1), y.flatten(), ignore_index=-1
        )


class Counting(Long):
    """A count of steps, which every micro-batch would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().forward(x, y)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 256, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(-1, 5, (16, 256), generator=generator)


def _made(model: nn.Module, **options: Any) -> autopar.CompiledModule:
    given: dict[str, Any] = {"mesh": DP, "recipe": "ddp", "recompute": "none", **options}
    return autopar.compile(model, example_inputs=_batch(), headroom=0.0, **given)


@captured_once()
def trained(kind: type[Long]) -> tuple[int, float, float] | str:
    """Micro-batches under a bound that fits half of a batch, and distances of loss and parameters from one process."""
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    bound = int(_made(copy.deepcopy(model), micro_batches=2).explain().memory_bytes)
    try:
        made = _made(model, memory_bytes=bound)
    except autopar.SearchError as error:
        return str(error)
    loss = made.step(*_batch())
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    expected = plain(*_batch())
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    far = difference(full_state(made), dict(plain.state_dict()))
    return made.plan.micro_batches, abs(loss.item() - expected.item()), far


def test_results_are_those_of_one_process(two_ranks: Ranks) -> None:
    for found in two_ranks.run(trained, Long):
        assert not isinstance(found, str), found
        count, loss_far, far = found
        assert count == 2 and loss_far < 1e-12 and far < 1e-12


def test_a_buffer_is_changed_once_or_nothing_fits(two_ranks: Ranks) -> None:
    for found in two_ranks.run(trained, Counting):
        assert isinstance(found, str) and "fits into" in found
