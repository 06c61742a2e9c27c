"""Loops over models that people change or call in uncommon ways: growth, surgery, modes, results, errors in a step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.loop import Loop, Ready, batches, mlp, plain_loop, summed, whole
from tests.support.methods import step


class Growing(nn.Module):
    """Layers that are appended as training goes on, the newest faded in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head, self.alpha = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        new = torch.tanh(self.layers[-1](x))
        return self.head(new if len(self.layers) == 1 else (1 - self.alpha) * x + self.alpha * new)


def growing(ready: Ready) -> list[float]:
    """Progressive growing: a layer more after two steps, its weight grows, another group of the optimizer."""
    model = ready(Growing())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        if number == 2:
            torch.manual_seed(3)
            layer = nn.Linear(6, 6).double()
            model.layers.append(layer)
            model.alpha = 0.0
            optimizer.add_param_group({"params": model.layers[-1].parameters(), "lr": 5e-3})
        model.alpha = min(1.0, model.alpha + 0.25)
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
    return [*losses, float(sum(p.numel() for p in model.parameters())), summed(model)]


class Tied(nn.Module):
    """An embedding and a head, which a script may tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tied_later(ready: Ready, when: int = 0) -> list[float]:
    """Weights that are tied after the model was made ready, before a step of the given number."""
    model = ready(Tied())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(4):
        if number == when:
            model.head.weight = model.embed.weight
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        tokens = (torch.arange(24) * 5 + number).view(8, 3) % 12
        losses.append(step(optimizer, F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())))
    return [*losses, float(sum(p.numel() for p in model.parameters())), summed(model)]


def tied_in_training(ready: Ready) -> list[float]:
    """The same before the third step."""
    return tied_later(ready, 2)


def orthogonal(ready: Ready) -> list[float]:
    """An orthogonal weight and one that is symmetric, by parametrizations; one is taken away later."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    parametrizations.orthogonal(net[0])
    parametrize.register_parametrization(net[2], "weight", Symmetric())
    model = ready(net)
    return [
        *plain_loop(model),
        whole(model[2].weight).sum().item(),
        whole(model[0].weight.T @ model[0].weight).sum().item(),
    ]


def unparametrized(ready: Ready) -> list[float]:
    """Weight norm that is taken away after some steps, as before an export, and training that goes on."""
    net = mlp(6, 8, 3)
    parametrizations.weight_norm(net[0])
    model = ready(net)
    losses = plain_loop(model)
    parametrize.remove_parametrizations(model[0], "weight")
    model.train()
    return [*losses, *plain_loop(model)]


class Norms(nn.Module):
    """Batch norms, of which one stays in evaluation mode whatever `train` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.cumulative, self.bare = nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, track_running_stats=False)
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bare(torch.tanh(self.cumulative(self.frozen(self.first(x))))))


def odd_norms(ready: Ready) -> list[float]:
    """Batch norms: frozen by an own `train`, with cumulative statistics, without statistics; reset in between."""
    model = ready(Norms())
    model.train()
    losses = plain_loop(model)
    model.train()
    model.cumulative.reset_running_stats()
    losses += plain_loop(model)
    return [*losses, *(whole(b).double().sum().item() for b in model.buffers())]


class Checkpointed(nn.Module):
    """Blocks under the user's own activation checkpoints, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, 8), mlp(8, 8, 8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=False)
        return self.head(checkpoint_sequential(self.blocks, 2, h, use_reentrant=False))


def checkpointed(ready: Ready) -> list[float]:
    """Activation checkpoints of the script's own."""
    return plain_loop(ready(Checkpointed()))


class Reverse(torch.autograd.Function):
    """Gradient reversal, whose strength is an argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.strength * grad, None


class Adversarial(nn.Module):
    """Features for a label, and for a domain behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, strength: float) -> dict[str, Tensor]:
        h = torch.tanh(self.features(x))
        return {"label": self.label(h), "domain": self.domain(Reverse.apply(h, strength))}


def domain_adversarial(ready: Ready) -> list[float]:
    """DANN: two domains a step, and a strength that grows with the steps."""
    model = ready(Adversarial())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        strength = 2 / (1 + 2.718 ** (-number)) - 1
        source, target = model(x, strength), model(x * 0.5 + 1, strength)
        domains = F.cross_entropy(source["domain"], torch.zeros(8).long())
        domains = domains + F.cross_entropy(target["domain"], torch.ones(8).long())
        losses.append(step(optimizer, F.cross_entropy(source["label"], y.argmax(-1)) + domains))
    return [*losses, summed(model)]


