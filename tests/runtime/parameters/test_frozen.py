"""Frozen parameters have no gradient and no optimizer state, and are priced with none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost_model.memory import parameter_bytes
from autopar.cost_model.sizes import Sizes
from autopar.planning.planning import prepare_step
from tests.runtime.execute.test_extras import batch
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.model.test_own_backward import Losing
from tests.support.staged import captured_once

FROZEN = ("table.weight", "first.weight", "first.bias")  # the first stage of two, and more of it


def freeze(model: nn.Module, frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN or not frozen)


def steps(model: nn.Module, flags: tuple[bool, ...]) -> tuple[list[dict[str, Any]], set[str]]:
    """Loss and gradients of steps with the first layers frozen or not; the parameters with optimizer states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for frozen in flags:
        freeze(model, frozen)
        optimizer.zero_grad()
        if isinstance(model, autopar.CompiledModule):
            loss = model.step(*batch())
        else:
            loss = model(*batch())
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **{n: whole(g) for n, g in gradients.items()}})
        optimizer.step()
    return found, {n for n, p in model.named_parameters() if p in optimizer.state}


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


@captured_once()
def on_a_rank(options: dict[str, Any], flags: tuple[bool, ...]) -> Any:
    """The same on this rank, and the names of the parameters that it holds."""
    model = Losing()
    freeze(model, flags[0])
    made = autopar.compile(model, **options)
    found, states = steps(made, flags)
    return found, states, {name for name, _ in made.named_parameters()}


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, {"micro_batches": 4}),
    "ddp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "zero2, accumulation": (2, {"mesh": {"dp": 2}, "recipe": "zero2", "micro_batches": 4}),
    "zero3": (2, {"mesh": {"dp": 2}, "recipe": "zero3"}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "pp": (2, {"mesh": {"pp": 2}, "micro_batches": 4}),
    "pp, zb": (2, {"mesh": {"pp": 2}, "micro_batches": 4, "schedule": "zb"}),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp"}}),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_have_no_gradient_and_no_state(way: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    count, options = WAYS[way]
    # What is unfrozen after the first step is trained from then on, and what is frozen again is not.
    flags = (True, False, True)
    plain = Losing()
    freeze(plain, True)
    expected, expected_states = steps(plain, flags)
    ranks = {2: two_ranks, 4: four_ranks}
    results = ranks[count].run(on_a_rank, options, flags) if count > 1 else [on_a_rank(options, flags)]
    for found, states, held in results:
        assert states == expected_states & held
        for own, other in zip(found, expected, strict=True):
            assert own.keys() == other.keys() & {"loss", *held}
            assert max((own[name] - other[name]).abs().max().item() for name in own) < 1e-12


def test_frozen_parameters_are_priced_without_gradient_and_states() -> None:
    model, captured = Losing(), Losing()
    for each in (model, captured):
        freeze(each, True)
    graph = prepare_step(captured, batch()).analysis.graph
    plan = autopar.compile(model, example_inputs=batch()).plan
    found = {
        name: parameter_bytes(graph.tensors[tensor], plan.parameters[name], Sizes(plan.mesh))
        for name, tensor in graph.parameters.items()
    }
    weight_bytes = 8 * 8 * 8  # of `first` and of `second`: 8 x 8 numbers of float64
    assert found["first.weight"] == (weight_bytes, 0, 0)
    assert found["second.weight"] == (weight_bytes, weight_bytes, 2 * weight_bytes)
