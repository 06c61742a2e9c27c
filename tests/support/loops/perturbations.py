"""Loops that draw, perturb or set weights anew, and losses and schedules written by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.loop import Loop, Ready, batches, mlp, plain_loop, summed, whole
from tests.support.methods import step


def zeroth_order(ready: Ready) -> list[float]:
    """MeZO: weights moved by seeded noise of their size, two losses under no_grad, and the same noise again."""
    model = ready(mlp(6, 8, 3))
    losses = []

    def move(seed: int, by: float) -> None:
        torch.manual_seed(seed)
        for p in model.parameters():
            p.data.add_(torch.normal(0.0, 1.0, size=p.data.size(), dtype=p.dtype), alpha=by)

    for seed, (x, y) in enumerate(batches()):
        with torch.no_grad():
            move(seed, 1e-2)
            up = F.mse_loss(model(x), y)
            move(seed, -2e-2)
            down = F.mse_loss(model(x), y)
            move(seed, 1e-2)
            move(seed, -0.1 * ((up - down) / 2e-2).item())
        losses += [up.item(), down.item()]
    return [*losses, summed(model)]


def evolved(ready: Ready) -> list[float]:
    """Evolution strategies over the vector of all parameters."""
    model = ready(mlp(6, 8, 3))
    losses = []
    with torch.no_grad():
        for x, y in batches():
            model(x)
            centre = whole(parameters_to_vector(model.parameters())).clone()
            torch.manual_seed(1)
            noise = torch.randn(4, len(centre), dtype=torch.float64)
            found = []
            for each in noise:
                vector_to_parameters(centre + 0.1 * each, model.parameters())
                found.append(F.mse_loss(model(x), y))
            score = torch.stack(found)
            vector_to_parameters(centre - 0.1 * ((score - score.mean()) @ noise), model.parameters())
            losses += score.tolist()
    return [*losses, summed(model)]


def drawn_updates(update: Callable[[Tensor, Tensor], Tensor]) -> Loop:
    """Steps by hand whose gradients are changed by random numbers of their own."""

    def loop(ready: Ready) -> list[float]:
        model = ready(mlp(6, 8, 3))
        losses = []
        for number, (x, y) in enumerate(batches()):
            loss = F.mse_loss(model(x), y)
            model.zero_grad()
            loss.backward()
            torch.manual_seed(number)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(update(p, p.grad), alpha=0.1)
            losses.append(loss.item())
        return [*losses, torch.rand(1).item(), summed(model)]

    return loop


def stochastic_sign(p: Tensor, g: Tensor) -> Tensor:
    """Signs that are right with a probability of the gradient's size."""
    return 2 * torch.bernoulli((0.5 + g / (2 * g.abs().max() + 1e-8)).clamp(0, 1)) - 1


def one_entry(p: Tensor, g: Tensor) -> Tensor:
    """Random coordinate descent: an entry of every row, by its size."""
    if g.ndim < 2:
        return g
    at = torch.multinomial(g.abs() + 1e-6, 1)
    return torch.zeros_like(g).scatter(1, at, g.gather(1, at))


def leaky_noise(p: Tensor, g: Tensor) -> Tensor:
    """Negative entries shrink by random slopes, and some of all are dropped."""
    return F.dropout(F.rrelu(g, training=True), 0.3)


def set_anew(ready: Ready) -> list[float]:
    """Layers that are initialised anew in the middle: truncated, orthogonal, sparse, uniform."""
    model = ready(mlp(6, 8, 8, 3))
    losses = plain_loop(model)
    torch.manual_seed(3)
    nn.init.trunc_normal_(model[0].weight, std=0.2, a=-0.2, b=0.2)
    nn.init.orthogonal_(model[2].weight, gain=0.5)
    nn.init.sparse_(model[4].weight, 0.2)
    model[4].bias.data.uniform_(-0.1, 0.1)
    return [*losses, torch.rand(1).item(), *plain_loop(model)]


