"""Optimizers over parameters that became DTensors: torch's own update the shards of this rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.parameters.adoption import Adoption
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import compile_mlp
from tests.support.loop import batches, mlp
from tests.support.odd.odd_objects import OBJECTS
from tests.support.scripts import by_compile, outcome
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


class _Writes(TorchDispatchMode):
    """Counts ops that write into DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.is_mutable and isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["ddp", "zero2", "zero3", "tp", "parameter-server"])
def test_a_step_of_adamw_writes_no_dtensor(two_ranks: Ranks, recipe: str) -> None:
    assert two_ranks.run(_writes, recipe) == [0, 0]


@captured_once()
def _writes(recipe: str) -> int:
    model, batch = compile_mlp(recipe)
    optimizer = torch.optim.AdamW(model.parameters())  # before the parameters are placed
    with _Writes() as writes:
        for _ in range(2):
            model.step(*batch)
            optimizer.step()
    states = [x for each in optimizer.state.values() for x in each.values() if x.ndim]
    assert states and all(isinstance(x, DTensor) for x in states)
    return writes.count


@pytest.mark.parametrize("recipe", ["zero3", "parameter-server"])
def test_a_deep_copy_of_a_layer_takes_its_place(two_ranks: Ranks, recipe: str) -> None:
    plain, script = outcome(OBJECTS["copy of a layer"]), OBJECTS["copy of a layer"]
    for losses, _ in two_ranks.run(outcome, script, by_compile, {"mesh": {"dp": 2}, "recipe": recipe}):
        assert losses == pytest.approx(plain[0], rel=1e-9)


USES = {
    "penalty": lambda p: p.abs().sum(),
    "distance": lambda p: ((p - torch.zeros(p.shape, dtype=p.dtype)) ** 2).sum(),
}


@captured_once()
def penalized(way: str, use: str, *, prepares: bool) -> str:
    """The error of a use of weights that comes before the first call; "" where there is none."""
    model: Any = autopar.compile(
        mlp(6, 8, 3).double(), **{"zero3": {"recipe": "zero3"}, "pp": {"mesh": {"pp": 2}}}[way]
    )
    (x, y), *_ = batches(1)
    if prepares:
        model.prepare(x)
    held = [USES[use](p) for p in model.parameters()]
    penalty = sum(held)
    try:
        (nn.functional.mse_loss(model(x), y) + penalty).backward()
    except autopar.StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "use", "words"),
    [
        ("zero3", "penalty", "0.weight has a view, or is in a graph of autograd, as of a penalty of weights"),
        ("pp", "distance", "2.bias was used under autograd, as in a penalty of weights before"),
    ],
)
def test_weights_used_before_the_plan_are_refused_on_all_ranks_with_a_remedy(
    two_ranks: Ranks, way: str, use: str, words: str
) -> None:
    for message in two_ranks.run(functools.partial(penalized, prepares=False), way, use):
        assert words in message and "model.prepare(*inputs)" in message
    assert two_ranks.run(functools.partial(penalized, prepares=True), way, use) == ["", ""]


@captured_once()
def assigned_again(recipe: str) -> tuple[list[float], list[float]]:
    """Losses of steps, after each of which parameters are assigned one kept copy, in shards and plainly."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model: Any = mlp(6, 8, 3).double()
        model = autopar.compile(model, recipe=recipe, mesh={"dp": 2}) if compiles else model
        optimizer, kept, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor](), []
        for x, y in batches(4):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = kept or [p.data.clone() for p in model.parameters()]
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data = value
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_an_assigned_copy_is_the_parameter_from_then_on(two_ranks: Ranks, recipe: str) -> None:
    """The optimizer moves it, so that it takes nothing back when it is assigned again."""
    for losses, plain in two_ranks.run(assigned_again, recipe):
        assert losses == pytest.approx(plain, rel=1e-9)


@captured_once()
def filled(recipe: str) -> tuple[list[Tensor], list[Tensor]]:
    """What `nn.init` and noise make of a model in shards and of a plain one, from one seed."""
    made, batch = compile_mlp(recipe)
    made.step(*batch)
    plain = make("mlp")[0]
    for model in (made, plain):
        torch.manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                nn.init.uniform_(p).add_(torch.randn_like(p))
    return [p.detach().full_tensor() for p in made.parameters()], [p.detach() for p in plain.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_one_seed_fills_shards_as_one_device_fills_the_whole(two_ranks: Ranks, recipe: str) -> None:
    for found, expected in two_ranks.run(filled, recipe):
        assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


def test_a_model_may_be_freed_in_the_middle_of_a_step() -> None:
    """What a freed model leaves must not change the hooks over which torch iterates."""
    others: list[Adoption] = []
    stopping = register_optimizer_step_pre_hook(lambda *_: others.pop().stop())
    others += [Adoption(), Adoption()]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    try:
        optimizer.step()
        optimizer.step()
    finally:
        stopping.remove()
    assert not others
