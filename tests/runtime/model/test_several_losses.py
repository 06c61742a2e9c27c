"""Several losses over one module: each that a plain argument chooses is a step of its own over the same parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

WIDTH, HIDDEN = 4, 8
Trained = tuple[list[float], dict[str, Tensor]]  # losses, and weights at the end


def layers(inputs: int, outputs: int) -> nn.Sequential:
    made = (nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))
    return nn.Sequential(*made).double()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Gan(nn.Module):
    """A generator and a discriminator; `part` says whose loss is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = layers(WIDTH, WIDTH), layers(WIDTH, 1)

    def forward(self, noise: Tensor, real: Tensor, *, part: str) -> Tensor:
        fake = self.generator(noise)
        if part == "generator":
            return F.softplus(-self.discriminator(fake)).mean()
        fakes = F.softplus(self.discriminator(fake.detach())).mean()
        return F.softplus(-self.discriminator(real)).mean() + fakes


class ActorCritic(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.actor, self.critic = (layers(WIDTH, HIDDEN), layers(HIDDEN, 3), layers(HIDDEN, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(states).tanh()
        return self.actor(seen), self.critic(seen)[:, 0]


def of_part(out: tuple[Tensor, Tensor], returns: Tensor, part: str) -> Tensor:
    """The loss of one head; the last entry of the batch says of which."""
    policy, value = out
    if part == "critic":
        return (value - returns).square().mean()
    advantage = (returns - value).detach()
    return -(policy.log_softmax(-1)[:, 0] * advantage).mean()


class Distilled(nn.Module):
    """A student and its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher, self.student = layers(WIDTH, 3), layers(WIDTH, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def of_student(out: tuple[Tensor, Tensor], target: Tensor, softly: bool) -> Tensor:
    student, teacher = out
    if softly:
        given = student.log_softmax(-1), teacher.log_softmax(-1)
        return F.kl_div(*given, reduction="batchmean", log_target=True)
    return (student - target[:, None]).square().mean()


def gan(model: nn.Module, step: Callable[..., Tensor]) -> Trained:
    optimizers = {name: adam(getattr(model, name)) for name in ("discriminator", "generator")}
    found = []
    for number in range(3):
        batch = numbers(number, 8, WIDTH), numbers(number + 10, 8, WIDTH)
        for part, optimizer in optimizers.items():
            model.zero_grad()  # the generator's step leaves gradients in the discriminator, too
            found.append(step(*batch, part=part).item())
            optimizer.step()
    return found, weights(model)


def in_turns(model: nn.Module, step: Callable[..., Tensor], parts: tuple[Any, ...]) -> Trained:
    optimizer, found = adam(model), []
    for number in range(3):
        for part in parts:
            found.append(step(numbers(number, 8, WIDTH), numbers(number + 10, 8), part).item())
            optimizer.step()
            optimizer.zero_grad()
    return found, weights(model)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {n: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for n, x in found.items()}


def train(kind: str, model: nn.Module, step: Callable[..., Tensor]) -> Trained:
    if kind == "gan":
        return gan(model, step)
    return in_turns(model, step, ("critic", "actor") if kind == "actor and critic" else (True, False))


KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "gan": (Gan, None),
    "actor and critic": (ActorCritic, of_part),
    "distillation": (Distilled, of_student),
}


@captured_once()
def on_a_rank(kind: str, options: dict[str, Any]) -> Trained:
    make, loss_fn = KINDS[kind]
    made = autopar.compile(make(), loss_fn=loss_fn, **options)
    return train(kind, made, made.step)


def in_one_process(kind: str) -> Trained:
    make, loss_fn = KINDS[kind]
    model = make()

    def step(*batch: Any, **kwargs: Any) -> Tensor:
        loss = model(*batch, **kwargs) if loss_fn is None else loss_fn(model(batch[0]), *batch[1:])
        loss.backward()
        return loss

    return train(kind, model, step)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, {"micro_batches": 2}),
    "ddp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "zero3, accumulation": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 2}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero2", "tp": "tp"}}),
}
ALWAYS = {  # every kind and every way; `make slow` runs the whole table
    ("gan", "accumulation"),
    ("gan", "tp"),
    ("actor and critic", "zero3, accumulation"),
    ("actor and critic", "dp x tp"),
    ("distillation", "accumulation"),
    ("distillation", "ddp"),
}


@pytest.mark.parametrize(("kind", "way"), often(itertools.product(KINDS, WAYS), ALWAYS))
def test_losses_in_turns_train_as_on_one_device(kind: str, way: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    count, options = WAYS[way]
    losses, expected = in_one_process(kind)
    ranks = {2: two_ranks, 4: four_ranks}
    results = ranks[count].run(on_a_rank, kind, options) if count > 1 else [on_a_rank(kind, options)]
    for found, own in results:
        assert found == pytest.approx(losses, rel=1e-9)
        assert max((own[name] - expected[name]).abs().max().item() for name in expected) < 1e-9


def test_through_stages_too(two_ranks: Ranks) -> None:
    losses, expected = in_one_process("gan")
    for found, own in two_ranks.run(on_a_rank, "gan", {"mesh": {"pp": 2}, "micro_batches": 2}):
        assert found == pytest.approx(losses, rel=1e-9)
        assert max((own[name] - expected[name]).abs().max().item() for name in own) < 1e-9


def policy_alone(out: tuple[Tensor, Tensor], returns: Tensor, part: str) -> Tensor:
    """Losses of which the actor's takes nothing from the critic."""
    policy, value = out
    return policy.square().mean() if part == "actor" else (value - returns).square().mean()


@captured_once()
def unused_first() -> tuple[list[str], float]:
    """The placements of the critic, which the first loss does not use; then the loss that does."""
    made = autopar.compile(ActorCritic(), loss_fn=policy_alone, mesh={"dp": 2}, recipe="zero3")
    batch = numbers(0, 8, WIDTH), numbers(1, 8)
    made.step(*batch, "actor")
    stored = [str(p.placements) for p in made.critic.parameters()]
    return stored, made.step(*batch, "critic").item()


def test_what_the_first_loss_does_not_use_lies_in_shards_all_the_same(two_ranks: Ranks) -> None:
    expected = policy_alone(ActorCritic()(numbers(0, 8, WIDTH)), numbers(1, 8), "critic").item()
    for stored, loss in two_ranks.run(unused_first):
        assert "(Shard(dim=0),)" in stored
        assert loss == pytest.approx(expected, rel=1e-12)
