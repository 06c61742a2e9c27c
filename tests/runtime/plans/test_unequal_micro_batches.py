"""Micro-batches of different sizes: loss and all gradients of a batch that their number does not divide."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir import SCHEDULES
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.pipeline.staged_runs import gradients
from tests.support.staged import captured_once
from tests.support.tables import often

ROWS = [30, 7, 32]  # in 4: 8, 8, 7, 7 and 2, 2, 2, 1, and once in equal parts
IGNORED = -100


class Net(nn.Module):
    """Blocks of one width, of which stages can be made."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def mean(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).mean()


def added_up(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).sum() / 7


def masked(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y, labels, ignore_index=IGNORED)


def by_rows(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).sum() / len(labels)


def two_terms(y: Tensor, labels: Tensor) -> Tensor:
    return masked(y, labels) + 0.1 * (y.logsumexp(-1) ** 2).mean()


def ratio(y: Tensor, labels: Tensor) -> Tensor:
    counts = (labels != IGNORED).double()
    return ((y * y).sum(-1) * counts).sum() / counts.sum()


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [mean, added_up, masked, by_rows, two_terms, ratio]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of numbers, and labels of which every third is ignored but the last."""
    drawn = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=drawn, dtype=torch.float64)
    labels = torch.randint(6, (rows,), generator=drawn)
    labels[1:-1:3] = IGNORED
    return x, labels


def in_one_process(loss: Callable[[Tensor, Tensor], Tensor], rows: int) -> tuple[float, dict[str, Tensor]]:
    model, (x, labels) = net(), batch(rows)
    found = loss(model(x), labels)
    found.backward()
    return found.item(), gradients(model)


def compiled(loss: Callable[[Tensor, Tensor], Any], **options: Any) -> autopar.CompiledModule:
    return autopar.compile(net(), loss_fn=loss, micro_batches=4, **options)


Found = dict[tuple[str, int], tuple[float, dict[str, Tensor]]]


@captured_once()
def on_a_rank(losses: list[Callable[[Tensor, Tensor], Tensor]], options: dict[str, Any]) -> Found:
    """By loss and rows, the loss and this rank's gradients, of steps of one compiled module."""
    found: Found = {}
    for loss in losses:
        made = compiled(loss, **options)
        for rows in ROWS:
            value = made.step(*batch(rows)).item()
            found[loss.__name__, rows] = value, gradients(made)
            made.zero_grad()
    return found


def distance(parts: list[Found], losses: list[Callable[[Tensor, Tensor], Tensor]]) -> float:
    """The largest difference of any rank's loss or gradient from one process; infinite if no rank has a gradient."""
    worst = 0.0
    for loss in losses:
        for rows in ROWS:
            value, expected = in_one_process(loss, rows)
            found = [part[loss.__name__, rows] for part in parts]
            missing = expected.keys() - {name for _, own in found for name in own}
            far = [abs(own - value) for own, _ in found]
            far += [(x - expected[name]).abs().max().item() for _, own in found for name, x in own.items()]
            worst = max([worst, *far, math.inf if missing else 0.0], key=nan_last)
    return worst


def test_a_single_process_has_the_loss_and_gradients_of_the_batch() -> None:
    assert distance([on_a_rank(LOSSES, {})], LOSSES) < 1e-12


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "zero1": (2, {"mesh": {"dp": 2}, "recipe": "zero1"}),
    "zero2": (2, {"mesh": {"dp": 2}, "recipe": "zero2"}),
    "zero3": (2, {"mesh": {"dp": 2}, "recipe": "zero3"}),
    "zero3, recomputed": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "recompute": "full"}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "two at a time": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "overlap_batches": 2}),
    "three ranks": (3, {"mesh": {"dp": 3}, "recipe": "zero3"}),
    "three ranks, ddp": (3, {"mesh": {"dp": 3}, "recipe": "ddp"}),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", often(WAYS, ("ddp", "zero3", "tp", "three ranks")))
def test_ranks_have_the_loss_and_gradients_of_one_process(way: str, two_ranks: Ranks, three_ranks: Ranks) -> None:
    count, options = WAYS[way]
    ranks = two_ranks if count == 2 else three_ranks
    assert distance(ranks.run(on_a_rank, LOSSES, options), LOSSES) < 1e-12


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", often(SCHEDULES, ("gpipe", "1f1b", "interleaved", "zb")))
def test_stages_have_the_loss_and_gradients_of_one_process(two_ranks: Ranks, schedule: str) -> None:
    parts = two_ranks.run(on_a_rank, LOSSES[2:], {"mesh": {"pp": 2}, "schedule": schedule})
    assert distance(parts, LOSSES[2:]) < 1e-12


