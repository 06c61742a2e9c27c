"""States of plain optimizers, loaded where parameters are shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.checkpoint import load_optimizer_state
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import MLP, mean_square

X, Y = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make() -> nn.Module:
    torch.manual_seed(0)
    return MLP().double()


def adamw(model: nn.Module, lr: float, *, names: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters() if names else model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        if isinstance(model, autopar.CompiledModule):
            loss = model.step(X, Y)
        else:
            loss = mean_square(model(X), Y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def before(*, names: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model and optimizer after three steps."""
    model = make()
    optimizer = adamw(model, 1e-2, names=names)
    train(model, optimizer, 3)
    return model, optimizer


def go_on(mesh: dict[str, int], recipe: Any, names: bool) -> list[float]:
    """Losses of three further steps by a plan, from what one device left."""
    model, optimizer = before(names=names)
    made = autopar.compile(make(), loss_fn=mean_square, mesh=mesh, recipe=recipe, example_inputs=(X, Y))
    made.load_state_dict(model.state_dict())
    other = adamw(made, 0.5)  # whose learning rate the state replaces
    load_optimizer_state(made, other, optimizer.state_dict())
    return train(made, other, 3)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh, recipe, names",
    [
        ({"dp": 2}, "zero3", False),
        ({"dp": 2}, "zero1", True),
        ({"tp": 2}, "tp", False),
        ({"pp": 2}, {"pp": "gpipe"}, True),
    ],
    ids=["zero3", "zero1", "tp", "stages"],
)
def test_training_goes_on_from_a_plain_state(two_ranks: Ranks, mesh: dict[str, int], recipe: Any, names: bool) -> None:
    expected = train(*before(names=names), 3)
    for losses in two_ranks.run(go_on, mesh, recipe, names):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_other_groups_are_refused() -> None:
    _, optimizer = before(names=False)
    model = make()
    with pytest.raises(AutoparError, match=r"groups of \[4\].*groups of \[2\]"):
        fewer = torch.optim.AdamW([model.get_parameter("up.weight"), model.get_parameter("up.bias")])
        load_optimizer_state(model, fewer, optimizer.state_dict())


def test_another_model_is_refused() -> None:
    _, optimizer = before(names=False)
    wider = MLP(6).double()
    with pytest.raises(AutoparError, match=r"exp_avg of up.weight has shape \[32, 8\].*\[24, 6\]"):
        load_optimizer_state(wider, adamw(wider, 0.1), optimizer.state_dict())


def test_names_of_a_wrapper_are_refused() -> None:
    model = make()
    wrapped = nn.ModuleDict({"module": model})
    state = adamw(wrapped, 1e-2, names=True)
    mean_square(model(X), Y).backward()
    state.step()
    with pytest.raises(AutoparError, match=r"has module.down.bias.* but no parameter here"):
        load_optimizer_state(model, adamw(model, 0.1), state.state_dict())
