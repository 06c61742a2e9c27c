"""Optimizer states in other formats on two ranks: their bytes, parity with one process, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

import autopar
from autopar.cost_model.optimizers import OPTIMIZERS
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, load_optimizer_state, save_checkpoint
from autopar.runtime.formats.block_states import in_blocks, values_of
from autopar.runtime.parameters.adafactor import Adafactor
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import mean_square
from tests.support.staged import captured_once

pytest.importorskip("torchao", reason="needs the extra autopar[torchao]")

X, Y = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
DP2, TP2 = ({"dp": 2}, "zero3"), ({"tp": 2}, "tp")
WHOLE = ({"dp": 2}, "ddp")


def make() -> nn.Module:
    """Two matrices of 16,384 elements, in blocks also as halves, and two vectors that never are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


class MuonAndAdamW:
    """Muon for the matrices, and AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.both = torch.optim.Muon(matrices), AdamW(others)

    @property
    def state(self) -> dict[Any, Any]:
        return {p: state for each in self.both for p, state in each.state.items()}

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


def optimizer_of(name: str, model: nn.Module, lr: float = 1e-2) -> Optimizer:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    from autopar.integrations.torchao import AdamWBf16

    torch.compiler.set_stance("force_eager")  # to compile the optimizer would take most of a minute
    makers: dict[str, Any] = {
        "adamw": AdamW,
        "adamw8bit": AdamW8bit,
        "adamw4bit": AdamW4bit,
        "adamwfp8": AdamWFp8,
        "adamwbf16": AdamWBf16,
        "sgd": SGD,
        "adafactor": Adafactor,
    }
    if name == "muon":
        return MuonAndAdamW(model)  # type: ignore[return-value]
    if name == "sgd-momentum":
        return SGD(model.parameters(), lr=lr, momentum=0.9)
    return makers[name](model.parameters(), lr=lr)


def compiled(mesh: dict[str, int], recipe: str, state: str = "adamw") -> autopar.CompiledModule:
    return autopar.compile(
        make(), loss_fn=mean_square, mesh=mesh, recipe=recipe, example_inputs=(X, Y), training_state=state
    )


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        if isinstance(model, autopar.CompiledModule):
            loss = model.step(X, Y)
        else:
            loss = mean_square(model(X), Y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone(name: str, steps: int) -> list[float]:
    model = make()
    return train(model, optimizer_of(name, model), steps)


# --- bytes


def counted_bytes(state: Tensor) -> int:
    """Bytes of the memory of a state's tensors on this rank."""
    local = state.to_local() if isinstance(state, DTensor) else state
    if in_blocks(local):
        return sum(counted_bytes(getattr(local, name)) for name in local.__tensor_flatten__()[0])
    return local.untyped_storage().nbytes()


@captured_once()
def counted_and_priced(name: str, mesh: dict[str, int], recipe: str) -> tuple[int, float]:
    model = compiled(mesh, recipe, name)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, 1)
    states = [own for own in optimizer.state.values()]
    counted = sum(
        counted_bytes(state)
        for own in states
        for key, state in own.items()
        if key != "step" and isinstance(state, Tensor)
    )
    parts = {part.name: part.value for part in model.explain().memory.parts}
    return counted, parts.get("optimizer", 0.0)


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh, recipe", [DP2, TP2, WHOLE], ids=["zero3", "tp", "ddp"])
def test_states_take_the_bytes_that_were_priced(two_ranks: Ranks, mesh: dict[str, int], recipe: str) -> None:
    for name in OPTIMIZERS:
        for counted, priced in two_ranks.run(counted_and_priced, name, mesh, recipe):
            assert counted == priced, name


# --- parity


@captured_once()
def losses(name: str, mesh: dict[str, int], recipe: str, steps: int) -> list[float]:
    model = compiled(mesh, recipe)
    return train(model, optimizer_of(name, model), steps)


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh, recipe", [DP2, TP2], ids=["zero3", "tp"])
def test_factors_are_those_of_one_process(two_ranks: Ranks, mesh: dict[str, int], recipe: str) -> None:
    expected = alone("adafactor", 5)
    for found in two_ranks.run(losses, "adafactor", mesh, recipe, 5):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit", "adamwfp8", "adamwbf16"])
