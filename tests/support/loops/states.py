"""Loops around state: precision, scalers, checkpoints with random numbers, averages with statistics, own gradients."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.loop import Loop, Ready, batches, mlp, plain_loop, summed, whole
from tests.support.methods import step


def scaled(ready: Ready) -> list[float]:
    """A GradScaler whose scale grows and falls; a batch that overflows; clipped after unscaling."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        loss = F.mse_loss(model(x), y) * (torch.inf if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [scaler.get_scale()] if number == 3 else [loss.item(), float(whole(norm)), scaler.get_scale()]
    return [*losses, summed(model)]


def in_autocast(ready: Ready) -> list[float]:
    """autocast around the forward in every other step, and around a part of the loss; float32 outside."""
    model = ready(mlp(6, 8, 3)).float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            out = model(x.float())
            assert (out.dtype == torch.bfloat16) == (number % 2 == 1)
        losses.append(round(step(optimizer, F.mse_loss(out.float(), y.float())), 2))
    return [*losses, round(summed(model), 1)]


class Dropping(nn.Module):
    """Dropout between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))


def resumed_with_random_numbers(ready: Ready) -> list[float]:
    """Dropout: saved in the middle with the generator's state, trained on, set back, and trained on again."""
    model = ready(Dropping())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(4)
    data = batches(4)
    for x, y in data[:2]:
        step(optimizer, F.mse_loss(model(x), y))
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    first = [step(optimizer, F.mse_loss(model(x), y)) for x, y in data[2:]]
    ends = summed(model)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    torch.set_rng_state(kept[2])
    second = [step(optimizer, F.mse_loss(model(x), y)) for x, y in data[2:]]
    with torch.random.fork_rng():
        torch.manual_seed(9)
        once = model(x).sum().item()
    torch.manual_seed(9)
    again = model(x).sum().item()
    other = model(x).sum().item()
    return [float(first == second), float(ends == summed(model)), float(once == again), float(again == other)]


def checkpointed_in_the_middle(ready: Ready) -> list[float]:
    """Model, optimizer, schedule and step through one file, with `map_location`, into objects that have trained on."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    losses, file = [], io.BytesIO()
    for number, (x, y) in enumerate(batches(5)):
        if number == 2:
            entries = {k: whole(v) for k, v in model.state_dict().items()}
            moments = copy.deepcopy(optimizer.state_dict())
            torch.save({"model": entries, "schedule": schedule.state_dict(), "step": number}, file)
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        schedule.step()
    file.seek(0)
    kept = torch.load(file, map_location="cpu", weights_only=False)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(moments)
    schedule.load_state_dict(kept["schedule"])
    for x, y in batches(5)[kept["step"] :]:
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        schedule.step()
    return [*losses, summed(model)]


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def statistics_anew(ready: Ready, *, copies: bool = False) -> list[float]:
    """SWA as torch's page has it: an AveragedModel, and `update_bn` over a loader at the end."""
    model = ready(normed())
    plain_loop(model)
    model.train()
    average = torch.optim.swa_utils.AveragedModel(getattr(model, "original", model))
    losses = plain_loop(model)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    if copies:
        entries = {k: whole(v) for k, v in model.state_dict().items()}
        model = normed().double()
        model.load_state_dict(entries)
    torch.optim.swa_utils.update_bn([x for x, _ in batches()], model)
    model.eval()
    x, y = batches(1)[0]
    return [*losses, F.mse_loss(model(x), y).item(), *(whole(b).double().sum().item() for b in model.buffers())]


