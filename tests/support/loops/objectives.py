"""Loops whose loss is inside of the model and mixes rows of the batch, or is one of several that take turns."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.loop import Loop, Ready, batches, mlp, summed, whole
from tests.support.methods import step


class Objective(nn.Module):
    """A network that returns a loss of its result."""

    def __init__(self, net: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss_fn = net, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.net(x), y)


def inside(loss_fn: Callable[..., Tensor], *sizes: int) -> Loop:
    """Four steps of a loss inside of the model, the last with fewer rows, and its evaluation."""

    def loop(ready: Ready) -> list[float]:
        model = ready(Objective(mlp(*(sizes or (6, 8, 3))), loss_fn))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        losses = [step(optimizer, model(x, y)) for x, y in [*batches(), *batches(1, rows=6)]]
        with torch.no_grad():
            losses += [float(model(x, y)) for x, y in batches(1)]
        return [*losses, summed(model)]

    return loop


def cox(out: Tensor, y: Tensor) -> Tensor:
    """Cox's partial likelihood: rows sorted by time, sums over all that are later."""
    order = y[:, 0].argsort(descending=True)
    risk, event = out[order, 0], (y[order, 1] > 0).to(out.dtype)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def hardest(out: Tensor, y: Tensor) -> Tensor:
    """Online hard examples: the mean of the largest three losses."""
    return F.mse_loss(out, y, reduction="none").mean(1).topk(3).values.mean()


def above_median(out: Tensor, y: Tensor) -> Tensor:
    """Small-loss rows are dropped by a quantile and a mask."""
    rows = (out - y).square().mean(1)
    keep = rows >= rows.detach().quantile(0.5)
    return (rows * keep).sum() / keep.sum()


def masked_rows(out: Tensor, y: Tensor) -> Tensor:
    """Rows of one kind, selected by a mask times a weight."""
    weight = (y[:, 0] > 0).to(out.dtype)
    return (F.l1_loss(out, y, reduction="none").mean(1) * weight).sum() / weight.sum().clamp(min=1)


def barlow(out: Tensor, y: Tensor) -> Tensor:
    """Barlow twins: a cross-correlation of features that are normed over the batch."""
    a = (out - out.mean(0)) / out.std(0)
    b = (y - y.mean(0)) / y.std(0)
    c = a.T @ b / len(out)
    return (c.diagonal() - 1).square().sum() + 0.1 * (c - torch.diag(c.diagonal())).square().sum()


def vicreg(out: Tensor, y: Tensor) -> Tensor:
    """Variance, invariance and covariance."""
    centered = out - out.mean(0)
    cover = centered.T @ centered / (len(out) - 1)
    off = cover.square().sum() - cover.diagonal().square().sum()
    return F.mse_loss(out, y) + F.relu(1 - torch.sqrt(out.var(0) + 1e-4)).mean() + 0.1 * off / out.shape[1]


def supervised_contrastive(out: Tensor, y: Tensor) -> Tensor:
    """Positives share a label, the diagonal is left out."""
    z, labels = F.normalize(out, dim=1), y.argmax(1)
    scores = z @ z.T / 0.5
    eye = torch.eye(len(z), dtype=torch.bool)
    same = (labels[:, None] == labels[None]) & ~eye
    logs = scores - scores.masked_fill(eye, -1e9).logsumexp(1, keepdim=True)
    return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def semihard(out: Tensor, y: Tensor) -> Tensor:
    """Triplets with the hardest positive and negative of the batch."""
    far, labels = torch.cdist(out, out), y.argmax(1)
    same = labels[:, None] == labels[None]
    positive = (far * same).max(1).values
    negative = far.masked_fill(same, 1e3).min(1).values
    return F.relu(positive - negative + 0.3).mean()


def prototypes(out: Tensor, y: Tensor) -> Tensor:
    """Means of classes by `index_add`, and distances to them."""
    labels = y.argmax(1)
    sums = torch.zeros(3, out.shape[1], dtype=out.dtype).index_add(0, labels, out)
    counts = torch.zeros(3, dtype=out.dtype).scatter_add(0, labels, torch.ones_like(out[:, 0]))
    return F.cross_entropy(-torch.cdist(out, sums / counts.clamp(min=1).unsqueeze(1)), labels)


