"""Training loops of known methods (VAE, DETR, MoCo, DINO, ...), as people write them for one device.

As in `own_loops`, each takes `ready` and returns the numbers by which two runs are compared.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from tests.support.loop import Loop, Ready, batches, mlp, summed, whole


def step(optimizer: Any, loss: Tensor) -> float:
    """A step of an optimizer down a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Autoencoder(nn.Module):
    """An encoder to means and variances, and a decoder; the noise is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 8, 4), mlp(2, 8, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + noise * torch.exp(0.5 * variance)), mean, variance


def vae(ready: Ready) -> list[float]:
    """A reconstruction, and a divergence whose weight grows; then samples from the decoder alone."""
    model = ready(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for number, (x, _) in enumerate(batches()):
        noise = torch.randn(8, 2, generator=generator, dtype=torch.float64)
        found, mean, variance = model(x, noise)
        divergence = -0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())
        losses.append(step(optimizer, F.mse_loss(found, x, reduction="sum") + 0.1 * number * divergence))
    return [*losses, summed(model.decoder), summed(model)]


class Detector(nn.Module):
    """Four boxes with classes for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.boxes = mlp(6, 8), nn.Linear(8, 12), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        return {"classes": self.classes(h).view(-1, 4, 3), "boxes": self.boxes(h).view(-1, 4, 4).sigmoid()}


def detr(ready: Ready) -> list[float]:
    """A Hungarian matching of boxes to targets of changing number, on detached costs; losses of what is matched."""
    model = ready(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for x, y in batches():
        out = model(x)
        targets = [{"labels": torch.arange(1 + i % 3) % 2, "boxes": y[i].repeat(2)[:4].sigmoid()} for i in range(8)]
        labels = torch.full((8, 4), 2)
        distances = []
        for i, target in enumerate(targets):
            wanted = target["boxes"].expand(len(target["labels"]), 4)
            with torch.no_grad():
                chances = out["classes"][i].softmax(-1)[:, target["labels"]]
                cost = torch.cdist(out["boxes"][i], wanted, p=1) - chances
            rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
            labels[i, rows] = target["labels"][columns]
            distances.append(F.l1_loss(out["boxes"][i][rows], wanted[columns], reduction="sum"))
        weights = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64)
        found = F.cross_entropy(out["classes"].transpose(1, 2), labels, weights)
        count = sum(len(t["labels"]) for t in targets)
        losses.append(step(optimizer, found + 5 * torch.stack(distances).sum() / count))
    return [*losses, summed(model)]


