"""A mesh with vacant places, on real ranks: one rank serves three that work, and training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import _torch
from autopar.capture.export import run_with_loss
from autopar.ir import Mesh
from autopar.proof.random_plan import random_plan
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import difference, full_state, train
from tests.support.staged import captured_once, prepared_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

MESH = "ps=2,dp=3 of 4"
SERVED = {"ps": "serve", "dp": "ddp"}


def of_twelve(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A model, and a batch whose rows three ranks can share."""
    model, batch, loss_fn = make(name)
    return model, tuple(torch.cat([x, x[:4].flip(0)]) for x in batch), loss_fn


def alone(name: str) -> dict[str, Any]:
    """What a single process gets."""
    model, batch, loss_fn = of_twelve(name)

    def step(*batch: Tensor) -> Tensor:
        loss = run_with_loss(model, batch, {}, loss_fn)
        loss.backward()
        return loss

    return train(model, step, batch)


@captured_once()
def served(name: str, recipe: Any, **options: Any) -> dict[str, Any]:
    model, batch, loss_fn = of_twelve(name)
    made = autopar.compile(model, loss_fn=loss_fn, mesh=MESH, recipe=recipe, **options)
    return train(made, made.step, batch)


@pytest.mark.parametrize("name", often(["mlp", "normed", "gpt"], ["normed", "gpt"]))
def test_one_server_keeps_what_three_workers_train(four_ranks: Ranks, name: str) -> None:
    """`normed` exchanges statistics among its workers, and updates running ones on all ranks."""
    results = four_ranks.run(served, name, SERVED)
    assert all(difference(found, alone(name)) < 1e-9 for found in results)


@pytest.mark.parametrize("seed", often(range(3), [0]))
def test_random_plans(four_ranks: Ranks, seed: int) -> None:
    results = four_ranks.run(_randomly, "mlp", seed)
    assert all(difference(found, alone("mlp")) < 1e-9 for found in results)


@captured_once()
def _randomly(name: str, seed: int) -> dict[str, Any]:
    model, batch, loss_fn = of_twelve(name)
    prepared = prepared_once(model, batch, loss_fn)
    plan = random_plan(prepared.analysis.graph, Mesh.parse(MESH), seed=seed, fingerprint=prepared.captured.fingerprint)
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan)
    return train(made, made.step, batch)


def test_only_the_server_keeps_parameters_and_states(four_ranks: Ranks) -> None:
    *workers, server = four_ranks.run(_kept)
    count = sum(p.numel() for p in of_twelve("mlp")[0].parameters())
    assert workers == [{"parameters": 0, "states": 0}] * 3
    assert server == {"parameters": 8 * count, "states": 16 * count}  # of float64


@captured_once()
def _kept() -> dict[str, int]:
    model, batch, loss_fn = of_twelve("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=MESH, recipe=SERVED)
    optimizer = torch.optim.AdamW(made.parameters())
    made.step(*batch)
    optimizer.step()
    states = [x for s in optimizer.state.values() for n, x in s.items() if n != "step"]
    return {
        "parameters": sum(_torch.local_tensor(p).nbytes for p in made.parameters()),
        "states": sum(_torch.local_tensor(x).nbytes for x in states),
    }


def test_a_checkpoint_of_a_server_goes_on_in_shards_and_back(four_ranks: Ranks, tmp_path: Any) -> None:
    """Two steps with one server, two in shards, two with one server, in one run of six of a single process."""
    folder = str(tmp_path / "saved")
    for number, (mesh, recipe) in enumerate([(MESH, SERVED), ("dp=4", "zero3"), (MESH, SERVED)]):
        found = four_ranks.run(_go_on, folder, mesh, recipe, number > 0)
    model, batch, loss_fn = of_twelve("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        run_with_loss(model, batch, {}, loss_fn).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(difference(each, full_state(model)) < 1e-9 for each in found)


@captured_once()
def _go_on(folder: str, mesh: str, recipe: Any, resumes: bool) -> dict[str, Any]:
    model, batch, loss_fn = of_twelve("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=recipe, example_inputs=batch)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    if resumes:
        autopar.checkpoint.load_checkpoint(folder, made, optimizer)
    for _ in range(2):
        made.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    autopar.checkpoint.save_checkpoint(folder, made, optimizer)
    return full_state(made)


def test_a_forward_is_whole_on_every_rank_and_takes_gradients(four_ranks: Ranks) -> None:
    model, batch, _ = of_twelve("mlp")
    y = model(batch[0])
    y.square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for whole, gradients in four_ranks.run(_forward):
        assert (whole - y).abs().max() < 1e-12
        assert difference(gradients, expected) < 1e-12


@captured_once()
def _forward() -> tuple[Tensor, dict[str, Any]]:
    model, batch, loss_fn = of_twelve("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=MESH, recipe=SERVED, outputs="dtensor")
    with torch.no_grad():
        made.step(*batch)
        y = made(batch[0]).full_tensor()
    made(batch[0]).full_tensor().square().mean().backward()
    gradients = {name: p.grad.full_tensor() for name, p in made.named_parameters()}
    return y.detach(), gradients
