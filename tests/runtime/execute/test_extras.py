"""What a loss returns behind the loss is given back, and is what one device gives, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import StepError
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

ROWS, STEPS, CLASSES, WIDTH, IGNORED = 8, 4, 16, 8, -100


class Words(nn.Module):
    """Token ids of shape `(rows, steps)` to logits `(rows, steps, classes)` and what the first layer made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(torch.tanh(self.table(tokens))))
        return {"logits": self.head(torch.tanh(self.second(hidden))), "hidden": hidden}


def loss_and_more(out: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
    logits, hidden = out["logits"], out["hidden"]
    counts = targets != IGNORED
    right = logits.argmax(-1) == targets
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, {
        "loss": loss,  # a masked mean
        "accuracy": right.double().mean(),
        "masked accuracy": (right & counts).sum() / counts.sum(),
        "right": right.sum(),
        "hits": right,
        "right by class": (right.unsqueeze(-1) * F.one_hot(targets.clamp(min=0), CLASSES)).sum((0, 1)),
        "logits": logits,
        "guesses": logits.argmax(-1),
        "flat": logits.flatten(0, 1),
        "turned": logits.permute(2, 1, 0),
        "turned and flat": logits.transpose(0, 1).flatten(0, 1),
        "early rows": [hidden, hidden.mean()],
        "scale": torch.linspace(0, 1, 3, dtype=torch.float64),
        "number": 3,
        "rows": len(targets),
        "rows of ones": torch.ones(len(targets)).sum(),
        "elements": [targets.numel(), torch.tensor(targets.numel())],
        "nothing": None,
    }


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, (ROWS, STEPS), generator=generator)
    targets = torch.randint(CLASSES, (ROWS, STEPS), generator=generator)
    targets[1, 1:] = targets[4, 0] = targets[7] = IGNORED
    return tokens, targets


Named = dict[str, Any]


def leaves(result: tuple[Tensor, Mapping[str, Any]]) -> Named:
    """The loss and every extra result by name, lists opened, DTensors whole."""
    named = {"": result[0]}
    for name, value in result[1].items():
        values = value if isinstance(value, list) else [value]
        named |= {f"{name} {i}": x for i, x in enumerate(values)}
    return {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in named.items()}


def gradients(model: nn.Module) -> Named:
    """The gradients that this rank holds, whole, by name."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}


def in_one_process() -> tuple[Named, Named]:
    model, (tokens, targets) = Words(), batch()
    loss, extras = loss_and_more(model(tokens), targets)
    loss.backward()
    named = leaves((loss, extras))
    detached = {k: x.detach() if isinstance(x, Tensor) else x for k, x in named.items()}
    return detached, gradients(model)


@captured_once()
def on_a_rank(options: dict[str, Any]) -> tuple[Named, Named]:
    made = autopar.compile(Words(), loss_fn=loss_and_more, **options)
    return leaves(made.step(*batch())), gradients(made)


def worst(found: Named, expected: Named) -> float:
    """The largest difference of two sets of results; infinite where a type, shape or plain value differs."""
    return max(_difference(found[name], expected[name]) for name in expected)


def _difference(a: Any, b: Any) -> float:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if (a.shape, a.dtype, a.requires_grad) != (b.shape, b.dtype, False):
        return float("inf")
    return (a.double() - b.double()).abs().max().item()


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "1 rank, accumulation": (1, {"micro_batches": 4}),
    "dp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "dp, accumulation": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 4}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "tp, accumulation": (2, {"mesh": {"tp": 2}, "recipe": "tp+sp", "micro_batches": 2}),
    "pp": (2, {"mesh": {"pp": 2}, "micro_batches": 4}),
    "pp, interleaved": (2, {"mesh": {"pp": 2}, "micro_batches": 4, "schedule": "interleaved"}),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "ddp", "tp": "tp"}}),
    "dp x tp, accumulation": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero2", "tp": "tp"}, "micro_batches": 2},
    ),
    "pp x dp": (4, {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2}),
    "recomputed": (2, {"mesh": {"dp": 2}, "recipe": "ddp", "recompute": "full"}),
    "aot": (2, {"mesh": {"dp": 2}, "recipe": "ddp", "executor": "aot_eager"}),
}


SELDOM = {"1 rank", "dp", "tp", "pp"}  # what they do the others do, and more


@pytest.mark.parametrize("way", often(WAYS, WAYS.keys() - SELDOM))
def test_extra_results_are_those_of_one_device(way: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    count, options = WAYS[way]
    expected, expected_gradients = in_one_process()
    ranks = {2: two_ranks, 4: four_ranks}
    results = ranks[count].run(on_a_rank, options) if count > 1 else [on_a_rank(options)]
    for found, own in results:
        assert list(found) == list(expected)
        assert worst(found, expected) < 1e-12
        assert worst(own, {name: expected_gradients[name] for name in own}) < 1e-12


@captured_once()
def of_parts(options: dict[str, Any]) -> Named:
    """The results where every rank gives its own rows of the batch."""
    made = autopar.compile(Words(), loss_fn=loss_and_more, **options)
    if options.get("batch") != "local":
        made.step(*batch())  # the first shape is the global one
    return leaves(made.step(*(x.chunk(2)[dist.get_rank()] for x in batch())))


PARTS: dict[str, dict[str, Any]] = {
    "parts": {"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 2},
    "batch=local": {"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 2, "batch": "local"},
    "batch=local, tp": {"mesh": {"tp": 2}, "recipe": "tp", "micro_batches": 2, "batch": "local"},
    "as DTensors": {"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 2, "batch": "local", "outputs": "dtensor"},
}


@pytest.mark.parametrize("way", PARTS)
def test_rows_are_in_the_order_of_the_batch_that_ranks_gave_in_parts(way: str, two_ranks: Ranks) -> None:
    expected, _ = in_one_process()
    for found in two_ranks.run(of_parts, PARTS[way]):
        assert worst(found, expected) < 1e-12


def kinds(micro_batches: int) -> list[str]:
    made = autopar.compile(
        Words(), loss_fn=loss_and_more, mesh={"dp": 2}, recipe="ddp", outputs="dtensor", micro_batches=micro_batches
    )
    _, extras = made.step(*batch())
    return [str(extras["logits"].placements), type(extras["accuracy"]).__name__]


def test_what_the_plan_splits_is_a_dtensor_where_that_was_asked(two_ranks: Ranks) -> None:
    for found in two_ranks.run(kinds, 1):
        assert found == ["(Shard(dim=0),)", "Tensor"]


def test_under_no_grad_they_are_given_too() -> None:
    made = autopar.compile(Words(), loss_fn=loss_and_more)
    with torch.no_grad():
        found = leaves(made.step(*batch()))
    assert worst(found, in_one_process()[0]) < 1e-12
    assert all(g is None for g in gradients(made).values())


class OwnLoss(Words):
    """Returns its loss with the logits, as a model of transformers does with return_dict=False."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)["logits"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def test_a_model_may_return_them_itself() -> None:
    made = autopar.compile(OwnLoss(), micro_batches=2)
    loss, logits = made.step(*batch())
    expected, _ = in_one_process()
    assert worst({"": loss, "logits 0": logits}, {k: expected[k] for k in ("", "logits 0")}) < 1e-12