def line_search(ready: Ready) -> list[float]:
    """A step along the gradient that is halved until the loss falls, over vectors of parameters and gradients."""
    model = ready(mlp(6, 8, 3))
    losses = []
    for x, y in batches():
        loss = F.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        start = parameters_to_vector(model.parameters()).detach().clone()
        slope = parameters_to_vector([p.grad for p in model.parameters()])
        rate = 4.0
        with torch.no_grad():
            while rate > 1e-3:
                vector_to_parameters(start - rate * slope, model.parameters())
                if F.mse_loss(model(x), y) < loss - 1e-4 * rate * whole(slope @ slope):
                    break
                rate /= 2
        losses += [loss.item(), rate]
    return [*losses, summed(model)]


def federated(ready: Ready) -> list[float]:
    """FedProx after the forward: a distance from plain copies of the global weights, which move at the end."""
    model = ready(mlp(6, 8, 3))
    torch.manual_seed(0)
    globals_ = [p.detach().clone() for p in mlp(6, 8, 3).double().parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches(4):
        out = model(x)
        pairs = list(zip(model.parameters(), globals_, strict=True))
        prox = sum(((p - p0) ** 2).sum() + ((p0 - p) / 10).pow(2).sum() for p, p0 in pairs)
        losses.append(step(optimizer, F.mse_loss(out, y) + 0.05 * prox))
    with torch.no_grad():
        for p, p0 in pairs:
            p0.lerp_(p, 0.5)
    return [*losses, sum(p0.sum().item() for p0 in globals_), summed(model)]


def fast_sign(ready: Ready) -> list[float]:
    """FGSM: inputs moved along the sign of their gradient, half of the loss each."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
        moved = (x + 0.1 * slope.sign()).clamp(-2, 2).detach()
        optimizer.zero_grad()
        losses.append(step(optimizer, 0.5 * F.mse_loss(model(x.detach()), y) + 0.5 * F.mse_loss(model(moved), y)))
    return [*losses, summed(model)]


def two_passes(ready: Ready) -> list[float]:
    """R-Drop: two forwards of a batch with features dropped by the script, and a divergence both ways."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    torch.manual_seed(4)
    for x, y in batches():
        one, two = (model(F.dropout(x, 0.2)).log_softmax(-1) for _ in range(2))
        apart = F.kl_div(one, two, log_target=True, reduction="batchmean")
        apart = apart + F.kl_div(two, one, log_target=True, reduction="batchmean")
        label = y.argmax(-1)
        losses.append(step(optimizer, F.nll_loss(one, label) + F.nll_loss(two, label) + 0.5 * apart))
    return [*losses, summed(model)]


class Focal(nn.Module):
    """A focal loss by hand with weights of classes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))

    def forward(self, out: Tensor, label: Tensor) -> Tensor:
        logs = out.log_softmax(-1).gather(1, label[:, None]).squeeze(1)
        return (-self.alpha[label] * (1 - logs.exp()) ** 2 * logs).mean()


def focal(ready: Ready) -> list[float]:
    """A focal loss, mixed inputs by a Beta draw, erased patches, and smooth labels by hand."""
    model, criterion = ready(mlp(6, 8, 3)), Focal()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    torch.manual_seed(5)
    for x, y in batches():
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(len(x))
        mixed = share * x + (1 - share) * x[order]
        mixed[torch.rand(len(x)) < 0.5, 2:4] = 0.0
        out, label = model(mixed), y.argmax(-1)
        smooth = torch.full_like(out, 0.1 / 2).scatter_(1, label[:, None], 0.9)
        loss = share * criterion(out, label) + (1 - share) * criterion(out, label[order])
        losses.append(step(optimizer, loss - 0.1 * (smooth * out.log_softmax(-1)).sum(-1).mean()))
    return [*losses, summed(model)]


def pinball(ready: Ready) -> list[float]:
    """Quantile losses, rows weighed by a sampler, a straight-through Gumbel choice."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = torch.utils.data.WeightedRandomSampler(
        [1.0] * 4 + [3.0] * 4, 8, generator=torch.Generator().manual_seed(1)
    )
    losses = []
    torch.manual_seed(6)
    for x, y in batches():
        rows = torch.tensor(list(sampler))
        out = model(x[rows])
        choice = F.gumbel_softmax(out, tau=0.7, hard=True)
        apart = y[rows] - out
        quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        loss = (
            torch.maximum(quantiles * apart, (quantiles - 1) * apart).mean() + 0.1 * (choice * y[rows]).sum(-1).mean()
        )
        losses.append(step(optimizer, loss))
    return [*losses, summed(model)]


