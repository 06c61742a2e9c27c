"""Clipping over all ranks is clipping in one process, whatever lies where."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import StepError
from autopar.ir import Mesh
from autopar.runtime.parameters.clipping import clip_grad_norm_
from autopar.runtime.ranks.world import World
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make, mean_square
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

NORMS = [2.0, 1.0, 3.0, math.inf]
ONE = World(Mesh((("dp", 1),)), torch.device("cpu"))


class Uneven(nn.Module):
    """No mesh divides its widths, and one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 3), nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).expand(-1, 8) * self.scale


def a_model(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, batch, _ = make("mlp")
    if name == "uneven":
        torch.manual_seed(0)
        model = Uneven().double()
    return model, batch


@captured_once()
def clipped(
    name: str, mesh: dict[str, int], recipe: str | dict[str, str], max_norm: float
) -> list[tuple[float, dict[str, Tensor]]]:
    """The norm and the clipped gradients, for every kind of norm."""
    model, batch = a_model(name)
    made = autopar.compile(model, loss_fn=mean_square, mesh=mesh, recipe=recipe)
    found = []
    for norm_type in NORMS:
        made.zero_grad()
        made.step(*batch)
        assert made._placement.store is not None
        norm = clip_grad_norm_(made.named_parameters(), made._placement.store.world, max_norm, norm_type)
        grads = {
            n: p.grad.full_tensor()  # type: ignore[operator]
            for n, p in made.named_parameters()
            if p.grad is not None
        }
        found.append((norm.item(), grads))
    return found


def expected(name: str, max_norm: float) -> list[tuple[float, dict[str, Tensor]]]:
    """The same by torch in one process."""
    found = []
    for norm_type in NORMS:
        model, (x, y) = a_model(name)
        mean_square(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((norm.item(), grads))
    return found


def differing(found: list[tuple[float, dict[str, Tensor]]], wanted: list[tuple[float, dict[str, Tensor]]]) -> list[str]:
    """Names of the norms and gradients that are not those of one process."""
    names = []
    for (norm, grads), (wanted_norm, wanted_grads) in zip(found, wanted, strict=True):
        if norm != pytest.approx(wanted_norm, rel=1e-12) or list(grads) != list(wanted_grads):
            names.append(f"norm {norm} for {wanted_norm}")
            continue
        for name, grad in grads.items():
            if not torch.allclose(grad, wanted_grads[name], rtol=1e-10, atol=1e-14):
                names.append(name)
    return names


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero3", "tp"])
def test_one_axis(two_ranks: Ranks, recipe: str) -> None:
    cases = [("mlp", 0.1), ("mlp", 1e3), ("uneven", 0.1)]
    for name, max_norm in cases[:2] if recipe == "tp" else cases:  # tp wants widths that divide
        wanted = expected(name, max_norm)
        for found in two_ranks.run(clipped, name, {"dp": 2}, recipe, max_norm):
            assert not differing(found, wanted)


@pytest.mark.parametrize("recipe", [{"dp": "zero3", "tp": "tp"}, {"dp": "ddp", "tp": "zero1"}], ids=str)
def test_two_axes(four_ranks: Ranks, recipe: dict[str, str]) -> None:
    wanted = expected("mlp", 0.1)
    for found in four_ranks.run(clipped, "mlp", {"dp": 2, "tp": 2}, recipe, 0.1):
        assert not differing(found, wanted)


def staged(norm_type: float) -> list[float]:
    """Rank 0 has gradients 3 and 4, and rank 1 has 12 and another copy of that 4."""
    own = {0: {"a": [3.0], "tied": [4.0]}, 1: {"b": [12.0], "tied": [4.0]}}[dist.get_rank()]
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in own}
    for name, value in own.items():
        parameters[name].grad = torch.tensor(value)
    elsewhere = {"tied"} if dist.get_rank() == 1 else set()
    norm = clip_grad_norm_(
        parameters.items(), ONE, 1.0, norm_type, stages=dist.group.WORLD, counted_elsewhere=elsewhere
    )
    return [norm.item(), *(p.grad.item() for p in parameters.values())]  # type: ignore[union-attr]


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (1.0, 19.0), (math.inf, 12.0)])
def test_stages(two_ranks: Ranks, norm_type: float, norm: float) -> None:
    """3² + 4² + 12² = 13², 3 + 4 + 12 = 19: the tied gradient is counted once and clipped twice."""
    first, second = two_ranks.run(staged, norm_type)
    assert first == pytest.approx([norm, 3 / norm, 4 / norm], rel=1e-6)
    assert second == pytest.approx([norm, 12 / norm, 4 / norm], rel=1e-6)


def with_nan(norm_type: float) -> float:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.nan if dist.get_rank() == 1 else 1.0])
    stages = dist.group.WORLD
    return clip_grad_norm_([("p", parameter)], ONE, 1.0, norm_type, stages=stages).item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_of_one_rank_is_everyones(two_ranks: Ranks, norm_type: float) -> None:
    assert all(math.isnan(found) for found in two_ranks.run(with_nan, norm_type))


def test_no_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([("p", parameter)], ONE, 1.0, math.inf).item() == 0


def test_what_is_no_norm_is_named() -> None:
    with pytest.raises(StepError, match="norm_type is 0; a p-norm has p above 0"):
        clip_grad_norm_([], ONE, 1.0, 0)
