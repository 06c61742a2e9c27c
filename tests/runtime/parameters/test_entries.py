"""Gradients of replicated parameters are added up in few collectives, whoever asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference

_COUNT = 8


def _model() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(_COUNT) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers).double(), torch.randn(4, 8, dtype=torch.float64)


def _gradients(model: nn.Sequential, x: Tensor, compiled: Any) -> dict[str, Any]:
    """Gradients as `.grad`, of two calls at once, from autograd.grad, and of a gradient."""
    parameters = list(model.parameters())
    found: dict[str, Any] = {}
    compiled(x).square().mean().backward()
    found |= {f"once {i}": p.grad.clone() for i, p in enumerate(parameters)}
    (compiled(x).square().mean() * compiled(x.flip(0)[:2]).square().mean()).backward()
    found |= {f"again {i}": p.grad.clone() for i, p in enumerate(parameters)}
    wanted = [parameters[0], parameters[-1]]
    once = torch.autograd.grad(compiled(x).square().mean(), wanted, create_graph=True)
    found |= {f"asked {i}": g.detach() for i, g in enumerate(once)}
    twice = torch.autograd.grad(once[0].square().sum(), parameters[0])
    return found | {"twice": twice[0]}


def _compiled() -> tuple[dict[str, Any], list[str]]:
    torch.compiler.reset()
    model, x = _model()
    compiled = torch.compile(model, backend="autopar", options={"recipe": "ddp"})
    found = _gradients(model, x, compiled)
    loss = compiled(x).square().mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    return found, [e.name for e in profiler.events() if e.name.startswith("gloo:")]


@pytest.mark.multiprocess
def test_gradients_are_summed_in_buckets(two_ranks: Ranks) -> None:
    model, x = _model()
    expected = _gradients(model, x, model)
    for found, collectives in two_ranks.run(_compiled):
        assert difference(found, expected) < 1e-9
        # 16 parameters of 8 x 8 and 8 numbers, far below a bucket
        assert collectives == ["gloo:all_reduce"]