class Speech(nn.Module):
    """A convolution and a recurrent layer over time, and the chances of four letters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.recurrent = nn.Conv1d(2, 4, 3, padding=1), nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(F.relu(self.convolution(x)).transpose(1, 2))
        return self.head(h).log_softmax(-1)


def ctc(ready: Ready) -> list[float]:
    """CTC with lengths of inputs and targets, and a decoding by the best path."""
    model = ready(Speech())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses: list[float] = []
    for x, _ in batches():
        x = x.repeat(1, 2).view(8, 2, 6)
        chances = model(x).transpose(0, 1)
        targets, lengths = torch.tensor([[1, 2], [3, 0]] * 4), torch.tensor([2, 1] * 4)
        loss = F.ctc_loss(chances, targets, torch.tensor([6, 5] * 4), lengths, zero_infinity=True)
        losses += [step(optimizer, loss), *map(float, chances.argmax(-1).sum(0))]
    return [*losses, summed(model)]


def moco(ready: Ready) -> list[float]:
    """A momentum encoder of the same kind, and a queue of its keys as negatives."""
    query = ready(mlp(6, 8, 4))
    key = ready(copy.deepcopy(mlp(6, 8, 4)))
    key.load_state_dict(query.state_dict())
    for p in key.parameters():
        p.requires_grad_(False)
    queue = F.normalize(torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4).sin())
    optimizer = torch.optim.SGD(query.parameters(), 0.1, momentum=0.9)
    losses = []
    for number, (x, _) in enumerate(batches()):
        queries = F.normalize(query(x))
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            keys = F.normalize(key(x + 0.1))
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / 0.2
        losses.append(step(optimizer, F.cross_entropy(scores, torch.zeros(8, dtype=torch.long))))
        queue[8 * (number % 2) :][:8] = keys
    return [*losses, queue.sum().item(), summed(key), summed(query)]


def dino(ready: Ready) -> list[float]:
    """A teacher that follows the student, centered and sharpened; several views; the last layer waits for a step."""
    student, teacher = ready(mlp(6, 8, 5)), ready(mlp(6, 8, 5))
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    center = torch.zeros(1, 5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    losses = []
    for number, (x, _) in enumerate(batches()):
        views = [x, x + 0.1, x * 0.9]
        seen = student(torch.cat(views)).chunk(3)
        with torch.no_grad():
            known = teacher(torch.cat(views[:2])).chunk(2)
        terms = [
            -(F.softmax((k - center) / 0.4, -1) * F.log_softmax(s / 0.9, -1)).sum(-1).mean()
            for (i, k), (j, s) in itertools.product(enumerate(known), enumerate(seen))
            if i != j
        ]
        loss = sum(terms) / len(terms)
        optimizer.zero_grad()
        loss.backward()
        if number == 0:
            for name, p in student.named_parameters():
                if name.startswith("2."):
                    p.grad = None
        nn.utils.clip_grad_norm_(student.parameters(), 0.3)
        optimizer.step()
        with torch.no_grad():
            center = center * 0.9 + torch.cat(known).mean(0, keepdim=True) * 0.1
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
        losses.append(loss.item())
    return [*losses, center.sum().item(), summed(teacher), summed(student)]


def distillation(ready: Ready) -> list[float]:
    """A frozen teacher in evaluation mode, which is made ready, too; soft and hard targets."""
    teacher, student = ready(mlp(6, 12, 3)).eval(), ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    losses = []
    for x, y in batches():
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, -1)
        out = student(x)
        loss = F.kl_div(F.log_softmax(out / 2, -1), soft, reduction="batchmean") * 4
        losses.append(step(optimizer, 0.7 * loss + 0.3 * F.cross_entropy(out, y.argmax(-1))))
    return [*losses, summed(teacher), summed(student)]


def penalised_judge(ready: Ready) -> list[float]:
    """R1: the squared gradient of a judge at real samples, in every other step, gathered over two parts of a batch."""
    judge = ready(mlp(6, 8, 1))
    optimizer = torch.optim.Adam(judge.parameters(), 1e-2)
    losses = []
    for number, (x, _) in enumerate(batches(4)):
        optimizer.zero_grad()
        for part in x.chunk(2):
            loss = F.softplus(-judge(part)).mean() / 2
            loss.backward()
            if number % 2 == 0:
                real = part.detach().requires_grad_()
                (slope,) = torch.autograd.grad(judge(real).sum(), real, create_graph=True)
                penalty = slope.pow(2).sum(1).mean() * 5 / 2
                penalty.backward()
                losses.append(penalty.item())
            losses.append(loss.item())
        optimizer.step()
    return [*losses, summed(judge)]


class Text(nn.Module):
    """Attention over tokens, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.project, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.project(self.embedding(tokens)).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def curriculum(ready: Ready) -> list[float]:
    """Sequences grow, batches shrink, padding is ignored, and the rate follows the tokens."""
    model = ready(Text())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for length, rows in ((4, 8), (6, 6), (8, 4), (4, 8)):
        tokens = (torch.arange(rows * (length + 1)) * 7 % 11).view(rows, length + 1)
        targets = tokens[:, 1:].clone()
        targets[::2, length // 2 :] = -100
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * length
        logits = model(tokens[:, :-1])
        losses.append(step(optimizer, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)))
    return [*losses, summed(model)]


def mixup(ready: Ready) -> list[float]:
    """Mixed rows and labels, label smoothing, and accuracy of each step."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    generator, losses = torch.Generator().manual_seed(2), []
    for x, y in batches():
        labels, order = y.argmax(-1), torch.randperm(8, generator=generator)
        part = torch.rand((), generator=generator, dtype=torch.float64)
        out = model(part * x + (1 - part) * x[order])
        loss = part * F.cross_entropy(out, labels, label_smoothing=0.1) + (1 - part) * F.cross_entropy(
            out, labels[order], label_smoothing=0.1
        )
        losses += [step(optimizer, loss), (out.argmax(-1) == labels).double().mean().item()]
    return [*losses, summed(model)]


def swa_with_statistics(ready: Ready) -> list[float]:
    """SWA with averaged buffers, a rate of its own, and new statistics of batch norms at the end."""
    model = ready(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule, average = None, None
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        if number == 1:
            average = torch.optim.swa_utils.AveragedModel(getattr(model, "original", model), use_buffers=True)
            schedule = torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
        if schedule is not None and average is not None:
            average.update_parameters(model)
            schedule.step()
            losses.append(optimizer.param_groups[0]["lr"])
    assert average is not None
    found = [whole(b).double().sum().item() for b in average.module.buffers()]
    model.load_state_dict(average.module.state_dict())
    model.eval()
    return [*losses, *found, F.mse_loss(model(x), y).item(), summed(model)]


class Adapted(nn.Module):
    """A frozen linear layer with two narrow ones, which can be merged and taken out again."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + 0.5 * self.up(self.down(x))

    def merge(self, sign: float = 1.0) -> None:
        with torch.no_grad():
            self.base.weight += sign * 0.5 * self.up.weight @ self.down.weight
        self.merged = sign > 0