@captured_once()
def from_own_rows() -> Found:
    """Every rank gives a half of the rows, by `batch="local"` and after a batch that was given whole."""
    found: Found = {}
    rank = torch.distributed.get_rank()
    for rows, options in ((30, {"batch": "local"}), (32, {})):
        made = compiled(masked, mesh={"dp": 2}, recipe="zero3", **options)
        if not options:
            made.step(*batch(rows))
            made.zero_grad()
        own = [x.chunk(2)[rank] for x in batch(30)]
        found["masked", rows] = made.step(*own).item(), gradients(made)
    return found


@pytest.mark.multiprocess
def test_ranks_may_give_rows_of_their_own(two_ranks: Ranks) -> None:
    value, expected = in_one_process(masked, 30)
    for part in two_ranks.run(from_own_rows):
        for found, own in part.values():
            assert found == pytest.approx(value, rel=1e-12)
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


def with_results(y: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = y.argmax(-1) == labels
    rows = torch.tensor(len(labels))
    return masked(y, labels), {"y": y, "right": right.sum(), "share": right.double().mean(), "rows": rows}


@captured_once()
def results_of(options: dict[str, Any]) -> dict[str, Tensor]:
    """The extra results of a step, all as plain tensors."""
    _, found = compiled(with_results, **options).step(*batch(30))
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


RESULTS: list[dict[str, Any]] = [
    {"mesh": {"dp": 2}, "recipe": "ddp"},
    {"mesh": {"dp": 2}, "recipe": "ddp", "outputs": "dtensor"},
    {"mesh": {"pp": 2}, "schedule": "1f1b"},
]


@pytest.mark.multiprocess
def test_results_are_those_of_the_batch(two_ranks: Ranks) -> None:
    _, expected = with_results(net()(batch(30)[0]), batch(30)[1])
    for options in RESULTS:
        for found in two_ranks.run(results_of, options):
            assert found.keys() == expected.keys()
            for name, x in expected.items():
                torch.testing.assert_close(found[name], x.detach(), rtol=1e-12, atol=1e-12)


def test_an_explanation_names_the_sizes() -> None:
    made = compiled(masked, mesh={"dp": 1})
    made.step(*batch(30))
    found = made.explain()
    assert found.sizes == (8, 8, 7, 7)
    assert "30 samples in 4 micro-batches of 8, 8, 7, 7, each priced as one of 8" in found.plan.notes


class Scaled(Net):
    """A model whose Python reads a number that changes."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_numbers_of_python_reach_micro_batches_of_both_sizes() -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    reference = copy.deepcopy(model)
    made = autopar.compile(model, loss_fn=masked, micro_batches=4, mesh={"dp": 1})
    x, labels = batch(30)
    for scale in (1.0, 2.0, 3.0, 0.5):
        model.scale = reference.scale = scale  # an input from the second on
        assert made.step(x, labels).item() == pytest.approx(masked(reference(x), labels).item(), rel=1e-12)
    assert len(made._programs.kept.ready[True]) == 2


# --- what is refused, and what is said


class Normed(nn.Module):
    """A batch norm, whose statistics are those of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def test_a_batch_norm_sees_one_micro_batch_at_a_time_and_a_warning_says_so() -> None:
    torch.manual_seed(0)
    model, (x, labels) = Normed().double(), batch(30)
    reference = copy.deepcopy(model)
    made = autopar.compile(model, loss_fn=mean, micro_batches=4, mesh={"dp": 1})
    with pytest.warns(UserWarning, match="may differ from those of the whole batch: _native_batch_norm"):
        value = made.step(x, labels).item()
    weighed = [mean(reference(own), labels) * len(own) / 30 for own in x.tensor_split(4)]
    sum(weighed).backward()  # type: ignore[union-attr]
    assert value == pytest.approx(sum(each.item() for each in weighed), rel=1e-12)
    torch.testing.assert_close(gradients(made), gradients(reference), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean, rtol=1e-12, atol=1e-12)


class Branching(Net):
    """A model that runs other ops for 7 rows than for 8."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu() if len(x) == 7 else x)


class Fixed(Net):
    """A model that runs on 8 rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(8, 8))


def highest(y: Tensor, labels: Tensor) -> Tensor:
    return y.amax() + y.mean()


REFUSED: list[tuple[type[nn.Module], Callable[..., Tensor], str]] = [
    (Branching, mean, "Micro-batches of 8 and of 7 rows compute different losses.*Take a number of micro-batches that"),
    (Fixed, mean, "does not run on the whole batch.*Take a number of micro-batches that divides the batch"),
    (Net, highest, "4 micro-batches would give another loss than the batch: amax"),
]


@pytest.mark.parametrize(("model", "loss", "words"), REFUSED)
def test_what_depends_on_equal_sizes_is_refused(
    model: type[nn.Module], loss: Callable[..., Tensor], words: str
) -> None:
    made = autopar.compile(model().double(), loss_fn=loss, micro_batches=4, mesh={"dp": 1})
    with warnings.catch_warnings(), pytest.raises(autopar.StepError, match=words):
        warnings.simplefilter("ignore")
        made.step(*batch(30))