class Judged(NamedTuple):
    total: Tensor
    hits: Tensor


def named(out: dict[str, Tensor], targets: Tensor) -> Judged:
    loss, extras = loss_and_more(out, targets)
    return Judged(loss, extras["hits"])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_named_tuple_stays_one(micro_batches: int) -> None:
    found = autopar.compile(Words(), loss_fn=named, micro_batches=micro_batches).step(*batch())
    expected, _ = in_one_process()
    assert isinstance(found, Judged)
    own = {"": found.total, "hits 0": found.hits}
    assert worst(own, {name: expected[name] for name in own}) < 1e-12


@pytest.mark.parametrize("kind", [list, dict])
def test_a_loss_in_a_list_or_dict_is_told_what_to_return(kind: type) -> None:
    def loss(out: dict[str, Tensor], targets: Tensor) -> Any:
        found, extras = loss_and_more(out, targets)
        return [found, extras["hits"]] if kind is list else {"loss": found, "hits": extras["hits"]}

    with pytest.raises(StepError, match=f"returns a {kind.__name__} with .* Return a tuple"):
        autopar.compile(Words(), loss_fn=loss).step(*batch())


def largest(out: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss, _ = loss_and_more(out, targets)
    return loss, {"largest": out["logits"].max()}


def test_what_micro_batches_do_not_give_is_refused_by_name_and_op() -> None:
    made = autopar.compile(Words(), loss_fn=largest, micro_batches=2)
    with pytest.raises(StepError, match=r"result\[1\]\['largest'\] cannot be computed from") as caught:
        made.step(*batch())
    assert "max (in the loss function) is neither a row for every sample" in str(caught.value)


def places(out: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss, _ = loss_and_more(out, targets)
    return loss, {"places": torch.arange(len(targets))}


def test_numbers_of_the_rows_are_refused_by_name() -> None:
    """Every micro-batch would number its rows from 0."""
    made = autopar.compile(Words(), loss_fn=places, micro_batches=2)
    with pytest.raises(StepError, match=r"\['places'\] cannot be computed from 2 micro-batches: arange \("):
        made.step(*batch())


class Counting(OwnLoss):
    """Notes how many rows it has met."""

    met = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.met = len(tokens)
        return super().forward(tokens, targets)


def test_a_number_of_rows_that_a_forward_notes_is_that_of_the_batch() -> None:
    made = autopar.compile(Counting(), micro_batches=2)
    made.step(*batch())
    assert made.met == ROWS


def test_unasked_no_micro_batches_are_taken_that_would_not_give_it() -> None:
    made = autopar.compile(Words(), loss_fn=largest)
    _, extras = made.step(*batch())
    assert made.plan.micro_batches == 1
    expected = Words()(batch()[0])["logits"].max()
    assert extras["largest"].item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_batch_of_which_nothing_counts_has_the_loss_of_one_device() -> None:
    made = autopar.compile(Words(), loss_fn=loss_and_more, micro_batches=2)
    tokens, targets = batch()
    loss, extras = made.step(tokens, torch.full_like(targets, IGNORED))
    assert loss.isnan() and extras["masked accuracy"].isnan()
    assert extras["right"].item() == 0


def test_verify_takes_a_loss_with_extra_results() -> None:
    report = autopar.verify(Words(), batch(), mesh={"pp": 2, "dp": 2}, micro_batches=2, loss_fn=loss_and_more)
    assert report.passed, report
