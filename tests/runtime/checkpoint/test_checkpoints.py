"""Checkpoints of real ranks: saved under one plan, loaded under another; and a rank that dies in a save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture.export import run_with_loss
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.gloo_ranks import CONTEXT, Ranks, equal_on_all, join
from tests.runtime.models import MLP, Normed, Tied, make, mean_square
from tests.runtime.training import difference, drawn, full_state
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

Recipe = str | dict[str, str] | int


class Partly(nn.Module):
    """One layer is frozen, one is not used; no mesh divides the widths; and there is a lone number."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 7)
        self.used = nn.Linear(7, 8)
        self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(torch.relu(self.frozen(x))) * self.scale


def a_model(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    if name != "partly":
        return make(name)
    _, batch, loss_fn = make("mlp")
    return Partly().double(), batch, loss_fn


def go_on(model: nn.Module, step: Any, optimizer: Any, batch: Any, steps: int) -> dict[str, Any]:
    """Losses of further steps, with clipped gradients, and the full state after them."""
    losses = []
    for _ in range(steps):
        losses.append(step(*batch).item())
        clip = getattr(model, "clip_grad_norm_", None)
        clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Eps as in tests/runtime/training.py, and for the same reason."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-6)


def in_one_process(name: str, *, load: str | None = None, save: str | None = None, steps: int = 5) -> dict[str, Any]:
    """What a process without autopar gets, from the beginning or from a checkpoint."""
    model, batch, loss_fn = a_model(name)
    optimizer = adamw(model)
    if load is not None:
        load_checkpoint(load, model, optimizer)

    def step(*batch: Tensor) -> Tensor:
        loss = run_with_loss(model, batch, {}, loss_fn)
        loss.backward()
        return loss.detach()

    found = go_on(model, step, optimizer, batch, steps)
    if save is not None:
        save_checkpoint(save, model, optimizer, step=5)
    return found


def compiled(name: str, mesh: dict[str, int] | str, recipe: Recipe) -> autopar.CompiledModule:
    """With its plan, which is a random one where the recipe is a seed."""
    model, batch, loss_fn = a_model(name)
    if not isinstance(recipe, int):
        return autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, example_inputs=batch)
    plan = drawn(name, mesh, recipe)
    return autopar.compile(model, loss_fn=loss_fn, plan=plan, example_inputs=batch)


@captured_once()
def half(name: str, path: str, mesh: dict[str, int], recipe: Recipe, load: bool) -> tuple[dict[str, Any], int]:
    """Trains five steps and saves, or loads and trains five steps; also tells the extra value."""
    made, batch = compiled(name, mesh, recipe), a_model(name)[1]
    optimizer = adamw(made)
    step = load_checkpoint(path, made, optimizer)["step"] if load else 0
    found = go_on(made, made.step, optimizer, batch, 5)
    if not load:
        save_checkpoint(path, made, optimizer, step=5)
    return found, step


def gap(before: dict[str, Any], after: dict[str, Any], expected: dict[str, Any]) -> float:
    """Difference of two halves from the whole; a pipeline's ranks have the entries of their stages."""
    found = {**after, "losses": before["losses"] + after["losses"]}
    return difference(found, {k: expected[k] for k in found})


PLANS: list[tuple[dict[str, int] | str, Recipe]] = [
    ({"dp": 4}, "zero1"),
    ({"tp": 4}, "tp"),
    ({"pp": 4}, 14),  # zb, two stages a rank
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tp+sp"}),
    ("dp=2,tp=2 order tp,dp", {"dp": "zero3", "tp": "tp+sp"}),
    ({"pp": 2, "dp": 2}, 6),  # 1f1b
]


@captured_once()
def hop(folder: str, number: int, mesh: dict[str, int] | str, recipe: Recipe) -> tuple[Any, int]:
    """Loads what the plan before saved, trains two steps and saves; also tells the extra value."""
    made, batch = compiled("gpt", mesh, recipe), a_model("gpt")[1]
    optimizer = adamw(made)
    step = load_checkpoint(f"{folder}/{number - 1}", made, optimizer)["step"] if number else 0
    found = go_on(made, made.step, optimizer, batch, 2)
    save_checkpoint(f"{folder}/{number}", made, optimizer, step=step + 2)
    return found, step


