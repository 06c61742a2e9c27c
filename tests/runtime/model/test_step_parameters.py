"""Parameters that take no part in a step, the model that was compiled, and its hooks."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

import autopar
from autopar.errors import CaptureError
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import make, mean_square
from tests.runtime.training import DP, compile_mlp, difference, full_state, train
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- parameters that take no part


class Partly(nn.Module):
    """One layer is frozen, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.used(self.frozen(x))))


@captured_once()
def partly(recipe: str) -> tuple[dict[str, Any], dict[str, bool]]:
    torch.manual_seed(0)
    model = Partly().double()
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, micro_batches=2)
    found = train(made, made.step, make("mlp")[1])
    made.step(*make("mlp")[1])
    return found, {name: p.grad is None for name, p in made.named_parameters()}


@pytest.mark.parametrize("recipe", often(["zero1", "zero2", "zero3"], ["zero2", "zero3"]))
def test_frozen_and_unused_parameters_get_no_gradient(two_ranks: Ranks, recipe: str) -> None:
    torch.manual_seed(0)
    reference = Partly().double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_square(reference(x), y)
        loss.backward()
        return loss.detach()

    expected = train(reference, step, make("mlp")[1])
    for found, without in two_ranks.run(partly, recipe):
        assert difference(found, expected) < 1e-9
        assert without == {name: not name.startswith("used") for name in without}


@captured_once()
def unfrozen(recipe: str, local: bool) -> list[list[bool]]:
    """Whether gradients are right with a weight frozen, then free, then frozen again."""
    (model, (x, y), _), (reference, _, _) = make("mlp"), make("mlp")
    model.up.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, micro_batches=2)
    found = []
    for free in (False, True, False):
        for each in (made, reference):
            each.up.weight.requires_grad_(free)
            each.zero_grad()
        mean_square(reference(x), y).backward()
        part = dist.get_rank() if local and free else None  # the first call tells the global shape
        made.step(*(b if part is None else b.chunk(2)[part] for b in (x, y)))
        found.append([same_gradient(p, made.get_parameter(n)) for n, p in reference.named_parameters()])
    return found


def same_gradient(expected: Tensor, found: Tensor) -> bool:
    if expected.grad is None or found.grad is None:
        return expected.grad is found.grad
    return torch.allclose(found.grad.full_tensor(), expected.grad, rtol=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("recipe", "local"),
    often(
        [
            *itertools.product(("ddp", "zero1", "zero2", "zero3"), (False, True)),
            ("tp", False),  # where every rank takes the whole batch
        ],
        {("ddp", False), ("zero1", True), ("zero2", False), ("zero3", True), ("tp", False)},
    ),
)
def test_parameters_freeze_and_unfreeze(two_ranks: Ranks, recipe: str, local: bool) -> None:
    assert all(all(step) for found in two_ranks.run(unfrozen, recipe, local) for step in found)


# --- the model itself


@captured_once()
def called_itself(recipe: str) -> tuple[str, bool]:
    """What is said where the original module is called, and whether what computes goes on computing."""
    made, batch = compile_mlp(recipe)
    x = batch[0]
    made.step(*batch)
    replicated = made.original(DTensor.from_local(x, made._settings.device_mesh)).full_tensor()
    with pytest.raises(autopar.StepError) as error:
        made.original(x)
    swapped = torch.func.functional_call(made.original, full_state(made), (x,))
    with implicit_replication():
        mixed = made.original(x).full_tensor()
    works = all(torch.allclose(each, replicated) for each in (swapped, mixed))
    return str(error.value), works


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_the_model_itself_says_why_it_cannot_be_called(two_ranks: Ranks, recipe: str) -> None:
    message, works = equal_on_all(two_ranks.run(called_itself, recipe))
    assert message.startswith("The MLP that was compiled was called directly, with plain tensors")
    assert "Call the compiled module, or its step." in message and works


# --- hooks


def hooked(early: bool) -> str:
    """What a step of a model with hooks raises, which are made before `compile` or after."""
    model, batch, _ = make("mlp")
    if not early:
        model = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="zero3")
    model.up.weight.register_hook(lambda grad: grad)  # type: ignore[union-attr, operator]
    model.up.bias.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr, operator]
    model.down.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    if early:
        model = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="zero3")
    assert isinstance(model, autopar.CompiledModule)
    with pytest.raises(CaptureError) as caught:
        model.step(*batch)
    return str(caught.value)


@pytest.mark.parametrize("early", [True, False])
def test_backward_hooks_are_refused_by_owner_and_line(two_ranks: Ranks, early: bool) -> None:
    message = equal_on_all(two_ranks.run(hooked, early))
    line = rf"\({re.escape(__file__)}:\d+\)"
    owners = ["parameter 'up.weight'", "parameter 'up.bias'", "module 'down'"]
    assert re.search(", ".join(f"{owner} {line}" for owner in owners), message)
    assert "between `step` and the optimizer's" in message
