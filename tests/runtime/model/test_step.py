"""What a step takes and gives: inputs of either shape, gradients, other shapes and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import make, mean_square
from tests.runtime.training import DP, compile_mlp
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- inputs


@captured_once()
def local_inputs(micro_batches: int) -> tuple[float, float]:
    """The loss of a global batch, and of the same given as each rank's part."""
    made, (x, y) = compile_mlp("ddp", micro_batches=micro_batches)
    whole = made.step(x, y).item()
    rank = dist.get_rank()
    return whole, made.step(x.chunk(2)[rank], y.chunk(2)[rank]).item()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rank_may_give_its_own_part(two_ranks: Ranks, micro_batches: int) -> None:
    whole, parts = equal_on_all(two_ranks.run(local_inputs, micro_batches))
    assert parts == pytest.approx(whole, rel=1e-12)


def too_few_rows() -> str:
    made, (x, y) = compile_mlp("ddp", micro_batches=9)
    try:
        made.step(x, y)
    except autopar.StepError as error:
        return str(error)
    return "no error"


def test_more_micro_batches_than_rows_are_refused(two_ranks: Ranks) -> None:
    message = equal_on_all(two_ranks.run(too_few_rows))
    assert "has 8 rows, of which 9 micro-batches cannot each have one" in message


class Scaled(nn.Module):
    """Takes a dict, a keyword and a number, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, batch: dict[str, Tensor], *, scale: float, shift: Tensor) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale + shift
        return {"loss": F.mse_loss(y, batch["y"]), "outputs": [y, None]}


def scaled_loss(result: dict[str, Any]) -> Tensor:
    return result["loss"]


def trees() -> tuple[float, float, list[str]]:
    torch.manual_seed(0)
    model = Scaled()
    batch = {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}
    shift = torch.randn(8, 8).double()
    expected = model(batch, scale=2.0, shift=shift)["loss"].item()
    made = autopar.compile(model, loss_fn=scaled_loss, mesh=DP, recipe="ddp")
    loss = made.step(batch, shift=shift, scale=2.0).item()
    result = made(batch, scale=2.0, shift=shift)
    return loss, expected, [*result, str(result["outputs"][1])]


def test_trees_keywords_and_numbers(two_ranks: Ranks) -> None:
    for loss, expected, keys in two_ranks.run(trees):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert keys == ["loss", "outputs", "None"]


class Times(nn.Module):
    """Multiplies by a number in the number's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, by: float) -> Tensor:
        return self.linear(x) * (10 if by is True else 20 if isinstance(by, int) else 30)


def equal_numbers() -> list[float]:
    torch.manual_seed(0)
    made = autopar.compile(Times(), mesh=DP, recipe="ddp")
    x = torch.randn(8, 8).double()
    with torch.no_grad():
        results = [made(x, by) for by in (1, 1.0, True, 1)]
    return [(r.sum() / results[0].sum()).item() for r in results]


def test_equal_numbers_of_other_types_are_other_programs(two_ranks: Ranks) -> None:
    for found in two_ranks.run(equal_numbers):
        assert found == pytest.approx([1, 1.5, 0.5, 1])


@captured_once()
def inputs_with_gradients() -> tuple[str, bool]:
    """What a step says of an input that requires a gradient, and whether no_grad allows one."""
    made, (x, y) = compile_mlp("ddp")
    with pytest.raises(autopar.StepError) as refused:
        made.step(x.requires_grad_(), y)
    with torch.no_grad():
        return str(refused.value), not made(x).requires_grad


def test_inputs_of_a_step_take_no_gradients(two_ranks: Ranks) -> None:
    message, allowed = equal_on_all(two_ranks.run(inputs_with_gradients))
    assert "Input 'x' requires a gradient, but a step's gradients flow only to parameters" in message
    assert allowed


# --- gradients and losses


@captured_once()
def accumulated() -> float:
    """Two steps without zero_grad in between add up."""
    made, batch = compile_mlp("zero2", micro_batches=2)
    made.step(*batch)
    once = {n: p.grad.full_tensor().clone() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    made.step(*batch)
    gaps = [p.grad.full_tensor() - 2 * once[n] for n, p in made.named_parameters()]  # type: ignore[union-attr]
    return max((gap.abs().max().item() for gap in gaps), key=nan_last)


def test_gradients_accumulate_over_steps(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(accumulated), key=nan_last) < 1e-12


@captured_once()
def evaluated(recipe: str) -> tuple[float, float, bool]:
    """A loss under no_grad, the loss of the step after it, and whether gradients were left between."""
    model, batch, loss_fn = make("gpt")
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, recipe=recipe, micro_batches=2)
    made.step(*batch)
    made.zero_grad()
    with torch.no_grad():
        alone = made.step(*batch).item()
    left = any(p.grad is not None for p in made.parameters())
    return alone, made.step(*batch).item(), left


@pytest.mark.parametrize("recipe", often(["ddp", "zero1", "zero2", "zero3", "tp+sp"], ["ddp", "zero3", "tp+sp"]))
def test_a_step_without_grad_is_an_evaluation(two_ranks: Ranks, recipe: str) -> None:
    for alone, stepped, left in two_ranks.run(evaluated, recipe):
        assert alone == pytest.approx(stepped, rel=1e-12)
        assert not left


# --- several programs


@captured_once()
def dropped(recipe: str) -> tuple[list[float], bool]:
    """Losses with dropout, and whether the gathered states of both ranks agree afterwards."""
    torch.manual_seed(3 + dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)).double()
    _, batch, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe)
    losses = [made.step(*batch).item() for _ in range(3)]
    return losses, len(set(losses)) == 3


@pytest.mark.parametrize("recipe", ["ddp", "tp"])
def test_dropout_draws_anew_and_alike(two_ranks: Ranks, recipe: str) -> None:
    _, varies = equal_on_all(two_ranks.run(dropped, recipe))
    assert varies


@captured_once()
def other_shapes() -> list[tuple[int, ...]]:
    made, (x, y) = compile_mlp("zero3")
    made.step(x, y)
    made.prepare(x[:4], y[:4])
    made.step(x[:4], y[:4])
    with torch.no_grad():
        return [tuple(made(x[:n]).shape) for n in (8, 4, 2)]


def test_forwards_and_prepared_steps_of_other_shapes(two_ranks: Ranks) -> None:
    found = equal_on_all(two_ranks.run(other_shapes))
    assert [shape[1] for shape in found] == [8, 8, 8]