def by_autograd_grad(ready: Ready) -> list[float]:
    """Gradients by `autograd.grad`, added up by hand over parts, put into `.grad`, and clipped by their largest."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    params, losses = [p for p in model.parameters() if p.requires_grad], []
    for x, y in batches():
        sums: list[Any] = [None] * len(params)
        for part in (slice(0, 3), slice(3, 8)):
            loss = F.mse_loss(model(x[part]), y[part], reduction="sum") / y.numel()
            grads = torch.autograd.grad(loss, params)
            sums = [g if s is None else s + g for s, g in zip(sums, grads, strict=True)]
            losses.append(loss.item())
        for p, g in zip(params, sums, strict=True):
            p.grad = g
        losses.append(float(whole(torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf")))))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, summed(model)]


def attacked(ready: Ready) -> list[float]:
    """Adversarial training: steps of PGD in evaluation mode, with the signs of gradients of inputs."""
    model = ready(normed())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        model.eval()
        near = x.clone()
        for _ in range(2):
            near = near.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.mse_loss(model(near), y), near)
            near = (x + (near + 0.05 * slope.sign() - x).clamp(-0.08, 0.08)).detach()
        model.train()
        losses += [step(optimizer, F.mse_loss(model(near), y) + F.mse_loss(model(x), y)), near.sum().item()]
    return [*losses, *(whole(b).double().sum().item() for b in model.buffers()), summed(model)]


def averaged_by_decay(ready: Ready) -> list[float]:
    """A shadow of names and values, with a decay that warms up; applied for an evaluation, and put back."""
    model = ready(mlp(6, 8, 3))
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        decay = min(0.99, (1 + number) / (10 + number))
        for name, p in model.named_parameters():
            shadow[name] = (1.0 - decay) * p.data + decay * shadow[name]
        backup = {}
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            losses.append(F.mse_loss(model(x), y).item())
        for name, p in model.named_parameters():
            p.data = backup[name]
    return [*losses, summed(model)]


def frozen_by_turns(ready: Ready) -> list[float]:
    """Layers are frozen in turn, with one optimizer over all, whose momentum goes on; gradients are None or zeros."""
    model = ready(mlp(6, 8, 8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        for index, layer in enumerate((model[0], model[2], model[4])):
            layer.requires_grad_(index == number % 3)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss.backward()
        losses += [loss.item(), float(sum(p.grad is not None for p in model.parameters()))]
        optimizer.step()
    return [*losses, summed(model)]


def second_order(ready: Ready) -> list[float]:
    """Hutchinson's estimate of a Hessian's diagonal (AdaHessian, Sophia) preconditions the steps."""
    model = ready(mlp(6, 8, 3))
    params, losses = list(model.parameters()), []
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        torch.manual_seed(5)
        signs = [torch.randint_like(p, 0, 2) * 2 - 1 for p in params]
        products = torch.autograd.grad(grads, params, signs)
        with torch.no_grad():
            for p, g, s, h in zip(params, grads, signs, products, strict=True):
                p -= 0.05 * g / ((s * h).abs().clamp(min=0.1))
        losses.append(loss.item())
    return [*losses, summed(model)]


def noisy(ready: Ready) -> list[float]:
    """Langevin steps: seeded noise on gradients and on weights, drawn like the parameters."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(batches()):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.manual_seed(number)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad += 0.01 * torch.randn(p.shape, dtype=p.dtype)
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.empty_like(p).normal_(std=1e-2))
        losses.append(loss.item())
    return [*losses, summed(model)]


def averages_of_two(ready: Ready) -> list[float]:
    """Two models trained apart and averaged weight by weight (a model soup, federated), loaded into both."""
    torch.manual_seed(2)
    left, right = ready(mlp(6, 8, 3)), ready(mlp(6, 8, 3))
    losses = []
    for _ in range(2):
        losses += plain_loop(left)[:-1] + plain_loop(right)[:-1]
        states = [m.state_dict() for m in (left, right)]
        soup = {k: torch.stack([whole(s[k]) for s in states]).mean(0) for k in states[0]}
        for model in (left, right):
            model.load_state_dict(soup)
            model.train()
    with torch.no_grad():
        near = [float(whole(torch.dist(p, q))) for p, q in zip(left.parameters(), right.parameters(), strict=True)]
    return [*losses, *near, summed(left), summed(right)]