class Codebook(nn.Module):
    """VQ-VAE: nearest codes, a straight-through gradient, and codes that follow by moving averages in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 8, 4), mlp(4, 8, 6)
        self.register_buffer("codes", torch.linspace(-1, 1, 20).view(5, 4).sin())
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 5).type_as(z)
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.clamp(min=1e-5).unsqueeze(1))
        commitment = F.mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach()), commitment, nearest


def quantized(ready: Ready) -> list[float]:
    """A VQ-VAE, evaluated between steps, whose dead codes are set anew from the batch."""
    model = ready(Codebook())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, _ in batches(4):
        model.train()
        found, commitment, _ = model(x)
        losses.append(step(optimizer, F.mse_loss(found, x) + 0.25 * commitment))
        model.eval()
        with torch.no_grad():
            found, commitment, nearest = model(x)
            losses += [F.mse_loss(found, x).item(), commitment.item(), *nearest.double().tolist()]
            dead = whole(model.sizes) < 0.8
            model.codes[dead] = x[: int(dead.sum()), :4]
    return [*losses, whole(model.codes).sum().item(), whole(model.sizes).sum().item(), summed(model)]


@dataclasses.dataclass
class Heads:
    """Results in a dataclass, some of which are None."""

    logits: Tensor
    hidden: list[Tensor]
    past: tuple[Tensor, Tensor] | None = None
    loss: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Rich(nn.Module):
    """Keywords that may be None, nested results, in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, labels: Tensor | None = None, scale: float = 1.0, with_past: bool = False) -> Heads:
        h = torch.tanh(self.first(x)) * scale
        logits = self.head(h)
        loss = None if labels is None else F.mse_loss(logits, labels)
        return Heads(logits, [h, h * 2], (h, h + 1) if with_past else None, loss)


def rich_results(ready: Ready) -> list[float]:
    """A dataclass with None in it, keywords that come and go; a loss inside, or outside where no labels were given."""
    model = ready(Rich())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        out = model(x, labels=y if number % 2 else None, scale=1.0 + number / 2, with_past=number > 1)
        loss = out.loss if out.loss is not None else F.mse_loss(out.logits, y)
        loss = loss + 0.01 * sum(h.square().mean() for h in out.hidden)
        if out.past is not None:
            loss = loss + 0.01 * out.past[1].mean()
        losses.append(step(optimizer, loss))
    return [*losses, summed(model)]


