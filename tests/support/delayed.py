"""Steps with delays, in plain PyTorch and one process: what real ranks are compared with.

Replicas that synchronise every K steps, and stages whose parameters have versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def train_replicas(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    loss_of: Loss,
    optimizer_of: Callable[[nn.Module], Optimizer],
    *,
    replicas: int,
    steps: int,
    rule: str,
    momentum: float = 0.9,
    rate: float = 0.7,
) -> tuple[list[nn.Module], list[list[float]]]:
    """Trains replicas one after another; (replicas after the last batch and no further meeting, losses by replica)."""
    models = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [optimizer_of(each) for each in models]
    base = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer = torch.optim.SGD(base, lr=rate, momentum=momentum, nesterov=True)
    losses: list[list[float]] = [[] for _ in models]
    for number, batch in enumerate(batches):
        if number and number % steps == 0:
            meet(models, base, outer, rule)
        parts = zip(*(x.chunk(replicas) for x in batch), strict=True)
        for each, optimizer, part, own in zip(models, optimizers, parts, losses, strict=True):
            loss = loss_of(each, part)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
    if len(batches) % steps == 0:
        meet(models, base, outer, rule)
    return models, losses


@torch.no_grad()
def meet(models: Sequence[nn.Module], base: Sequence[Tensor], outer: Optimizer, rule: str) -> None:
    """Gives all replicas the same parameters, and averages their running statistics."""
    columns = list(zip(*(each.parameters() for each in models), strict=True))
    means = [torch.stack(column).mean(0) for column in columns]
    if rule == "diloco":
        for x, mean in zip(base, means, strict=True):
            x.grad = x - mean
        outer.step()
    else:
        for x, mean in zip(base, means, strict=True):
            x.copy_(mean)
    for column, x in zip(columns, base, strict=True):
        for own in column:
            own.copy_(x)
    for column in zip(*(each.buffers() for each in models), strict=True):
        if column[0].is_floating_point():
            mean = torch.stack(column).mean(0)
            for own in column:
                own.copy_(mean)


def train_stages(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    loss_of: Loss,
    optimizer: Optimizer,
    *,
    stage_of: Callable[[str], int],
    stages: int,
    schedule: str,
    micro_batches: int,
) -> list[float]:
    """Trains a model in place with the weight versions of a schedule without a flush; returns the loss of every batch.

    The formulas are those of the papers (`autopar/pipeline/weight_stashing.py`), and nothing runs in stages: the
    parameters of every micro-batch are put together from the versions that their stages see.
    """
    every = stages if schedule == "2bw" else 1
    shadow, losses = copy.deepcopy(model), []
    for batch in batches:
        parts = list(zip(*(x.chunk(micro_batches) for x in batch), strict=True))
        versions = [_values(model)]
        total = 0.0
        for number, part in enumerate(parts):
            for name, x in shadow.named_parameters():
                seen = versions[version_seen(schedule, stages, stage_of(name), number)]
                x.data = seen[name].clone()
            loss = loss_of(shadow, part)
            (loss / every).backward()
            total += loss.item() / micro_batches
            if (number + 1) % every == 0:
                for name, p in model.named_parameters():
                    p.grad = shadow.get_parameter(name).grad
                optimizer.step()
                shadow.zero_grad()
                versions.append(_values(model))
        losses.append(total)
    for x, y in zip(model.buffers(), shadow.buffers(), strict=True):
        x.copy_(y)
    return losses


def version_seen(schedule: str, stages: int, stage: int, micro_batch: int) -> int:
    """Number of updates that a micro-batch sees on a stage, by the papers' formulas."""
    if schedule == "2bw":
        return max(0, micro_batch // stages - 1)
    behind = stages - 1 - (stage if schedule == "pipedream" else 0)
    return max(0, micro_batch - behind)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
