"""The same training loop for one process and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.export import run_with_loss
from autopar.proof.random_plan import random_plan
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch, make, make_on, mean_square
from tests.support.staged import captured_once, prepared_once

Step = Callable[..., Tensor]
DP = {"dp": 2}


def compile_mlp(recipe: str = "zero3", **kwargs: Any) -> tuple[autopar.CompiledModule, tuple[Tensor, ...]]:
    """The compiled `mlp` on two ranks, and its batch."""
    model, batch, _ = make("mlp")
    return autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, **kwargs), batch


def train(model: nn.Module, step: Step, batch: Batch, *, steps: int = 3) -> dict[str, Any]:
    """Trains with AdamW; returns the losses and the full parameters and buffers."""
    # eps well above the noise of gradients that are zero but for rounding (a key's bias), which Adam
    # would otherwise scale up to whole steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)
    losses = []
    for _ in range(steps):
        losses.append(step(*batch).item())
        if isinstance(model, autopar.CompiledModule):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


def distance_from_one_process(ranks: Ranks, recipe: Any, **options: Any) -> float:
    """The largest difference of two ranks that train the small GPT by a recipe from one process that trains it."""
    steps = {name: options[name] for name in ("steps",) if name in options}
    found = ranks.run(_trained_gpt, recipe, options)
    return max(difference(each, single("gpt", **steps)) for each in found)


def _trained_gpt(recipe: Any, options: dict[str, Any]) -> dict[str, Any]:
    return compiled("gpt", DP, recipe, **options)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Every entry of the state dict, in full."""
    state = model.state_dict()
    if isinstance(model, autopar.CompiledModule):
        state = state.shards()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone() for k, v in state.items()}


def single(
    name: str, *, steps: int = 3, dtype: torch.dtype = torch.float64, micro_batches: int = 1, device: str = "cpu"
) -> dict[str, Any]:
    """What a single process without autopar gets."""
    model, batch, loss_fn = make_on(device, name, dtype)

    def step(*batch: Tensor) -> Tensor:
        losses = []
        for part in zip(*(x.chunk(micro_batches) for x in batch), strict=True):
            loss = run_with_loss(model, part, {}, loss_fn) / micro_batches  # type: ignore[arg-type]
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return train(model, step, batch, steps=steps)


@captured_once()
def compiled(
    name: str,
    mesh: dict[str, int],
    recipe: str | dict[str, str] = "auto",
    micro_batches: int = 1,
    *,
    device: str = "cpu",
    steps: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """What autopar gets on this rank; `options` are further ones of `compile`."""
    model, batch, loss_fn = make_on(device, name)
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, micro_batches=micro_batches, **options)  # type: ignore[arg-type]
    return train(made, made.step, batch, steps=steps)


@captured_once()
def randomly(
    name: str, mesh: dict[str, int], seed: int, device: str = "cpu", lone_ops: bool | None = None
) -> tuple[dict[str, Any], int]:
    """The same with a plan drawn at random, and how many micro-batches that has."""
    model, batch, loss_fn = make_on(device, name)
    plan = drawn(name, mesh, seed, device, lone_ops)
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan)  # type: ignore[arg-type]
    return train(made, made.step, batch), plan.micro_batches


def drawn(
    name: str, mesh: dict[str, int], seed: int, device: str = "cpu", lone_ops: bool | None = None
) -> autopar.Plan:
    """A plan drawn at random, of a micro-batch where it has several."""
    plan = plan_of_part(name, mesh, seed, device, micro_batches=1, lone_ops=lone_ops)
    if plan.micro_batches > 1:  # it was drawn for the whole batch
        count = plan.micro_batches
        plan = plan_of_part(name, mesh, seed, device, micro_batches=count, lone_ops=lone_ops)
    return plan


def plan_of_part(
    name: str, mesh: dict[str, int], seed: int, device: str = "cpu", *, micro_batches: int, lone_ops: bool | None
) -> autopar.Plan:
    """A plan drawn at random, for a micro-batch of a batch that is cut into so many."""
    model, batch, loss_fn = make_on(device, name)
    part = tuple(x[: len(x) // micro_batches] for x in batch)
    prepared = prepared_once(model, part, loss_fn)
    return random_plan(
        prepared.analysis.graph,
        autopar.Mesh.of(mesh),
        seed=seed,
        fingerprint=prepared.captured.fingerprint,
        lone_ops=lone_ops,
    )


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of losses and state, relative to the largest entry (or to 1e-3); inf for a NaN."""
    assert list(found) == list(expected)
    worst = 0.0
    for name, value in expected.items():
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found[name], value))
        gap = ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()
        worst = max(worst, nan_last(gap))
    return worst
