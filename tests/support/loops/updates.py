"""Loops whose updates are the script's own: optimizers written by hand, and constraints on weights and gradients."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.loop import Loop, Ready, batches, mlp, plain_loop, summed, whole
from tests.support.methods import step


class Own(torch.optim.Optimizer):
    """An optimizer whose update of one parameter is a function of it, its gradient, its state and the group."""

    def __init__(self, params: Iterable[Any], update: Callable[..., None], lr: float = 0.05, **options: Any) -> None:
        self.update = update
        super().__init__(params, {"lr": lr, "weight_decay": 0.01, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)


def own(update: Callable[..., None], sizes: tuple[int, ...] = (6, 8, 3)) -> Loop:
    """The usual loop with an update of the script's own, and the sums of its states."""

    def loop(ready: Ready) -> list[float]:
        model = ready(mlp(*sizes))
        optimizer = Own(model.parameters(), update)
        losses = plain_loop(model, optimizer)
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*losses, *(whole(v).double().sum().item() for v in kept)]

    return loop


def lars(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """A trust ratio of norms, by a branch on their values."""
    g = g.add(p, alpha=group["weight_decay"])
    weight, slope = torch.norm(p), torch.norm(g)
    ratio = 1.0
    if weight > 0 and slope > 0:
        ratio = 0.1 * weight / (slope + 1e-8)
    if "mu" not in state:
        state["mu"] = torch.zeros_like(p)
    state["mu"].mul_(0.9).add_(g * ratio)
    p.add_(state["mu"], alpha=-group["lr"])


def lamb(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Adam with a trust ratio by `torch.where`, and a count in the state."""
    if not state:
        state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
    state["step"] += 1
    state["m"].mul_(0.9).add_(g, alpha=0.1)
    state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
    update = state["m"] / (1 - 0.9 ** state["step"]) / (state["v"] / (1 - 0.99 ** state["step"])).sqrt().add(1e-6)
    update.add_(p, alpha=group["weight_decay"])
    weight, length = p.norm(2.0), update.norm(2.0)
    one = torch.ones_like(weight)
    ratio = torch.where(weight > 0, torch.where(length > 0, (weight / length).clamp(max=10.0), one), one)
    p.add_(update * ratio, alpha=-group["lr"])


def lion(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """The sign of a moving average, with decoupled decay."""
    if "m" not in state:
        state["m"] = torch.zeros_like(p)
    p.data.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(state["m"].clone().mul_(0.9).add(g, alpha=0.1).sign_(), alpha=-0.01)
    state["m"].lerp_(g, 0.01)


def factored(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Adafactor's factored second moments, clipped by a root mean square."""
    squared = g.square().add_(1e-30)
    if g.dim() >= 2:
        if not state:
            state["row"] = torch.zeros(g.shape[:-1], dtype=g.dtype)
            state["column"] = torch.zeros(g.shape[:-2] + g.shape[-1:], dtype=g.dtype)
        state["row"].mul_(0.9).add_(squared.mean(dim=-1), alpha=0.1)
        state["column"].mul_(0.9).add_(squared.mean(dim=-2), alpha=0.1)
        row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
        update = row * state["column"].rsqrt().unsqueeze(-2) * g
    else:
        if not state:
            state["v"] = torch.zeros_like(g)
        state["v"].mul_(0.9).add_(squared, alpha=0.1)
        update = state["v"].rsqrt() * g
    update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
    p.add_(update, alpha=-group["lr"])


def factored_like(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """The same with states made from the gradient's own means."""
    squared = g.square().add_(1e-30)
    if g.dim() < 2:
        p.add_(g, alpha=-group["lr"])
        return
    row, column = squared.mean(-1), squared.mean(-2)
    state["row"] = row if "row" not in state else state["row"] * 0.9 + row * 0.1
    state["column"] = column if "column" not in state else state["column"] * 0.9 + column * 0.1
    scale = torch.outer(state["row"], state["column"]) / state["row"].mean()
    p.add_(g / scale.sqrt(), alpha=-group["lr"])


def orthogonal_update(g: Tensor) -> Tensor:
    """Newton and Schulz's iteration of Muon."""
    x = g / (g.norm() + 1e-7)
    if g.size(0) > g.size(1):
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.size(0) > g.size(1) else x


def muon(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Muon by hand: matrices by orthogonal updates, vectors by momentum."""
    if "m" not in state:
        state["m"] = torch.zeros_like(g)
    state["m"].lerp_(g, 0.05)
    g = g.lerp(state["m"], 0.95)
    if p.ndim == 2:
        g = orthogonal_update(g) * max(1, p.size(0) / p.size(1)) ** 0.5
    p.add_(g, alpha=-group["lr"])


def shampoo(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Shampoo: inverse roots of left and right factors by eigenvalues."""
    order = g.dim()
    for dim in range(order):
        if f"factor {dim}" not in state:
            state[f"factor {dim}"] = 0.1 * torch.eye(g.size(dim), dtype=g.dtype)
        flat = g.transpose(0, dim).contiguous().view(g.size(dim), -1)
        state[f"factor {dim}"].add_(flat @ flat.t())
        values, vectors = torch.linalg.eigh(state[f"factor {dim}"])
        root = vectors @ torch.diag(values.clamp(min=1e-9) ** (-1 / (2 * order))) @ vectors.t()
        g = (root @ g.transpose(0, dim).reshape(g.size(dim), -1)).view(g.transpose(0, dim).shape).transpose(0, dim)
    p.add_(g, alpha=-group["lr"])


def centralized(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Gradient centralization: the mean over all dims but the first is taken out, in place."""
    if g.dim() > 1:
        g.add_(-g.mean(dim=tuple(range(1, g.dim())), keepdim=True))
    p.add_(g, alpha=-group["lr"])


def low_rank(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """GaLore: moments of a gradient that is projected on its largest singular vectors."""
    if g.dim() == 2 and "side" not in state:
        left, _, _ = torch.linalg.svd(g, full_matrices=False)
        state["side"] = left[:, :2] @ left[:, :2].T
    if g.dim() == 2:
        g = state["side"] @ g
    p.add_(g, alpha=-group["lr"])


def natural(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """A Cholesky solve against a damped covariance of the rows."""
    if g.dim() == 2:
        cover = g @ g.T + 0.5 * torch.eye(g.size(0), dtype=g.dtype)
        g = torch.cholesky_solve(g, torch.linalg.cholesky(cover))
    p.add_(g, alpha=-group["lr"])


def unitwise(x: Tensor) -> Tensor:
    return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clipping(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Adaptive gradient clipping (NFNet): by norms of rows."""
    most = unitwise(p).clamp(min=1e-3) * 0.05
    norm = unitwise(g)
    g.copy_(torch.where(norm < most, g, g * (most / norm.clamp(min=1e-6))))
    p.add_(g, alpha=-group["lr"])


def by_the_data(ready: Ready) -> list[float]:
    """Updates through `.data`, weights clamped (WGAN), rows of bounded norm, and gradients dropped by None."""
    model = ready(mlp(6, 8, 3))
    losses = []
    for x, y in batches(4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data -= 0.3 * p.grad.data
            p.data.clamp_(-0.3, 0.3)
            p.grad = None
        model[0].weight.data = torch.renorm(model[0].weight.data, 2, 0, 0.5)
        losses.append(loss.item())
    return [*losses, summed(model)]


def pruned(ready: Ready, *, gathers: bool = False) -> list[float]:
    """Global magnitude pruning: a threshold over all weights, masks that hold after each step."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, masks = [], {}
    for number, (x, y) in enumerate(batches(4)):
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        if number == 1:
            weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
            weights = {n: whole(p) if gathers else p.detach() for n, p in weights.items()}
            limit = torch.cat([p.abs().flatten() for p in weights.values()]).kthvalue(30).values
            masks = {n: (p.abs() > limit).to(p.dtype) for n, p in weights.items()}
            losses.append(float(whole(limit)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masks:
                    p.mul_(masks[name])
    left = sum(int((whole(p) != 0).sum()) for p in model.parameters())
    return [*losses, float(left), summed(model)]


def consolidated(ready: Ready) -> list[float]:
    """Elastic weight consolidation: squared gradients of a first task weigh the way from its weights."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (x, y), *later = batches(4)
    F.mse_loss(model(x), y).backward()
    fisher = {n: p.grad.detach().clone() ** 2 for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.zero_grad()
    losses = []
    for x, y in later:
        loss = F.mse_loss(model(x), y)
        for name, p in model.named_parameters():
            loss = loss + 50 * (fisher[name] * (p - before[name]) ** 2).sum()
        losses.append(step(optimizer, loss))
    return [*losses, summed(model)]


def projected_conflicts(ready: Ready) -> list[float]:
    """PCGrad: gradients of two tasks as vectors, the part of one against the other taken out."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    params, losses = list(model.parameters()), []
    for x, y in batches():
        out = model(x)
        tasks = [F.mse_loss(out, y), -F.mse_loss(out[:, :2], y[:, 1:])]
        flat = []
        for task in tasks:
            grads = torch.autograd.grad(task, params, retain_graph=True)
            flat.append(torch.cat([g.flatten() for g in grads]))
        dot = flat[0] @ flat[1]
        if dot < 0:
            flat[0] = flat[0] - dot / flat[1].norm() ** 2 * flat[1]
        at = 0
        for p in params:
            p.grad = flat[0][at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        losses += [float(whole(tasks[0])), float(whole(dot))]
    return [*losses, summed(model)]


def masters(ready: Ready) -> list[float]:
    """Weights in float32 with masters in float64, which the optimizer holds; gradients are copied up, weights down."""
    model = ready(mlp(6, 8, 3)).float()
    copies = [p.detach().clone().double().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, 1e-2)
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(x.float()), y.float())
        model.zero_grad()
        loss.backward()
        for master, p in zip(copies, model.parameters(), strict=True):
            master.grad = p.grad.detach().double()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(copies, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(round(loss.item(), 4))
    return [*losses, round(summed(model), 3)]


def token_counts(ready: Ready) -> list[float]:
    """Sums over parts with other numbers of tokens each, divided by all tokens before the step."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for x, y in batches():
        total, tokens = 0.0, 0
        for rows in (slice(0, 2), slice(2, 8), slice(0, 5)):
            loss = F.cross_entropy(model(x[rows]), y[rows].argmax(-1), reduction="sum")
            loss.backward()
            total, tokens = total + loss.item(), tokens + len(x[rows])
        for p in model.parameters():
            p.grad.div_(tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / tokens)
    return [*losses, summed(model)]


def rate_finder(ready: Ready) -> list[float]:
    """A finder of rates: state dicts of model and optimizer are kept, rates grow, and all is set back."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    kept, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 10.0)
    losses, best = [], math.inf
    for x, y in batches(4):
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        best = min(best, losses[-1])
        schedule.step()
    model.load_state_dict(kept)
    optimizer.load_state_dict(of_optimizer)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    for x, y in batches():
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        cycle.step()
        losses += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
    return [*losses, summed(model)]


class Tables(nn.Module):
    """Embeddings with sparse gradients, of single tokens and of bags, under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bags = nn.Embedding(12, 4, sparse=True), nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, bags: Tensor) -> Tensor:
        return self.head(torch.cat([self.tokens(tokens), self.bags(bags)], -1))


def sparse(ready: Ready, *, takes: Any = torch.optim.SparseAdam) -> list[float]:
    """SparseAdam for tables, Adam for the rest."""
    model = ready(Tables())
    groups = [[p for n, p in model.named_parameters() if ("head" in n) == wanted] for wanted in (False, True)]
    optimizers = [takes(groups[0], 0.05), torch.optim.Adam(groups[1], 0.01)]
    losses = []
    for number, (_, y) in enumerate(batches()):
        loss = F.mse_loss(model((torch.arange(8) + number) % 12, torch.arange(16).view(8, 2) % 10), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return [*losses, summed(model)]


UPDATES: dict[str, Loop] = {
    "LARS by hand": own(lars),
    "LAMB by hand": own(lamb),
    "Lion by hand": own(lion),
    "Adafactor by hand": own(factored),
    "factored moments": own(factored_like),
    "Muon by hand": own(muon, (6, 8, 8, 3)),
    "Shampoo by hand": own(shampoo),
    "gradient centralization": own(centralized),
    "GaLore by hand": own(low_rank),
    "a Cholesky solve": own(natural),
    "clipping by unit": own(adaptive_clipping),
    "weights clamped by data": by_the_data,
    "global pruning": pruned,
    "the same, gathered": functools.partial(pruned, gathers=True),
    "elastic weight consolidation": consolidated,
    "PCGrad": projected_conflicts,
    "masters beside": masters,
    "unequal numbers of tokens": token_counts,
    "finder of rates": rate_finder,
    "SparseAdam": sparse,
    "the same by Adagrad": functools.partial(sparse, takes=torch.optim.Adagrad),
}
