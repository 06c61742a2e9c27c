"""A batch is cut into micro-batches that nobody asked for, where that changes no result and is faster, or fits."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_model import find_hardware
from autopar.ir.note import kind_of
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import DP, difference, full_state
from tests.support.staged import captured_once
from tests.support.wide_blocks import Block

pytestmark = pytest.mark.multiprocess


class Long(nn.Module):
    """Few parameters, and activations of many positions; labels below 0 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.head = nn.Linear(8, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.map(x).sigmoid()).flatten(0, 1), y.flatten(), ignore_index=-1)


class Counting(Long):
    """A count of steps, which every micro-batch would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().forward(x, y)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 256, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(-1, 5, (16, 256), generator=generator)


def _made(model: nn.Module, **options: Any) -> autopar.CompiledModule:
    given: dict[str, Any] = {"mesh": DP, "recipe": "ddp", "recompute": "none", **options}
    return autopar.compile(model, example_inputs=_batch(), headroom=0.0, **given)


@captured_once()
def trained(kind: type[Long]) -> tuple[int, float, float] | str:
    """Micro-batches under a bound that fits half of a batch, and distances of loss and parameters from one process."""
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    bound = int(_made(copy.deepcopy(model), micro_batches=2).explain().memory_bytes)
    try:
        made = _made(model, memory_bytes=bound)
    except autopar.SearchError as error:
        return str(error)
    loss = made.step(*_batch())
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    expected = plain(*_batch())
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    far = difference(full_state(made), dict(plain.state_dict()))
    return made.plan.micro_batches, abs(loss.item() - expected.item()), far


def test_results_are_those_of_one_process(two_ranks: Ranks) -> None:
    for found in two_ranks.run(trained, Long):
        assert not isinstance(found, str), found
        count, loss_far, far = found
        assert count == 2 and loss_far < 1e-12 and far < 1e-12


def test_a_buffer_is_changed_once_or_nothing_fits(two_ranks: Ranks) -> None:
    for found in two_ranks.run(trained, Counting):
        assert isinstance(found, str) and "fits into" in found


class Deep(nn.Module):
    """Blocks that take longer to run again than a batch takes in two parts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), y)

    def loss(self, found: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(found.flatten(0, 1), y.flatten(), ignore_index=-1)


class Normalized(Deep):
    """Statistics of the batch, which are others in its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, track_running_stats=False)

    def loss(self, found: Tensor, y: Tensor) -> Tensor:
        return super().loss(self.norm(found.flatten(0, 1)).view_as(found), y)


class Squared(Deep):
    """A mean over unmasked tokens, squared: no shares of micro-batches give it."""

    def loss(self, found: Tensor, y: Tensor) -> Tensor:
        return super().loss(found, y) ** 2


SLOW = dataclasses.replace(find_hardware("cpu-gloo"), host_seconds=0.0)


def _deep_batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, 32, generator=generator, dtype=torch.float64)
    return x, torch.randint(-1, 5, (rows, 64), generator=generator)


def _deep(model: nn.Module, **options: Any) -> autopar.CompiledModule:
    given: dict[str, Any] = {"mesh": DP, "recipe": "ddp", "hardware": SLOW, **options}
    return autopar.compile(model, example_inputs=_deep_batch(), headroom=0.0, **given)


def _halves_fit() -> int:
    """Bytes of a step in two micro-batches that keeps everything for backward."""
    made = _deep(Deep().double(), micro_batches=2, recompute="none")
    return int(made.explain().memory_bytes)


def _distances(made: autopar.CompiledModule, plain: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The largest distance of the loss and of every gradient from those of one process."""
    loss, expected = made.step(*batch), plain(*batch)
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    whole = {name: p.grad.full_tensor() for name, p in made.named_parameters()}  # type: ignore[union-attr]
    made.zero_grad()
    plain.zero_grad()
    return max(abs(loss.item() - expected.item()), difference(whole, gradients))


@captured_once()
def in_parts(kind: type[Deep]) -> tuple[int, str, list[str], list[float]]:
    """Micro-batches, recomputation and notes of a plan in little memory, and distances of steps from one process.

    The second batch has targets that count in its first rows alone, the third is a last, smaller one.
    """
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    made = _deep(model, memory_bytes=_halves_fit())
    x, y = _deep_batch()
    masked = y.clone()
    masked[8:] = -1
    far = [_distances(made, plain, each) for each in [(x, y), (x, masked), (x[:3], y[:3])]]
    plan = made.plan
    notes = [str(note) for note in plan.notes if kind_of(note) == "micro-batches"]
    return plan.micro_batches, str(plan.recompute), notes, far


def test_a_step_that_is_faster_in_parts_gives_the_results_of_one_process(two_ranks: Ranks) -> None:
    for count, recompute, notes, far in two_ranks.run(in_parts, Deep):
        assert count == 2 and recompute == "none"
        assert len(notes) == 1 and notes[0].startswith("2 micro-batches: a step takes")
        assert notes[0].endswith(" (micro_batches=1 forces that)")
        assert max(far) < 1e-12


@pytest.mark.parametrize("kind", [Normalized, Squared])
def test_a_step_whose_parts_have_other_results_is_not_cut(two_ranks: Ranks, kind: type[Deep]) -> None:
    for count, recompute, notes, far in two_ranks.run(in_parts, kind):
        assert count == 1 and recompute != "none" and not notes
        assert max(far) < 1e-12


@captured_once()
def asked_for_one() -> tuple[int, str]:
    """Micro-batches and recomputation where one micro-batch is asked for in little memory."""
    model = Deep().double()
    plan = _deep(model, memory_bytes=_halves_fit(), micro_batches=1).plan
    return plan.micro_batches, str(plan.recompute)


def test_a_number_that_is_asked_for_is_taken(two_ranks: Ranks) -> None:
    for count, recompute in two_ranks.run(asked_for_one):
        assert count == 1 and recompute != "none"


@captured_once()
def larger() -> tuple[int, int, float]:
    """Micro-batches of the first step, and of one with four times as many rows, which do not fit at once."""
    torch.manual_seed(0)
    model = Deep().double()
    plain = copy.deepcopy(model)
    bound = int(_deep(copy.deepcopy(model), micro_batches=1, recompute="none").explain().memory_bytes)
    made = _deep(model, memory_bytes=bound, recompute="none")
    far = _distances(made, plain, _deep_batch(64))
    return made.plan.micro_batches, made._programs.kept.ready[True][-1].count, far


def test_a_larger_batch_that_does_not_fit_runs_in_parts(two_ranks: Ranks) -> None:
    for first, then, far in two_ranks.run(larger):
        assert (first, then) == (1, 4) and far < 1e-12


@captured_once()
def beside_own_rows() -> float:
    """Distance of a step in two micro-batches whose targets are each rank's rows of a result of `model(...)`."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 4).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    made = autopar.compile(
        copy.deepcopy(plain),
        loss_fn=F.mse_loss,
        mesh=DP,
        recipe="ddp",
        micro_batches=2,
        example_inputs=(x, torch.zeros(8, 4, dtype=torch.float64)),
        outputs="local",
    )
    with torch.no_grad():
        targets, expected = made(x) * torch.arange(1.0, 5.0), plain(x) * torch.arange(1.0, 5.0)
    assert len(targets) == 4
    return abs(made.step(x, targets).item() - F.mse_loss(plain(x), expected).item())


def test_rows_of_a_result_are_gathered_beside_a_whole_batch(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(beside_own_rows)) < 1e-12


class Scored(nn.Linear):
    """A loss with the scores that it was computed from."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return F.mse_loss(scores, y), scores


@captured_once()
def rows_beside_own_rows() -> float:
    """Distance of the rows of a step in two micro-batches, of whole inputs and each rank's rows of the targets."""
    torch.manual_seed(0)
    plain = Scored(8, 4).double()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    made = autopar.compile(copy.deepcopy(plain), mesh=DP, recipe="ddp", micro_batches=2, example_inputs=(x, y))
    _, scores = made.step(x, y.chunk(2)[torch.distributed.get_rank()])
    return float((scores - plain(x, y)[1]).abs().max())


def test_rows_come_in_the_order_of_a_batch_that_was_gathered(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(rows_beside_own_rows)) < 1e-12


class Boxes(nn.Linear):
    """A sum over all rows divided by the number of some."""

    def forward(self, x: Tensor, holds: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).square().sum() / holds.sum()


@captured_once()
def divided_by_none(dtype: torch.dtype) -> str:
    """What a step says in whose second micro-batch no row is counted, and all are added up."""
    x, holds = torch.randn(8, 8), torch.zeros(8, dtype=dtype)
    holds[:3] = 1
    made = autopar.compile(Boxes(8, 4), mesh=DP, recipe="ddp", micro_batches=2, example_inputs=(x, holds))
    with pytest.raises(autopar.StepError) as error:
        made.step(x, holds)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_sum_that_is_divided_by_no_rows_is_refused(two_ranks: Ranks, dtype: torch.dtype) -> None:
    for said in two_ranks.run(divided_by_none, dtype):
        assert "has a denominator of 0 and a numerator that is not 0" in said


class Trained(Deep):
    """A count of the steps in training, which every micro-batch would raise; a squared loss where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor, power: int = 1) -> Tensor:
        if self.training:
            self.steps.add_(1)
        loss = super().forward(x, y)
        return loss if power == 1 else loss**power


@captured_once()
def changed_after_a_cut() -> tuple[int, float, list[tuple[int, float, float]]]:
    """Micro-batches and distance from one process of a first step, and then of steps that cannot be cut."""
    torch.manual_seed(0)
    model = Trained().double().eval()
    plain = copy.deepcopy(model)
    made = _deep(model, memory_bytes=_halves_fit() + 10_000)
    first = abs(made.step(*_deep_batch()).item() - plain(*_deep_batch()).item())
    far = []
    for trains, power in ((False, 2), (True, 1)):
        made.train(trains)
        plain.train(trains)
        batch = _deep_batch(8)  # fewer rows, which fit whole
        loss = made.step(*batch, power=power).item() - plain(*batch, power=power).item()
        count = made._programs.kept.ready[True][-1].count
        far.append((count, abs(loss), float(made.get_buffer("steps") - plain.get_buffer("steps"))))
    return made.plan.micro_batches, first, far


def test_a_later_step_that_cannot_be_cut_runs_whole(two_ranks: Ranks) -> None:
    for count, first, far in two_ranks.run(changed_after_a_cut):
        assert count == 2 and first < 1e-12
        assert all(each[0] == 1 and each[1] < 1e-12 and each[2] == 0 for each in far), far


class Telling(Long):
    """Returns its loss with the most likely class of every position."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.map(x).sigmoid())
        loss = F.cross_entropy(found.flatten(0, 1), y.flatten(), ignore_index=-1)
        return loss, found.argmax(-1)


@captured_once()
def evaluated(kind: type[Long], rows: int, is_asked: bool = False) -> tuple[int, float, list[bool]] | str:
    """Micro-batches of a training, and an evaluation under its bound against one process: loss and other results."""
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    bound = int(_made(copy.deepcopy(model), micro_batches=8).explain().memory_bytes)
    made = _made(model, memory_bytes=bound, **({"micro_batches": 8} if is_asked else {}))
    made.step(*_batch())
    gradients = [p.grad.clone() for p in made.parameters()]
    far, are_equal = 0.0, [True]
    x, y = (each[:rows] for each in _batch())
    for training in (True, False, False):
        made.train(training), plain.train(training)
        with torch.no_grad():
            try:
                found, expected = made(x, y), plain(x, y)
            except autopar.SearchError as error:
                return str(error)
        if isinstance(expected, tuple):
            (found, told), (expected, classes) = found, expected
            are_equal.append(torch.equal(told, classes))
        far = max(far, abs(found.item() - expected.item()))
    same = zip(gradients, made.parameters(), strict=True)
    are_equal += [torch.equal(a, p.grad) for a, p in same]
    return made.plan.micro_batches, far, are_equal


@pytest.mark.parametrize(("kind", "rows"), [(Long, 16), (Telling, 16), (Telling, 8)])
def test_an_evaluation_that_does_not_fit_whole_runs_in_parts(two_ranks: Ranks, kind: type[Long], rows: int) -> None:
    for found in two_ranks.run(evaluated, kind, rows):
        assert not isinstance(found, str), found
        count, far, are_equal = found
        assert count == 8 and far < 1e-12 and all(are_equal)


@captured_once()
def evaluated_without_loss() -> str:
    """Why a batch that trains in parts is not evaluated by a model that returns no loss."""
    model, (x, y) = (nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 5)).double(), _batch())
    given: dict[str, Any] = {"mesh": DP, "recipe": "ddp", "recompute": "none", "headroom": 0.0}
    given |= {"loss_fn": _cross_entropy, "micro_batches": 8, "example_inputs": (x, y)}
    bound = int(autopar.compile(copy.deepcopy(model), **given).explain().memory_bytes)
    made = autopar.compile(model, memory_bytes=bound, **given)
    made.step(x, y)
    with torch.no_grad(), pytest.raises(autopar.SearchError) as error:
        made(x)
    return str(error.value)


def _cross_entropy(found: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(found.flatten(0, 1), y.flatten(), ignore_index=-1)


class Largest(Long):
    """Returns the largest score in an evaluation, which is not the mean of the largest of its parts."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            return super().forward(x, y)
        return self.head(self.map(x).sigmoid()).max()


class Weighted(Long):
    """Returns the loss times the number of rows in an evaluation, which Python reads from their shape."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss if self.training else loss * len(x)


@pytest.mark.parametrize(("kind", "is_asked"), [(Largest, False), (Weighted, False), (Long, True)])
def test_parts_that_change_results_or_were_asked_for_evaluate_nothing(
    two_ranks: Ranks, kind: type[Long], is_asked: bool
) -> None:
    for found in two_ranks.run(evaluated, kind, 16, is_asked):
        assert isinstance(found, str) and "fits into" in found


def test_without_a_loss_the_evaluation_says_what_is_missing(two_ranks: Ranks) -> None:
    for found in two_ranks.run(evaluated_without_loss):
        assert "fits into" in found and "smaller batch" in found