def actor_and_critic(ready: Ready) -> list[float]:
    """Alternating optimizers over parts of one module, chosen by names; one loss passes through both."""
    model = ready(Both())
    of_actor = torch.optim.Adam([p for n, p in model.named_parameters() if "actor" in n], 1e-2)
    of_critic = torch.optim.Adam(itertools.chain(model.critic.parameters()), 1e-2)
    losses = []
    for x, y in batches():
        losses.append(step(of_critic, F.mse_loss(model(x, part="critic", given=y), y[:, :1])))
        losses.append(step(of_actor, -model(x, part="both").mean()))
        model.zero_grad()
    return [*losses, summed(model.actor), summed(model)]


class Both(nn.Module):
    """An actor and a critic, of which a keyword says what is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(6, 8, 3), mlp(3, 8, 1)

    def forward(self, x: Tensor, *, part: str, given: Tensor | None = None) -> Tensor:
        if part == "critic":
            return self.critic(given)
        return self.critic(torch.tanh(self.actor(x)))


def clipped_by_groups(ready: Ready) -> list[float]:
    """Norms of groups by `_foreach_norm` and by hand, gradients scaled together, a step skipped by its norm."""
    model = ready(mlp(6, 8, 3))
    decays = [p for n, p in model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, fused=True)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        loss = F.mse_loss(model(x), y) * (100 if number == 2 else 1)
        optimizer.zero_grad()
        loss.backward()
        norms = [sum(p.grad.pow(2).sum() for p in g["params"]).sqrt() for g in optimizer.param_groups]
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        losses += [loss.item(), *(float(whole(n)) for n in norms), float(whole(total))]
        if float(whole(total)) > 20:
            continue
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
        optimizer.step()
    return [*losses, summed(model)]


def with_a_penalty(ready: Ready, *, prepares: bool = False) -> list[float]:
    """L1 of all weights, a group norm of rows, and an orthogonality term of one layer, in the loss."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    if prepares and hasattr(model, "prepare"):
        model.prepare(batches(1)[0][0])
    for x, y in batches():
        lasso = sum(p.abs().sum() for p in model.parameters())
        rows = model[0].weight.norm(dim=1).sum()
        near = (model[2].weight @ model[2].weight.T).square().sum()
        losses.append(step(optimizer, F.mse_loss(model(x), y) + 1e-3 * lasso + 1e-2 * rows + 1e-2 * near))
    return [*losses, summed(model)]


def proximal(ready: Ready, *, prepares: bool = False) -> list[float]:
    """FedProx: a distance from the weights of the round's start; AGEM's dot of gradients with a memory."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, memory = [], None
    if prepares and hasattr(model, "prepare"):
        model.prepare(batches(1)[0][0])
    for x, y in batches(4):
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            far = sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), start, strict=True))
            loss = F.mse_loss(model(x), y) + 0.5 * far
            optimizer.zero_grad()
            loss.backward()
            if memory is not None:
                dot = sum((p.grad * m).sum() for p, m in zip(model.parameters(), memory, strict=True))
                if dot < 0:
                    size = sum((m * m).sum() for m in memory)
                    for p, m in zip(model.parameters(), memory, strict=True):
                        p.grad -= dot / size * m
                losses.append(float(whole(dot)))
            optimizer.step()
            losses.append(loss.item())
        memory = [p.grad.clone() for p in model.parameters()]
    return [*losses, summed(model)]


STATES: dict[str, Loop] = {
    "GradScaler, one overflow": scaled,
    "autocast by turns": in_autocast,
    "dropout set back": resumed_with_random_numbers,
    "checkpoint in the middle": checkpointed_in_the_middle,
    "update_bn": statistics_anew,
    "the same, of a plain copy": functools.partial(statistics_anew, copies=True),
    "autograd.grad by hand": by_autograd_grad,
    "PGD": attacked,
    "shadow swapped by data": averaged_by_decay,
    "layers frozen in turn": frozen_by_turns,
    "Hutchinson's diagonal": second_order,
    "Langevin noise": noisy,
    "model soup": averages_of_two,
    "actor and critic in one module": actor_and_critic,
    "norms of groups": clipped_by_groups,
    "penalties before the plan": with_a_penalty,
    "penalties of weights, prepared": functools.partial(with_a_penalty, prepares=True),
    "FedProx and A-GEM, prepared": functools.partial(proximal, prepares=True),
}
