"""Models on pipeline stages, and what a rank of them has."""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import _torch
from autopar.proof.verdict import nan_last
from tests.runtime.models import Batch
from tests.runtime.training import difference, train
from tests.support.staged import plan_for


def compiled(
    model: nn.Module,
    batch: Batch,
    loss: Any,
    *,
    schedule: str = "1f1b",
    ranks: int = 2,
    micro_batches: int = 4,
    mesh: dict[str, int] | None = None,
    recipe: Any = "auto",
) -> autopar.CompiledModule:
    plan = plan_for(model, batch, loss, schedule, ranks, micro_batches, mesh, recipe)
    return autopar.compile(model, loss_fn=loss, plan=plan)


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have, as one has it."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            g = parameter.grad
            found[name] = (g.full_tensor() if isinstance(g, DTensor) else g).clone()
    return found


def held(model: nn.Module) -> list[str]:
    """The parameters that this rank has."""
    return [name for name, p in model.named_parameters() if not _torch.is_elsewhere(p)]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() <= expected.keys()
    return max(((found[n] - expected[n]).abs().max().item() for n in found), key=nan_last)


def distance_of(parts: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    whole = together(parts)
    return max(difference({key: (whole | part)[key] for key in expected}, expected) for part in parts)


def tied_gpt() -> tuple[nn.Module, Batch]:
    model = GPT(GPTConfig(seq_len=8, layers=2, heads=4, width=16)).double()
    model.head.weight = model.token_embedding.weight
    tokens = torch.arange(64).reshape(8, 8) * 7 % 256
    return model, (tokens, tokens.roll(1, 1))


def single_tied() -> dict[str, Any]:
    model, batch = tied_gpt()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return train(model, step, batch)