class Triple(nn.Module):
    """A named tuple of nested dicts, with entries that depend on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.auxiliary = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        h = torch.tanh(self.first(batch["inputs"]["x"]))
        return {"out": Pair(self.head(h), self.auxiliary(h) if self.training else None), "rows": len(h), "name": "t"}


def nested_batches(ready: Ready) -> list[float]:
    """A nested batch in a UserDict, as collators of Hugging Face give it; an auxiliary head in training alone."""
    model = ready(Triple())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        batch = UserDict({"inputs": {"x": x}, "labels": y, "ids": ["a"] * 8})
        model.train()
        found = model({"inputs": batch["inputs"]})
        out = found["out"]
        losses.append(step(optimizer, F.mse_loss(out.left, y) + 0.4 * F.mse_loss(out.right, y)) + found["rows"])
        model.eval()
        with torch.inference_mode():
            found = model({"inputs": batch["inputs"]})
            assert found["out"].right is None
            losses.append(F.mse_loss(found["out"].left, y).item())
    return [*losses, summed(model)]


def errors_and_on(ready: Ready) -> list[float]:
    """Batches that fail in the forward, in the loss and in backward are skipped, and training goes on."""
    model = ready(mlp(6, 8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses, skipped = [], 0
    for number, (x, y) in enumerate(batches(6)):
        if number == 1:
            x = x[:, :5]
        if number == 2:
            y = y[:, :2]
        try:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) if y.shape[1] == 3 else (model(x) - y).square().mean()
            if number == 4:
                raise KeyboardInterrupt
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except (RuntimeError, KeyboardInterrupt):
            skipped += 1
            model.zero_grad(set_to_none=True)
    return [*losses, float(skipped), summed(model)]


def watched(ready: Ready) -> list[float]:
    """Under the profiler, `record_function` and anomaly detection."""
    model = ready(mlp(6, 8, 3))
    with torch.profiler.profile() as profile, torch.autograd.detect_anomaly(check_nan=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for x, y in batches():
            with torch.profiler.record_function("forward"):
                loss = F.mse_loss(model(x), y)
            losses.append(step(optimizer, loss))
            profile.step()
    assert any(event.key == "forward" for event in profile.key_averages())
    return [*losses, summed(model)]


class Encoder(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(11, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.cell(packed)
        return self.head(hidden[-1])


def packed(ready: Ready) -> list[float]:
    """Sequences of changing lengths, packed in the forward."""
    model = ready(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, (_, y) in enumerate(batches()):
        tokens, lengths = (torch.arange(40).view(8, 5) * 3 + number) % 11, torch.tensor([5, 3, 4, 2, 5, 1, 2, 3])
        losses.append(step(optimizer, F.mse_loss(model(tokens, lengths.roll(number)), y)))
    return [*losses, summed(model)]


def two_in_one(ready: Ready) -> list[float]:
    """An encoder and a decoder, made ready apart, under one optimizer; the decoder runs as often as data say."""
    encoder, cell = ready(mlp(6, 8)), ready(nn.GRUCell(3, 8))
    optimizer = torch.optim.Adam([*encoder.parameters(), *cell.parameters()], 1e-2)
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        hidden = torch.tanh(encoder(x))
        for _ in range(1 + number % 3):
            hidden = cell(y, hidden)
        losses.append(step(optimizer, F.mse_loss(hidden[:, :3], y)))
        if float(hidden.mean()) > 0:
            losses.append(1.0)
    return [*losses, summed(encoder), summed(cell)]


def averaged_by_deepcopy(ready: Ready) -> list[float]:
    """timm's average: a deep copy of the model, whose state is moved entry by entry."""
    model = ready(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (x, y), *later = batches(4)
    losses = [step(optimizer, F.mse_loss(model(x), y))]
    average = copy.deepcopy(getattr(model, "original", model)).eval()
    for x, y in later:
        losses.append(step(optimizer, F.mse_loss(model(x), y)))
        with torch.no_grad():
            for old, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                old.copy_(0.9 * old + 0.1 * new if old.is_floating_point() else new)
    return [*losses, *(whole(v).double().sum().item() for v in average.state_dict().values()), summed(model)]


def partial_evaluation(ready: Ready) -> list[float]:
    """Evaluation in batches of 8, 8 and 3 rows under `inference_mode`, put together; metrics of all."""
    model = ready(mlp(6, 8, 3))
    losses = plain_loop(model)
    model.eval()
    found, wanted = [], []
    (x, y), *_ = batches(1, rows=19)
    with torch.inference_mode():
        for rows in torch.arange(19).split(8):
            found.append(model(x[rows]).cpu())
            wanted.append(y[rows])
    scores, labels = torch.cat(found), torch.cat(wanted).argmax(-1)
    confusion = torch.bincount(labels * 3 + scores.argmax(-1), minlength=9)
    return [
        *losses,
        *confusion.double().tolist(),
        float(scores.numpy().mean()),
        float((scores.argmax(-1) == labels).sum()),
    ]


class Gated(nn.Module):
    """Layers that a mask, drawn by the script, switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = (
            nn.Linear(6, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor, on: Any) -> Tensor:
        x = self.first(x)
        for keep, block in zip(on, self.blocks, strict=True):
            x = x + keep * torch.tanh(block(x))
        return self.head(x)


def stochastic_depth(ready: Ready) -> list[float]:
    """Stochastic depth whose masks are drawn outside: tensors in one half of the steps, bools in the other."""
    model = ready(Gated())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator, losses = torch.Generator().manual_seed(3), []
    for number, (x, y) in enumerate(batches(6)):
        on = torch.rand(3, generator=generator) > 0.4
        losses.append(step(optimizer, F.mse_loss(model(x, on.double() if number < 3 else on.tolist()), y)))
    return [*losses, summed(model)]


def accumulating_flags(ready: Ready) -> list[float]:
    """nanoGPT's accumulation: a flag of DDP set on the model, losses scaled, the next batch asked for in between."""
    model = ready(Rich())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95))
    losses, data = [], iter(batches(7))
    x, y = next(data)
    for _ in range(2):
        for micro in range(3):
            with contextlib.suppress(AttributeError):
                model.require_backward_grad_sync = micro == 2
            loss = model(x, labels=y).loss / 3
            x, y = next(data)
            loss.backward()
        losses += [loss.item() * 3, float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [*losses, summed(model)]


MODULES: dict[str, Loop] = {
    "progressive growing": growing,
    "tied before the first step": tied_later,
    "tied in training": tied_in_training,
    "orthogonal and symmetric weights": orthogonal,
    "weight norm taken away": unparametrized,
    "batch norms in odd modes": odd_norms,
    "checkpoints of the script": checkpointed,
    "DANN": domain_adversarial,
    "VQ-VAE with moving codes": quantized,
    "results in a dataclass": rich_results,
    "nested batches": nested_batches,
    "errors, and on": errors_and_on,
    "profiler and anomalies": watched,
    "packed sequences": packed,
    "two models in one loop": two_in_one,
    "average by deepcopy": averaged_by_deepcopy,
    "evaluation in uneven batches": partial_evaluation,
    "stochastic depth, masks given": stochastic_depth,
    "accumulation as in nanoGPT": accumulating_flags,
}