def test_losses_are_those_of_one_process_where_blocks_are_the_same(two_ranks: Ranks, name: str) -> None:
    """Parts of rows have the blocks of the whole; sums over ranks round differently, as with any optimizer."""
    expected = alone(name, 5)
    for found in two_ranks.run(losses, name, *DP2, 5):
        assert found == pytest.approx(expected, rel=1e-5)


# --- checkpoints


def saved(folder: str, name: str, mesh: dict[str, int], recipe: str) -> list[float]:
    """Three steps, a checkpoint, and the losses of two more."""
    model = compiled(mesh, recipe)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, 3)
    save_checkpoint(folder, model, optimizer)
    return train(model, optimizer, 2)


def resumed(folder: str, name: str, mesh: dict[str, int], recipe: str) -> tuple[list[float], list[str]]:
    """Losses of two steps after loading, and the formats that the states have by then."""
    model = compiled(mesh, recipe)
    optimizer = optimizer_of(name, model, lr=0.5)  # which the checkpoint replaces
    load_checkpoint(folder, model, optimizer)
    return train(model, optimizer, 2), formats(optimizer)


def formats(optimizer: Optimizer) -> list[str]:
    found = set()
    for own in optimizer.state.values():
        local = own["exp_avg"].to_local() if isinstance(own["exp_avg"], DTensor) else own["exp_avg"]
        found.add(f"{type(local).__name__} {local.dtype}")
    return sorted(found)


NATIVE = {
    "adamw8bit": ["OptimState8bit torch.float32", "Tensor torch.float32"],
    "adamw4bit": ["OptimState4bit torch.float32", "Tensor torch.float32"],
    "adamwfp8": ["OptimStateFp8 torch.float32", "Tensor torch.float32"],
    "adamwbf16": ["Tensor torch.bfloat16", "Tensor torch.float32"],
    "adamw": ["Tensor torch.float32"],
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit", "adamwfp8", "adamwbf16"])
def test_training_goes_on_bit_for_bit_under_the_same_plan(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "c")
    expected = two_ranks.run(saved, folder, name, *DP2)
    assert two_ranks.run(resumed, folder, name, *DP2) == [(each, NATIVE[name]) for each in expected]


@pytest.mark.multiprocess
@pytest.mark.parametrize("before, after", [("adamw8bit", "adamw8bit"), ("adamw", "adamw8bit"), ("adamw8bit", "adamw")])
def test_under_another_plan_or_optimizer_values_are_quantised_again(
    two_ranks: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    """The columns of a matrix have other blocks than its rows; the losses stay near."""
    folder = str(tmp_path / "c")
    expected = two_ranks.run(saved, folder, before, *DP2)
    for (found, kept), wanted in zip(two_ranks.run(resumed, folder, after, *TP2), expected, strict=True):
        assert kept == NATIVE[after]
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)  # the same parameters
        assert found[1] == pytest.approx(wanted[1], rel=2e-3)  # other moments


def from_plain(name: str) -> tuple[float, list[str]]:
    """Largest error of a moment that was loaded from a plain optimizer, in parts of the moment's largest value."""
    plain = make()
    before = optimizer_of(name, plain)
    train(plain, before, 3)
    model = compiled(*DP2)
    optimizer = optimizer_of(name, model)
    load_optimizer_state(model, optimizer, before.state_dict())
    worst = 0.0
    for old, new in zip(before.state.values(), optimizer.state.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            expected, found = values_of(old[key]), values_of(new[key]).full_tensor()
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst, formats(optimizer)


@pytest.mark.multiprocess
def test_plain_states_in_blocks_are_loaded_into_shards(two_ranks: Ranks) -> None:
    """64 values lie between 0.1 and 1, 0.014 apart, and 1 is one of them while -1 is none: 0.007 at most."""
    for worst, kept in two_ranks.run(from_plain, "adamw8bit"):
        assert kept == NATIVE["adamw8bit"]
        assert worst <= 0.0071


def test_the_values_of_a_whole_tensor_are_itself() -> None:
    x = torch.ones(3)
    assert values_of(x) is x and not in_blocks(x)
