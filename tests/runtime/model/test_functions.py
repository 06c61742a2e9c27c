"""A torch.autograd.Function on real ranks: three steps of AdamW are those of plain PyTorch, by both entrances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, train
from tests.support.functions import made
from tests.support.staged import captured_once
from tests.support.tables import often

NAMES = ("straight_round", "reversal", "as_it_is", "two_of_two", "whole_norm", "of_a_weight", "stack")


def _single(name: str) -> dict[str, Any]:
    model, batch = made(name)

    def step(*batch: Tensor) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    return train(model, step, batch)


@captured_once()
def _compiled(name: str, mesh: dict[str, int], recipe: Any, **kwargs: Any) -> dict[str, Any]:
    model, batch = made(name)
    compiled = autopar.compile(model, mesh=mesh, recipe=recipe, **kwargs)
    return train(compiled, compiled.step, batch)


def _distance(found: list[dict[str, Any]], name: str) -> float:
    """The largest difference of a rank from one process; a stage has the parameters of its own."""
    expected = _single(name)
    assert set().union(*found) == set(expected)
    return max(difference(each, {key: expected[key] for key in each}) for each in found)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", often(NAMES, NAMES[::2]))
def test_two_ranks_split_the_batch(two_ranks: Ranks, name: str) -> None:
    assert _distance(two_ranks.run(_compiled, name, {"dp": 2}, "ddp"), name) < 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "tp"),
    often(
        [("whole_norm", "tp"), ("straight_round", "tp"), ("stack", "auto")], [("whole_norm", "tp"), ("stack", "auto")]
    ),
)
def test_four_ranks(four_ranks: Ranks, name: str, tp: str) -> None:
    assert _distance(four_ranks.run(_compiled, name, {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": tp}), name) < 1e-9


def _staged(recompute: str) -> dict[str, Any]:
    return _compiled("stack", {"pp": 2}, "1f1b", micro_batches=2, recompute=recompute, executor="aot_eager")


@pytest.mark.multiprocess
@pytest.mark.parametrize("recompute", often(["none", "full"], ["full"]))
def test_stages_and_recomputation(two_ranks: Ranks, recompute: str) -> None:
    """The backward clips the gradient of every micro-batch element by element, as it does the whole batch's."""
    assert _distance(two_ranks.run(_staged, recompute), "stack") < 1e-9


def _by_backend(name: str) -> dict[str, Any]:
    torch.compiler.reset()
    model, batch = made(name)
    compiled: nn.Module = torch.compile(model, backend="autopar", options={"recipe": "ddp"})  # type: ignore[assignment]

    def step(*batch: Tensor) -> Tensor:
        loss = compiled(*batch)
        loss.backward()
        return loss.detach()

    return train(model, step, batch)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", often(NAMES, NAMES[1::2]))
def test_the_backend(two_ranks: Ranks, name: str) -> None:
    assert _distance(two_ranks.run(_by_backend, name), name) < 1e-9
