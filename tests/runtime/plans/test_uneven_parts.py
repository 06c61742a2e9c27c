"""Parameters stored along an axis that divides none of their dims: three real ranks train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.export import run_with_loss
from tests.runtime.checkpoint.test_checkpoints import gap, half, in_one_process
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import Step, compiled, difference, full_state, single, train
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

DP = {"dp": 3}


@pytest.mark.parametrize("recipe", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_three_ranks_train_as_one_process(three_ranks: Ranks, recipe: str, micro_batches: int) -> None:
    expected = single("odd", steps=10)
    for found in three_ranks.run(_ten_steps, recipe, micro_batches):
        assert difference(found, expected) < 1e-9


def _ten_steps(recipe: str, micro_batches: int) -> dict[str, object]:
    return compiled("odd", DP, recipe, micro_batches, steps=10)


@captured_once()
def first_step(recipe: str) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """The shapes of a rank's parts, and the whole gradients of one step."""
    model, batch, loss_fn = make("odd")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe=recipe)  # type: ignore[arg-type]
    made.step(*batch)
    parameters = dict(made.named_parameters())
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in parameters.values())
    shapes = {name: list(p.to_local().shape) for name, p in parameters.items()}
    return shapes, {name: p.grad.full_tensor() for name, p in parameters.items()}


@captured_once()
def forward_and_backward(recipe: str) -> dict[str, torch.Tensor]:
    """The whole gradients of a forward and a backward of the user's own."""
    model, (tokens, targets), loss_fn = make("odd")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe=recipe)  # type: ignore[arg-type]
    made.prepare(tokens, targets)
    loss_fn(made(tokens), targets).backward()  # type: ignore[operator]
    return {name: p.grad.full_tensor() for name, p in made.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_a_backward_outside_of_a_step_gives_whole_gradients(three_ranks: Ranks, recipe: str) -> None:
    model, batch, loss_fn = make("odd")
    run_with_loss(model, batch, {}, loss_fn).backward()  # type: ignore[arg-type]
    for gradients in three_ranks.run(forward_and_backward, recipe):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_ranks_have_the_parts_of_torch_chunk_and_the_gradients_of_one_process(three_ranks: Ranks, recipe: str) -> None:
    found = three_ranks.run(first_step, recipe)
    model, batch, loss_fn = make("odd")
    run_with_loss(model, batch, {}, loss_fn).backward()  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        shapes = [shapes[name] for shapes, _ in found]
        assert shapes in [_parts(parameter, dim) for dim in range(parameter.ndim)], name
        for _, gradients in found:
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert [shapes["head.bias"] for shapes, _ in found] == [[33], [33], [31]]
    assert [shapes["down.bias"] for shapes, _ in found] == [[1], [1], [0]]


def _parts(x: torch.Tensor, dim: int) -> list[list[int]]:
    """The shapes of the three parts of `torch.chunk`, of which the last may be missing."""
    shapes = [list(part.shape) for part in x.chunk(3, dim)]
    empty = [*x.shape[:dim], 0, *x.shape[dim + 1 :]]
    return shapes + [empty] * (3 - len(shapes))


def test_a_checkpoint_goes_from_three_ranks_to_four_and_back(
    three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    path, back = str(tmp_path / "three"), str(tmp_path / "four")
    expected = in_one_process("odd", steps=10)
    (before, _), *_ = three_ranks.run(half, "odd", path, {"dp": 3}, "zero3", False)
    for after, _ in four_ranks.run(half, "odd", path, {"dp": 4}, "zero1", True):
        assert gap(before, after, expected) < 1e-8
    (before, _), *_ = four_ranks.run(half, "odd", back, {"dp": 4}, "zero3", False)
    for after, _ in three_ranks.run(half, "odd", back, {"dp": 3}, "zero2", True):
        assert gap(before, after, expected) < 1e-8
    assert gap(before, in_one_process("odd", load=back), expected) < 1e-8


@captured_once()
def fused(recipe: str) -> dict[str, object]:
    """Steps of a fused optimizer; under ZeRO-1 it updates parts of the columns of whole parameters."""
    model, batch, loss_fn = make("odd")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe=recipe)  # type: ignore[arg-type]
    return _updated(made, made.step, batch, is_fused=True)


def _updated(model: Any, step: Any, batch: Any, *, is_fused: bool) -> dict[str, object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, fused=is_fused)
    losses = []
    for _ in range(3):
        losses.append(step(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_a_fused_optimizer_updates_the_rank_s_own_part(three_ranks: Ranks, recipe: str) -> None:
    model, batch, loss_fn = make("odd")

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = run_with_loss(model, batch, {}, loss_fn)  # type: ignore[arg-type]
        loss.backward()
        return loss.detach()

    expected = _updated(model, step, batch, is_fused=False)
    for found in three_ranks.run(fused, recipe):
        assert difference(found, expected) < 1e-9


@captured_once()
def written(folder: str) -> dict[str, torch.Tensor]:
    """Writes whole weights to files, and reads them into another model; returns what that has."""
    torch.manual_seed(0)
    model, batch, loss_fn = make("odd")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe="zero3", example_inputs=batch)  # type: ignore[arg-type]
    made.export(folder)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    made.load_weights(folder)
    return full_state(made)


def test_whole_weights_go_to_files_and_into_parts(three_ranks: Ranks, tmp_path: Path) -> None:
    expected = make("odd")[0].state_dict()
    for found in three_ranks.run(written, str(tmp_path)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("recipe", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [(32, 7, 32), pytest.param((32, 30, 7, 1, 30, 32, 1, 7), marks=pytest.mark.slow)])
def test_batches_that_three_ranks_do_not_divide_train_as_one_process(
    three_ranks: Ranks, recipe: str, sizes: tuple[int, ...]
) -> None:
    model, batch, loss_fn = make("odd")

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = run_with_loss(model, batch, {}, loss_fn)  # type: ignore[arg-type]
        loss.backward()
        return loss.detach()

    expected = train(model, _of_sizes(step, sizes), batch, steps=len(sizes))
    for found in three_ranks.run(_trained_on, recipe, sizes):
        assert difference(found, expected) < 1e-9


@captured_once()
def _trained_on(recipe: str, sizes: tuple[int, ...]) -> dict[str, object]:
    model, batch, loss_fn = make("odd")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe=recipe)  # type: ignore[arg-type]
    return train(made, _of_sizes(made.step, sizes), batch, steps=len(sizes))


def _of_sizes(step: Step, sizes: tuple[int, ...]) -> Step:
    """A step that takes another number of rows each time."""
    rows = iter(sizes)

    def next_step(*batch: torch.Tensor) -> torch.Tensor:
        count = next(rows)
        return step(*(x.repeat(3, 1)[:count] for x in batch))

    return next_step