def schedule_by_hand(ready: Ready) -> list[float]:
    """Rates that fall by layer, a cosine written into groups, losses scaled by hand, and clipping by past norms."""
    model = ready(mlp(6, 8, 8, 3))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    groups = [{"params": list(layer.parameters()), "scale": 0.5 ** (2 - i)} for i, layer in enumerate(layers)]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    norms: list[float] = []
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["scale"] * 0.5 * (1 + math.cos(math.pi * number / 5))
        (F.mse_loss(model(x), y) * 1024).backward()
        for p in model.parameters():
            p.grad.div_(1024)
        norms.append(float(whole(torch.stack([p.grad.norm() for p in model.parameters()]).norm())))
        limit = sorted(norms)[len(norms) // 2]
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(limit)
    return [*losses, summed(model)]


class Counting(nn.Module):
    """A classifier that counts what it saw in buffers, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 3)
        self.register_buffer("confusion", torch.zeros(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        out = self.net(x)
        if label is not None and not self.training:
            hot = F.one_hot(label, 3).double().T @ F.one_hot(out.argmax(-1), 3).double()
            self.confusion.add_(hot)
        return out


def counted(ready: Ready) -> list[float]:
    """Running metrics in buffers, evaluated and reset in between, and a mean teacher with a copy of them."""
    model = ready(Counting())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        label = y.argmax(-1)
        model.train()
        losses.append(step(optimizer, F.cross_entropy(model(x), label)))
        model.eval()
        model.confusion.zero_()
        with torch.no_grad():
            for rows in (slice(0, 5), slice(5, 8)):
                model(x[rows], label[rows])
        losses += whole(model.confusion).flatten().tolist()
    return [*losses, summed(model)]


def lottery(ready: Ready) -> list[float]:
    """Lottery tickets: the smallest weights of each layer are masked, the others rewound, and trained with hooks."""
    model = ready(mlp(6, 8, 3))
    first = copy.deepcopy(model.state_dict())
    losses = plain_loop(model)
    masks = {}
    for name, p in model.named_parameters():
        if p.ndim > 1:
            size = whole(p).abs()
            masks[name] = (size > size.flatten().kthvalue(size.numel() // 3).values).double()
    model.load_state_dict(first)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in masks:
                p.mul_(masks[name])
                p.register_hook(lambda g, mask=masks[name]: g * mask)
    model.train()
    return [*losses, *plain_loop(model)]


def shaken(ready: Ready) -> list[float]:
    """Noise in the shape of every weight is added before a forward, and taken away after the backward."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batches()[0][0])
    losses = []
    for number, (x, y) in enumerate(batches()):
        torch.manual_seed(number)
        noises = [torch.poisson(p.detach().abs() * 20) / 200 + 0.01 * torch.rand_like(p) for p in model.parameters()]
        with torch.no_grad():
            for p, noise in zip(model.parameters(), noises, strict=True):
                p.add_(noise)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, noise in zip(model.parameters(), noises, strict=True):
                p.sub_(noise)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, summed(model)]


def cumulative_statistics(ready: Ready) -> list[float]:
    """Batch norm with cumulative statistics, as the error about momentum=None says."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = ready(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        model[1].momentum = 1 / (int(model[1].num_batches_tracked) + 1)
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
    return [*losses, whole(model[1].running_var).sum().item(), summed(model)]


PERTURBATIONS: dict[str, Loop] = {
    "MeZO": zeroth_order,
    "evolution strategies": evolved,
    "signs drawn by size": drawn_updates(stochastic_sign),
    "coordinates drawn by size": drawn_updates(one_entry),
    "gradients through rrelu": drawn_updates(leaky_noise),
    "layers set anew": set_anew,
    "line search over vectors": line_search,
    "FedProx, plain copies": federated,
    "FGSM": fast_sign,
    "R-Drop": two_passes,
    "focal, Beta mixup, erased": focal,
    "quantiles, sampler, Gumbel": pinball,
    "rates by layer, own scale": schedule_by_hand,
    "running metrics in buffers": counted,
    "lottery tickets": lottery,
    "weights shaken": shaken,
    "cumulative batch norm, by hand": cumulative_statistics,
}
