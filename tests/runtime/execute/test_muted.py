"""A pipeline leaves out a micro-batch in which no element counts, as a single device does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.execute.muted import muted, share_of
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference
from tests.support.staged import captured_once
from tests.support.wide_blocks import Block


def test_gradients_of_nan_become_zeros_at_leaves() -> None:
    x = torch.ones(3, requires_grad=True)
    (own,) = muted([x])
    loss = F.cross_entropy(own.expand(2, 3), torch.full((2,), -1), ignore_index=-1)
    assert loss.isnan()
    term = share_of(loss, 0.0)
    term.backward()
    assert term.item() == 0 and x.grad is not None and x.grad.tolist() == [0, 0, 0]


class Labelled(nn.Module):
    """Blocks before a loss over the tokens that count, which is returned with the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        return F.cross_entropy(scores, y, ignore_index=-1), scores


class Weighted(Labelled):
    """A mean by hand, of a mask that the first blocks read, too."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        counted = (y >= 0).to(x.dtype)
        _, scores = super().forward(x * (2 - counted[:, None]), y)
        each = F.cross_entropy(scores, y, ignore_index=-1, reduction="none")
        return (each * counted).sum() / counted.sum(), scores


class Summed(Labelled):
    """A sum over all rows divided by the number of some."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _, scores = super().forward(x, y.clamp(min=0))
        return scores.square().sum() / (y >= 0).sum(), scores


def _batch(empty: int) -> tuple[Tensor, Tensor]:
    """Eight rows, of which the two of one micro-batch do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (8,), generator=generator)
    y[2 * empty : 2 * empty + 2] = -1
    return x, y


def _made(model: nn.Module, **options: Any) -> autopar.CompiledModule:
    return autopar.compile(model, micro_batches=4, example_inputs=_batch(0), **options)


@captured_once()
def distances(kind: type[Labelled], mesh: str, recipe: str, schedule: str) -> list[float]:
    """Largest distance of loss, scores and gradients from one process, for each place of the empty micro-batch."""
    torch.manual_seed(0)
    plain = kind().double()
    made = _made(copy.deepcopy(plain), mesh=mesh, recipe=recipe, schedule=schedule)
    far = []
    for empty in (0, 1, 3):
        (loss, scores), (expected, own) = made.step(*_batch(empty)), plain(*_batch(empty))
        expected.backward()
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        whole = {name: p.grad.full_tensor() for name, p in made.named_parameters() if p.numel() and p.grad is not None}
        far.append(difference(whole, {name: gradients[name] for name in whole}))
        far += [abs((loss - expected).item()), (scores - own).abs().max().item()]
        made.zero_grad()
        plain.zero_grad()
    return far


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [Labelled, Weighted])
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_pipeline_leaves_out_a_micro_batch_without_targets(
    two_ranks: Ranks, kind: type[Labelled], schedule: str
) -> None:
    for far in two_ranks.run(distances, kind, "pp=2", "auto", schedule):
        assert max(far) < 1e-12


class Frozen(Labelled):
    """Without a gradient before the last stage, whose backward is then its second half alone under `zb`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)


@pytest.mark.multiprocess
def test_a_last_stage_that_sends_no_gradient_leaves_it_out(two_ranks: Ranks) -> None:
    for far in two_ranks.run(distances, Frozen, "pp=2", "auto", "zb"):
        assert max(far) < 1e-12


@pytest.mark.multiprocess
def test_gathered_parameters_of_a_pipeline_get_no_gradient_of_it(four_ranks: Ranks) -> None:
    for far in four_ranks.run(distances, Labelled, "pp=2,dp=2", "zero3", "1f1b"):
        assert max(far) < 1e-12


@captured_once()
def divided_by_none() -> str:
    made = _made(Summed().double(), mesh="pp=2", recipe="auto", schedule="1f1b")
    with pytest.raises(autopar.StepError) as error:
        made.step(*_batch(1))
    return str(error.value)


@pytest.mark.multiprocess
def test_a_sum_that_is_divided_by_no_rows_is_refused_on_every_stage(two_ranks: Ranks) -> None:
    for said in two_ranks.run(divided_by_none):
        assert "has a denominator of 0 and a numerator that is not 0" in said