def lora_merged(ready: Ready) -> list[float]:
    """LoRA that is merged for an evaluation in between, and taken out to train on; the adapters are saved alone."""
    net = mlp(6, 8, 3)
    net[0], net[2] = Adapted(net[0]), Adapted(net[2])  # type: ignore[arg-type]
    model = ready(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for x, y in batches():
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        model[0].merge(), model[2].merge()
        model.eval()
        with torch.no_grad():
            losses.append(F.mse_loss(model(x), y).item())
        model.train()
        model[0].merge(-1.0), model[2].merge(-1.0)
    kept = {k: whole(v) for k, v in model.state_dict().items() if ".base." not in k}
    missing = model.load_state_dict(kept, strict=False).missing_keys
    return [*losses, float(len(missing)), F.mse_loss(model(x), y).item(), summed(model)]


class Early(nn.Module):
    """A result after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer, out in zip(self.layers, self.exits, strict=True):
            x = torch.tanh(layer(x))
            found.append(out(x))
        return found


def early_exits(ready: Ready) -> list[float]:
    """A weighted loss of every exit, the last of which teaches the others; in the last step one exit is trained."""
    model = ready(Early())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(batches()):
        exits = model(x)
        terms = [(i + 1) * F.mse_loss(out, y) for i, out in enumerate(exits)]
        terms += [F.mse_loss(out, exits[-1].detach()) for out in exits[:-1]]
        losses.append(step(optimizer, terms[1] if number == 2 else sum(terms)))
    return [*losses, summed(model)]


def lookahead(ready: Ready) -> list[float]:
    """Slow weights, towards which the fast ones are pulled back in every second step."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    slow = [p.clone().detach() for p in model.parameters()]
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        if number % 2:
            for p, q in zip(model.parameters(), slow, strict=True):
                q.data.add_(p.data - q.data, alpha=0.5)
                p.data.copy_(q.data)
    return [*losses, summed(model)]


class Actor(nn.Module):
    """Chances of three actions, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = mlp(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.policy(h), self.value(h).squeeze(-1)


def ppo_epochs(ready: Ready) -> list[float]:
    """PPO: old log-probabilities and advantages of a rollout, epochs of shuffled parts, early stop by divergence."""
    model = ready(Actor())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)
    generator, losses = torch.Generator().manual_seed(4), []
    for x, y in batches(2):
        with torch.no_grad():
            logits, values = model(x)
            actions = y.argmax(-1)
            old = torch.distributions.Categorical(logits=logits).log_prob(actions)
            rewards, gains = y[:, 0], torch.zeros(9, dtype=torch.float64)
            for i in reversed(range(8)):
                after = values[i + 1] if i < 7 else 0.0
                gains[i] = rewards[i] + 0.99 * after - values[i] + 0.95 * 0.99 * gains[i + 1]
            gains = gains[:8]
            returns = gains + values
        for _ in range(2):
            order = torch.randperm(8, generator=generator)
            for rows in order.split(4):
                logits, now = model(x[rows])
                chosen = torch.distributions.Categorical(logits=logits)
                ratio = (chosen.log_prob(actions[rows]) - old[rows]).exp()
                advantage = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
                policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                clipped = values[rows] + (now - values[rows]).clamp(-0.2, 0.2)
                value = torch.max((now - returns[rows]) ** 2, (clipped - returns[rows]) ** 2).mean()
                loss = policy + 0.5 * value - 0.01 * chosen.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
            if (old[rows] - chosen.log_prob(actions[rows])).mean() > 0.5:
                break
    return [*losses, summed(model)]


def reptile(ready: Ready) -> list[float]:
    """Reptile: after each task the state is moved back towards the one before, entry by entry of state dicts."""
    model = ready(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    losses = []
    for x, y in batches():
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses += [step(optimizer, F.mse_loss(model(x), y)) for _ in range(2)]
        after = model.state_dict()
        model.load_state_dict(
            {k: before[k] + (after[k] - before[k]) * 0.5 if v.is_floating_point() else v for k, v in after.items()}
        )
    return [*losses, *(whole(b).double().sum().item() for b in model.buffers()), summed(model)]


METHODS: dict[str, Loop] = {
    "VAE": vae,
    "DETR, Hungarian matching": detr,
    "CTC": ctc,
    "MoCo with a queue": moco,
    "DINO": dino,
    "knowledge distillation": distillation,
    "R1 penalty, accumulated": penalised_judge,
    "lengths and batches that change": curriculum,
    "mixup": mixup,
    "SWA with averaged buffers": swa_with_statistics,
    "LoRA merged and unmerged": lora_merged,
    "early exits": early_exits,
    "Lookahead": lookahead,
    "PPO in epochs": ppo_epochs,
    "Reptile over state dicts": reptile,
}
