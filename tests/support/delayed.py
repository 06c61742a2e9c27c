"""Replicas that meet every so many steps, in plain PyTorch and one process: what real ranks are compared with."""

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
