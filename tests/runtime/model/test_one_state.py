"""State is one: every program of a compiled module reads parameters and buffers as the last one left them."""

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

pytestmark = pytest.mark.multiprocess

WIDTH = 6
MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}, "recipe": "zero3"},
    "tp": {"mesh": {"tp": 2}, "recipe": "tp"},
    "pp": {"mesh": {"pp": 2}},
}
Act = Callable[[Any], Any]


class Centred(nn.Module):
    """Moves and reads a mean before its last layer or behind it: with stages, on the first rank or on the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor, part: str) -> Tensor:
        h = self.first(x).tanh()
        if part == "read first":
            return F.mse_loss(self.last(h + self.mean * self.count), x)
        y = self.last(h)
        if part == "read last":
            y = y + self.mean * self.count
        else:
            with torch.no_grad():
                self.mean.lerp_((h if part == "move first" else y).mean(0), 0.5)
                self.count.add_(1)
        return F.mse_loss(y, x)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model: Any, part: str) -> float:
    if isinstance(model, autopar.CompiledModule):
        return model.step(numbers(1, 8, WIDTH), part).item()
    loss = model(numbers(1, 8, WIDTH), part)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.item()


@torch.no_grad()
def evaluation(model: Any, part: str) -> float:
    return step(model, part)


@torch.no_grad()
def call(model: Any, part: str) -> float:
    return model(numbers(2, 8, WIDTH), part).item()


def update(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)


def load(model: Any) -> None:
    model.load_state_dict({name: x / 2 for name, x in Centred().state_dict().items()})


def assign(model: Any) -> None:
    values = Centred().state_dict()
    for name, p in model.named_parameters():
        p.data = values[name] / 3


def swap(model: Any) -> None:
    """Other values for a while, as averages are evaluated, and back those that were kept."""
    kept = {name: p.data for name, p in model.named_parameters()}
    assign(model)
    for name, p in model.named_parameters():
        p.data = kept[name]


def shift(model: Any) -> None:
    model.mean.add_(0.25)


def buffers(model: Any) -> list[float]:
    return [x for _, value in model.named_buffers() for x in value.reshape(-1).tolist()]


def state(model: Any) -> list[float]:
    return [x for name in ("mean", "count") for x in model.state_dict()[name].reshape(-1).tolist()]


def running(door: Callable[[Any, str], float], part: str) -> Act:
    return lambda model: door(model, part)


WRITERS: dict[str, Act] = {
    f"{door.__name__}: {part}": running(door, part)
    for door in (step, evaluation, call)
    for part in ("move first", "move last")
} | {"update": update, "load": load, "assign": assign, "swap": swap, "shift": shift}
READERS: dict[str, Act] = {
    f"{door.__name__}: {part}": running(door, part)
    for door in (step, evaluation, call)
    for part in ("read first", "read last")
} | {"buffers": buffers, "state": state}


@captured_once()
def pairs_that_differ(mesh: str) -> list[str]:
    """The pairs of a writer and a reader after which a compiled model does not read what a plain one does."""
    plain, made = Centred(), autopar.compile(Centred(), **MESHES[mesh])
    step(plain, "move first"), step(made, "move first")
    wrong = []
    for (writer, write), (reader, read) in itertools.product(WRITERS.items(), READERS.items()):
        write(plain), write(made)
        if read(made) != pytest.approx(read(plain), rel=1e-9, abs=1e-12):
            wrong.append(f"{writer} > {reader}")
    gap = max(
        (whole(p.grad) - q.grad).abs().max().item()
        for (name, p), q in zip(made.named_parameters(), own(plain, made), strict=True)
    )
    return wrong + ([f"gradients by {gap}"] if gap > 1e-9 else [])


def own(plain: nn.Module, made: nn.Module) -> list[nn.Parameter]:
    """The plain parameters that this rank holds."""
    return [dict(plain.named_parameters())[name] for name, _ in made.named_parameters()]


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("mesh", MESHES)
def test_every_program_reads_what_the_last_one_wrote(two_ranks: Ranks, mesh: str) -> None:
    assert two_ranks.run(pairs_that_differ, mesh) == [[], []]


# --- hooks


@captured_once()
def losses_with_hooks() -> tuple[list[float], list[float], str, list[str]]:
    """Losses of a compiled model and of a plain one with hooks put and removed; a refusal; entries by a state hook."""
    made = autopar.compile(Centred(), mesh={"dp": 2}, recipe="ddp")
    found = [hooked_losses(made), hooked_losses(Centred())]
    made.register_state_dict_post_hook(without_count)
    made.register_full_backward_hook(lambda *_: None)
    with pytest.raises(autopar.CaptureError) as refused:
        step(made, "read first")
    return found[0], found[1], str(refused.value), list(made.state_dict())


def without_count(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: Any) -> None:
    state.pop(prefix + "count")


def hooked_losses(model: Any) -> list[float]:
    losses = [step(model, "read last")]
    double = model.register_forward_pre_hook(lambda _, args: (args[0] * 2, args[1]))
    losses += [step(model, "read last"), call(model, "read last")]
    model.register_forward_hook(lambda _, __, out: out * 3)
    losses += [step(model, "read last"), call(model, "read last")]
    double.remove()
    return [*losses, step(model, "read last"), call(model, "read last")]


def test_hooks_of_the_compiled_module_are_those_of_the_model(two_ranks: Ranks) -> None:
    for found, expected, refused, entries in two_ranks.run(losses_with_hooks):
        assert found == pytest.approx(expected, rel=1e-12)
        assert refused.startswith("There are backward hooks on the model itself")
        assert entries == ["mean", "first.weight", "first.bias", "last.weight", "last.bias"]


def test_a_compiled_module_is_an_instance_of_the_models_class() -> None:
    made = autopar.compile(Centred())
    assert isinstance(made, Centred) and isinstance(made, autopar.CompiledModule)
    assert not isinstance(made.original, autopar.CompiledModule) and not isinstance(made, nn.Linear)