def sinkhorn(out: Tensor, y: Tensor) -> Tensor:
    """SwAV's codes: rows and columns normed in turn, without a gradient."""
    with torch.no_grad():
        q = (out / 0.5).exp().T
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = (q * q.shape[1]).T
    return -(q * (out + 0.1 * y).log_softmax(1)).sum(1).mean()


def discrepancy(out: Tensor, y: Tensor) -> Tensor:
    """MMD with kernels whose width is the mean distance, between two halves of the batch."""
    both = torch.cat([out, y])
    far = torch.cdist(both, both).square()
    kernel = torch.exp(-far / far.detach().mean())
    n = len(out)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def rates(out: Tensor, y: Tensor) -> Tensor:
    """A log determinant of the batch's covariance (coding rate), and a nuclear norm."""
    eye = torch.eye(out.shape[1], dtype=out.dtype)
    rate = torch.logdet(eye + out.T @ out / len(out))
    return F.mse_loss(out, y) - 0.1 * rate + 0.01 * torch.linalg.svdvals(out).sum()


def correlation(out: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the batch (CCC), and a Dice loss over all pixels."""
    a, b = out - out.mean(), y - y.mean()
    r = (a * b).mean() / (a.std() * b.std() + 1e-8)
    p, t = out.sigmoid(), (y > 0).to(out.dtype)
    return 1 - r + 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def neighbours(out: Tensor, y: Tensor) -> Tensor:
    """Rows against the next rows and the flipped batch, as in losses of order and of time."""
    step_ = (out[1:] - out[:-1]).square().mean()
    return F.mse_loss(out, y) + 0.1 * step_ + F.relu(0.1 - (out.roll(1, 0) - out.flip(0)).abs()).mean()


def listwise(out: Tensor, y: Tensor) -> Tensor:
    """ListNet over the batch as one list, and a pairwise rank loss."""
    score, wanted = out[:, 0], y[:, 0]
    lists = -(wanted.softmax(0) * score.log_softmax(0)).sum()
    pairs = (wanted[:, None] > wanted[None]).to(out.dtype)
    return lists + (F.softplus(-(score[:, None] - score[None])) * pairs).sum() / pairs.sum()


def balanced(out: Tensor, y: Tensor, *, hot: bool = False) -> Tensor:
    """Classes weighed by their counts in the batch, focal."""
    labels = y.argmax(1)
    counts = F.one_hot(labels, 3).sum(0) if hot else torch.bincount(labels, minlength=3)
    counts = counts.to(out.dtype)
    weight = len(labels) / (3 * counts.clamp(min=1))
    chance = out.softmax(1).gather(1, labels[:, None]).squeeze(1)
    return (-((1 - chance) ** 2) * chance.log() * weight[labels]).mean()


def normalised_groups(out: Tensor, y: Tensor) -> Tensor:
    """GRPO: advantages normed in groups of two rows, a clipped ratio, and a divergence."""
    reward = y[:, 0].reshape(-1, 2)
    gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    logs = out.log_softmax(1)
    ratio = (logs - y.log_softmax(1)).exp()
    kl = ratio - 1 - ratio.log()
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) - 0.04 * kl).mean()


class Weighed(nn.Module):
    """Two tasks with learned uncertainties, in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = mlp(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(self.trunk(x))
        terms = torch.stack([F.mse_loss(self.heads[0](h), y), F.cross_entropy(self.heads[1](h), y.argmax(1))])
        return (terms * (-self.logs).exp() + self.logs).sum(), {"terms": terms.detach()}


def uncertain_tasks(ready: Ready) -> list[float]:
    """Learned weights of two tasks, no decay for them."""
    model = ready(Weighed())
    own = [p for n, p in model.named_parameters() if n.endswith("logs")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("logs")]
    groups = [{"params": own, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    losses = []
    for x, y in batches(4):
        loss, extras = model(x, y)
        losses += [step(optimizer, loss), *map(float, extras["terms"])]
    return [*losses, *map(float, whole(own[0])), summed(model)]


def preference(ready: Ready) -> list[float]:
    """DPO with a frozen reference, which is a copy of the policy before training, and padded answers."""
    net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    reference = ready(copy.deepcopy(net)).eval().requires_grad_(False)
    policy = ready(net)
    optimizer = torch.optim.RMSprop(policy.parameters(), 1e-3)

    def chances(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        logs = model(tokens[:, :-1]).log_softmax(-1)
        return (logs.gather(2, tokens[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(1)

    losses = []
    for number in range(3):
        tokens = ((torch.arange(80) * 7 + number * number) % 12).view(16, 5)
        mask = (torch.arange(5)[None] < torch.tensor([5, 3, 4, 2] * 4)[:, None]).double()
        own = chances(policy, tokens, mask)
        with torch.no_grad():
            known = chances(reference, tokens, mask)
        ratios = (own[:8] - own[8:]) - (known[:8] - known[8:])
        losses.append(step(optimizer, -F.logsigmoid(0.1 * ratios).mean()))
        losses.append(float((ratios > 0).double().mean()))
    return [*losses, summed(policy)]


class Reward(nn.Module):
    """A score of the last token that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.score = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        last = (tokens != 0).sum(1) - 1
        h = torch.tanh(self.body(self.embed(tokens).cumsum(1)))
        return self.score(h).squeeze(-1)[torch.arange(len(tokens)), last]


def rewards(ready: Ready) -> list[float]:
    """A reward model: pairs in one batch, margins, a centering term, and accuracy."""
    model = ready(Reward())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for number in range(3):
        tokens = (torch.arange(48).view(8, 6) * 5 + number) % 11 + 1
        tokens[torch.arange(6)[None] >= torch.tensor([6, 4, 5, 2] * 2)[:, None]] = 0
        chosen, rejected = model(tokens).chunk(2)
        loss = -F.logsigmoid(chosen - rejected - 0.1).mean() + 0.01 * (chosen + rejected).square().mean()
        losses += [step(optimizer, loss), float((chosen > rejected).double().mean())]
    return [*losses, summed(model)]


def soft_actor_critic(ready: Ready) -> list[float]:
    """SAC: twin critics frozen while the actor learns, moving targets, a temperature, all in one loop."""
    actor, critics = ready(mlp(6, 8, 6)), ready(nn.ModuleList([mlp(9, 8, 1), mlp(9, 8, 1)])[0])
    targets = ready(copy.deepcopy(mlp(9, 8, 1)))
    targets.load_state_dict(critics.state_dict())
    for p in targets.parameters():
        p.requires_grad = False
    temperature = torch.zeros((), dtype=torch.float64, requires_grad=True)
    of_actor, of_critics = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critics.parameters(), 1e-2)
    of_temperature = torch.optim.Adam([temperature], 1e-2)
    noise, losses = torch.Generator().manual_seed(5), []

    def act(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = actor(x).chunk(2, -1)
        drawn = torch.randn(mean.shape, generator=noise, dtype=torch.float64)
        raw = mean + log.clamp(-5, 2).exp() * drawn
        logs = (-0.5 * drawn**2 - log - 0.5 * math.log(2 * math.pi)).sum(-1) - 2 * (
            math.log(2) - raw - F.softplus(-2 * raw)
        ).sum(-1)
        return raw.tanh(), logs

    for x, y in batches(4):
        with torch.no_grad():
            taken, logs = act(x + 0.1)
            after = targets(torch.cat([x + 0.1, taken], -1)).squeeze(-1) - temperature.exp() * logs
            wanted = y[:, 0] + 0.99 * after
        losses.append(step(of_critics, F.mse_loss(critics(torch.cat([x, y.tanh()], -1)).squeeze(-1), wanted)))
        for p in critics.parameters():
            p.requires_grad = False
        taken, logs = act(x)
        gain = critics(torch.cat([x, taken], -1)).squeeze(-1)
        losses.append(step(of_actor, (temperature.exp().detach() * logs - gain).mean()))
        for p in critics.parameters():
            p.requires_grad = True
        losses.append(step(of_temperature, -(temperature.exp() * (logs.detach() - 3.0)).mean()))
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.data.copy_(0.05 * fast.data + 0.95 * slow.data)
    return [*losses, temperature.item(), summed(actor), summed(critics), summed(targets)]


def byol(ready: Ready) -> list[float]:
    """BYOL: a predictor, a target whose momentum follows a cosine, symmetric views, batch norms in both."""
    net = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))  # noqa: E731
    online, target, predictor = ready(net()), ready(net()), ready(mlp(4, 6, 4))
    target.load_state_dict(online.state_dict())
    for p in target.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1, momentum=0.9)
    losses = []
    for number, (x, _) in enumerate(batches()):
        views = (x, x * 0.9 + 0.1)
        with torch.no_grad():
            known = [F.normalize(target(v)) for v in views]
        seen = [F.normalize(predictor(online(v))) for v in views]
        loss = sum(2 - 2 * (s * k).sum(-1) for s, k in zip(seen, reversed(known), strict=True)).mean()
        losses.append(step(optimizer, loss))
        tau = 1 - (1 - 0.9) * (math.cos(math.pi * number / 3) + 1) / 2
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(tau).add_(fast, alpha=1 - tau)
            for slow, fast in zip(target.buffers(), online.buffers(), strict=True):
                slow.copy_(fast)
    return [*losses, *(whole(b).double().sum().item() for b in target.buffers()), summed(target), summed(online)]


def centers(ready: Ready) -> list[float]:
    """A center loss with parameters and an optimizer of its own, whose gradients are scaled back."""
    model = ready(mlp(6, 8, 3))
    points = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([points], 0.5)]
    losses = []
    for x, y in batches():
        out, labels = model(x), y.argmax(-1)
        loss = F.cross_entropy(out, labels) + 0.1 * (out - points[labels]).square().sum(1).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        points.grad.data *= 1 / 0.1
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return [*losses, points.sum().item(), summed(model)]


def gradient_norms(ready: Ready) -> list[float]:
    """GradNorm: weights of tasks follow norms of gradients at the last shared layer, by a second derivative."""
    model = ready(mlp(6, 8, 3))
    weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam([weights], 0.05)]
    losses = []
    for x, y in batches():
        out = model(x)
        tasks = torch.stack([F.mse_loss(out, y), F.cross_entropy(out, y.argmax(1))])
        (weights * tasks).sum().backward(retain_graph=True)
        weights.grad = None
        shared = model[2].weight
        grads = [torch.autograd.grad(w * t, shared, create_graph=True)[0] for w, t in zip(weights, tasks, strict=True)]
        norms = torch.stack([g.full_tensor().norm() if hasattr(g, "full_tensor") else g.norm() for g in grads])
        (weights.grad,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), weights)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            weights *= 2 / weights.sum()
        losses += [*map(float, tasks), *weights.tolist()]
    return [*losses, summed(model)]


OBJECTIVES: dict[str, Loop] = {
    "Cox's likelihood": inside(cox),
    "hardest rows": inside(hardest),
    "rows above a quantile": inside(above_median),
    "rows of one kind": inside(masked_rows),
    "Barlow twins": inside(barlow),
    "VICReg": inside(vicreg),
    "supervised contrastive": inside(supervised_contrastive),
    "hard triplets": inside(semihard),
    "prototypes": inside(prototypes),
    "SwAV's codes": inside(sinkhorn),
    "MMD": inside(discrepancy),
    "coding rate, nuclear norm": inside(rates),
    "correlation and Dice": inside(correlation),
    "neighbouring rows": inside(neighbours),
    "listwise and pairwise ranks": inside(listwise),
    "classes weighed by counts": inside(balanced),
    "the same, counted by one_hot": inside(functools.partial(balanced, hot=True)),
    "GRPO in groups": inside(normalised_groups),
    "uncertain tasks": uncertain_tasks,
    "DPO": preference,
    "reward model": rewards,
    "SAC": soft_actor_critic,
    "BYOL": byol,
    "center loss": centers,
    "GradNorm": gradient_norms,
}
