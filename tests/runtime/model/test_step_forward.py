"""Forwards of a compiled module: in evaluation, with a backward of their own, with results given back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.proof.verdict import nan_last
from autopar.runtime.execute.settings import Outputs
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Normed, make, mean_square
from tests.runtime.training import DP, difference, full_state, single, train
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- modes


@captured_once()
def normed_modes() -> tuple[dict[str, Any], float, float]:
    """Training with batch norm, then the result of the running statistics, here and in one process."""
    model, batch, loss_fn = make("normed")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=DP, recipe="ddp", outputs="dtensor")  # type: ignore[arg-type]
    found = train(made, made.step, batch)
    reference = Normed().double()
    reference.load_state_dict(full_state(made))
    made.eval()
    reference.eval()
    assert not made.first.training
    with torch.no_grad():
        output = made(batch[0])
        worst = (output.full_tensor() - reference(batch[0])).abs().max().item()
    unchanged = difference(full_state(made), dict(reference.state_dict()))
    return found, worst, unchanged


def test_batch_norm_trains_and_evaluates(two_ranks: Ranks) -> None:
    expected = single("normed")
    for found, worst, unchanged in two_ranks.run(normed_modes):
        assert difference(found, expected) < 1e-9
        assert worst < 1e-12
        assert unchanged == 0


# --- backward and results


@captured_once()
def forward_gradients(recipe: str, outputs: Outputs | None) -> list[float]:
    """The difference of gradients when the user runs backward on the forward's result, whole or a DTensor."""
    model, (x, y), _ = make("mlp")
    reference, _, _ = make("mlp")
    mean_square(reference(x), y).backward()
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe, outputs=outputs)
    made.step(x, y)  # the forward then has its own program, on the same parameters
    made.zero_grad()
    output = made(x)
    assert isinstance(output, DTensor) == (outputs == "dtensor")
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    mean_square(whole, y).backward()
    grads = {n: p.grad.full_tensor() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    return [(grads[n] - p.grad).abs().max().item() for n, p in reference.named_parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("outputs", ["dtensor", None])
@pytest.mark.parametrize("recipe", often(["ddp", "zero1", "zero3", "tp"], ["zero3", "tp"]))
def test_forward_is_differentiable(two_ranks: Ranks, recipe: str, outputs: Outputs | None) -> None:
    for found in two_ranks.run(forward_gradients, recipe, outputs):
        assert max(found, key=nan_last) < 1e-12


@captured_once()
def losses_of_own() -> tuple[str, str, list[float]]:
    """What is said of losses that differ between ranks; distances of gradients of own losses of parts."""
    model, (x, y), _ = make("mlp")
    reference, _, _ = make("mlp")
    mean_square(reference(x), y).backward()
    made = autopar.compile(model, mesh=DP, recipe="ddp", example_inputs=(x,))
    rank, planned = dist.get_rank(), made.plan
    rows = slice(rank * len(x) // 2, (rank + 1) * len(x) // 2)
    with pytest.raises(autopar.StepError) as different:
        mean_square(made(x)[rows], y[rows]).backward()
    assert made.plan is planned
    loss = mean_square(made(x), y)
    with torch.no_grad():
        made.get_parameter("up.weight").mul_(2)
    with pytest.raises(autopar.StepError, match=r"inplace operation: up\.weight was written between model"):
        loss.backward()
    with pytest.raises(autopar.StepError) as infinite:
        (made(x).sum() * (1.0 if rank else torch.inf)).backward()
    model, _, _ = make("mlp")
    made = autopar.compile(model, mesh=DP, recipe="ddp", outputs="local")
    mean_square(made(x), y[rows]).backward()
    grads = {n: p.grad.full_tensor() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    far = [(grads[n] - p.grad).abs().max().item() for n, p in reference.named_parameters()]  # type: ignore[operator]
    return str(different.value), str(infinite.value), far


def test_ranks_with_different_losses_are_refused_or_averaged(two_ranks: Ranks) -> None:
    for different, infinite, far in two_ranks.run(losses_of_own):
        assert "a result of model(...) of shape [8, 8]; its norm on this rank is" in different
        assert 'autopar.compile(..., outputs="local")' in infinite
        assert max(far, key=nan_last) < 1e-12


@captured_once()
def evaluated(outputs: Outputs) -> tuple[list[int], float, list[str]]:
    """The shape of an evaluation's result, its distance from one process, and what is warned of in two calls."""
    model, (x, _), _ = make("mlp")
    reference, _, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe="ddp", outputs=outputs)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        output, _ = made(x), made(x)
        own = reference(x)
        if outputs == "local":
            own = own.chunk(2)[dist.get_rank()]
    words = [str(each.message) for each in said if "each rank's part" in str(each.message)]
    return list(output.shape), (output - own).abs().max().item(), words


def test_whole_results_are_had_and_parts_are_warned_of_once(two_ranks: Ranks) -> None:
    (whole, far, none), (other, _, _) = two_ranks.run(evaluated, "whole")
    assert whole == other and far < 1e-12 and not none
    (part, far, words), (_, distant, silent) = two_ranks.run(evaluated, "local")
    assert part == [whole[0] // 2, *whole[1:]] and max(far, distant) < 1e-12
    assert len(words) == 1 and f"of shape {whole}, split along dim 0 (dp)" in words[0]
    assert not silent  # one rank says what is so on all


class Cached(nn.Module):
    """A sum over all rows of time so far, as a cache of keys and values has them."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = self.map(x) if past is None else torch.cat([past, self.map(x)], 1)
        return rows.sum(1), rows


@captured_once()
def fed_back() -> tuple[list[float], str]:
    """Distances of two calls that take what the first gave, of whole batches and of parts, and of the gradient of a
    result that is given back attached; what is refused."""
    torch.manual_seed(0)
    reference, x, rank = Cached().double(), torch.randn(4, 2, 4).double(), dist.get_rank()
    made = autopar.compile(copy.deepcopy(reference), mesh=DP, recipe="ddp", outputs="dtensor")
    with torch.no_grad():
        past = made(x)[1]
        want = reference(x, reference(x)[1])[0]
        whole, part = made(x, past)[0], made(x[2 * rank : 2 * rank + 2], past)[0]
        found = [(y.full_tensor() - want).abs().max().item() for y in (whole, part)]
        with pytest.raises(autopar.CaptureError) as mixed:
            made(x[:, :1] + rank, past.to_local()[:, :1])
    for model in (made, reference):
        model(x, model(x)[1])[0].sum().backward()
    found.append((made.map.weight.grad.full_tensor() - reference.map.weight.grad).abs().max().item())
    return found, str(mixed.value)


def test_dtensors_may_be_given_back(two_ranks: Ranks) -> None:
    for found, mixed in two_ranks.run(fed_back):
        assert max(found, key=nan_last) < 1e-12
        assert "[4, 1, 4], [2, 1, 4] were taken for this rank's parts of [8, 1, 4], [4, 1" in mixed