def test_each_plan_goes_on_where_the_one_before_ended(four_ranks: Ranks, tmp_path: Path) -> None:
    """The first plan goes on where the last ended, too."""
    for number, plan in enumerate([*PLANS, PLANS[0]]):
        expected = in_one_process("gpt", steps=2 * number + 2)
        for found, step in four_ranks.run(hop, str(tmp_path), number, *plan):
            own = {k: expected[k] for k in found} | {"losses": expected["losses"][-2:]}
            assert step == 2 * number
            assert difference(found, own) < 1e-8, plan


@pytest.mark.parametrize("name", ["tied", "normed", "partly"])
def test_fewer_ranks_and_one_process(four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    path, expected = str(tmp_path / "c"), in_one_process(name, steps=10)
    (before, _), *_ = four_ranks.run(half, name, path, {"dp": 4}, "zero3", False)
    for after, _ in two_ranks.run(half, name, path, {"dp": 2}, "zero1", True):
        assert gap(before, after, expected) < 1e-8
    assert gap(before, in_one_process(name, load=path), expected) < 1e-8


def test_one_rank_less(four_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    """Three ranks divide neither the batch nor the sizes of the parameters."""
    path, expected = str(tmp_path / "c"), in_one_process("tied", steps=10)
    (before, _), *_ = four_ranks.run(half, "tied", path, {"dp": 4}, "zero3", False)
    for after, _ in three_ranks.run(half, "tied", path, {"dp": 3}, "zero3", True):
        assert gap(before, after, expected) < 1e-8


def test_a_tied_weight_on_two_stages(two_ranks: Ranks, tmp_path: Path) -> None:
    """Its optimizer state goes from one process to both stages, and back from them."""
    path, expected = str(tmp_path / "c"), in_one_process("tied", steps=10)
    before = in_one_process("tied", save=path)
    for after, _ in two_ranks.run(half, "tied", path, {"pp": 2}, 8, True):  # interleaved
        assert gap(before, after, expected) < 1e-8
    (before, _), *_ = two_ranks.run(half, "tied", path, {"pp": 2}, 8, False)
    assert gap(before, in_one_process("tied", load=path), expected) < 1e-8


def one_step(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of one process, and its optimizer, after a step."""
    model, batch, loss_fn = a_model(name)
    optimizer = adamw(model)
    run_with_loss(model, batch, {}, loss_fn).backward()
    optimizer.step()
    return model, optimizer


@captured_once()
def early(path: str) -> list[list[float]]:
    """Losses after a load, with optimizers made before `compile`, before the plan, and after it."""
    losses = []
    for when in range(3):
        model, batch, loss_fn = make("mlp")
        optimizer = adamw(model)
        made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="zero1")  # type: ignore[arg-type]
        optimizer = adamw(made) if when == 1 else optimizer
        made.prepare(*batch)
        optimizer = adamw(made) if when == 2 else optimizer
        load_checkpoint(path, made, optimizer)
        losses.append(go_on(made, made.step, optimizer, batch, 3)["losses"])
    return losses


def test_optimizers_made_early_are_loaded(two_ranks: Ranks, tmp_path: Path) -> None:
    model, optimizer = one_step("mlp")
    save_checkpoint(tmp_path / "c", model, optimizer)
    expected = in_one_process("mlp", load=str(tmp_path / "c"), steps=3)["losses"]
    for losses in two_ranks.run(early, str(tmp_path / "c")):
        assert losses == [pytest.approx(expected, rel=1e-9)] * 3


# --- models without weights, random ops


def meta_then_loaded(path: str) -> bool:
    """Whether a model of the meta device, initialised with another seed, takes what was saved."""
    states = []
    for seed in (1, 2):
        with torch.device("meta"):
            model = Normed()
        _, batch, loss_fn = make("normed", torch.float32)
        made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe="zero3", example_inputs=batch, seed=seed)
        optimizer = adamw(made)
        if seed == 1:
            go_on(made, made.step, optimizer, batch, 2)
            save_checkpoint(path, made, optimizer)
        else:
            load_checkpoint(path, made, optimizer)
        states.append(go_on(made, made.step, optimizer, batch, 2))
    return difference(*states) == 0


def test_a_meta_model_takes_saved_values(two_ranks: Ranks, tmp_path: Path) -> None:
    assert equal_on_all(two_ranks.run(meta_then_loaded, str(tmp_path / "c")))


def dropped(path: str, recipes: tuple[str, str]) -> tuple[list[float], list[float]]:
    losses = []
    for load, recipe in enumerate(recipes):
        torch.manual_seed(load)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)).double()
        _, batch, _ = make("mlp")
        made = autopar.compile(model, loss_fn=mean_square, mesh={"dp": 2}, recipe=recipe, example_inputs=batch)
        if load:
            load_checkpoint(path, made)
        else:
            made.step(*batch)
            save_checkpoint(path, made)
        losses.append([made.step(*batch).item() for _ in range(3)])
    return losses[0], losses[1]


def test_dropout_goes_on_as_it_would_have(two_ranks: Ranks, tmp_path: Path) -> None:
    for one, other in two_ranks.run(dropped, str(tmp_path / "c"), ("ddp", "zero3")):
        assert one == pytest.approx(other, rel=1e-12)


# --- what goes wrong on one rank


def refusals(path: str) -> list[str]:
    """What every rank is told of what is wrong on one rank only."""
    rank = dist.get_rank()
    model = MLP()
    other = Tied() if rank == 1 else model
    calls: list[Callable[[], object]] = [
        lambda: save_checkpoint(path, model, step=(lambda: 0) if rank == 1 else 1),
        lambda: save_checkpoint(f"{path}{rank}", model),
        lambda: (save_checkpoint(path, model), load_checkpoint(path, other)),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except autopar.AutoparError as error:
            messages.append(str(error))
    return messages


def test_all_ranks_know_what_is_wrong_on_one(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(refusals, str(tmp_path / "c"))
    for rank, (unsavable, unshared, other_model) in enumerate(found):
        assert "extra value 'step' cannot be saved" in unsavable
        assert "failed on rank 1" in unsavable or rank == 1
        assert "file system that all ranks share" in unshared
        assert "embedding.weight is not in it" in other_model


# --- a rank that dies


RANKS = 3
BOUND_SECONDS = 30  # to notice; Gloo notices a closed connection at once


def work(rank: int, folder: str, victim: int) -> None:
    """Saves twice; in the second save the victim waits, in the midst of its writing, to be killed."""
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    batch = (torch.randn(6, 8), torch.randn(6, 8))
    made = autopar.compile(MLP(), loss_fn=mean_square, mesh={"dp": RANKS}, recipe="zero3", example_inputs=batch)
    optimizer = adamw(made)
    made.step(*batch)
    optimizer.step()
    save_checkpoint(f"{folder}/c", made, optimizer, step=1)
    if rank == victim:
        os.fsync = lambda _: hang(folder)  # the tensors are written, and not yet synced
    try:
        save_checkpoint(f"{folder}/c", made, optimizer, step=2)
    except autopar.PeerError as error:
        Path(folder, f"error{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)


def hang(folder: str) -> None:
    Path(folder, "writing").touch()
    time.sleep(10 * BOUND_SECONDS)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_a_save_costs_nothing(tmp_path: Path, victim: int) -> None:
    left = [rank for rank in range(RANKS) if rank != victim]
    processes = [CONTEXT.Process(target=work, args=(rank, str(tmp_path), victim)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        give_up_seconds = time.monotonic() + 60
        while not (tmp_path / "writing").exists() and time.monotonic() < give_up_seconds:
            time.sleep(0.05)
        pid = processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for rank in left:
            processes[rank].join(BOUND_SECONDS)
        assert [processes[rank].exitcode for rank in left] == [3, 3]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    for rank in left:
        message = (tmp_path / f"error{rank}").read_text()
        assert f"Saving {tmp_path}/c broke on rank {rank}: another rank died" in message
    assert (tmp_path / "c.partial").exists()
    model = MLP()
    optimizer = adamw(model)
    assert load_checkpoint(tmp_path / "c", model, optimizer) == {"step": 1}
    save_checkpoint(tmp_path / "c", model, optimizer, step=3)
    assert load_checkpoint(tmp_path / "c", model, optimizer) == {"step": 3}
    assert not (tmp_path / "c.partial").exists()
