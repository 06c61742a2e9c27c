"""Ops that one rank of an axis runs alone, on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import PlanError
from autopar.ir import Mesh
from autopar.proof.random_plan import random_plan
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, train
from tests.support.staged import captured_once, prepared_once
from tests.support.tables import often
from tests.support.towers import Towers, towers_plan

pytestmark = pytest.mark.multiprocess

OWNERS = {"a": 0, "b": 1}
loss_fn = torch.nn.functional.cross_entropy


def towers() -> tuple[Towers, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Towers().double(), (torch.randn(8, 8).double(), torch.randint(0, 3, (8,)))


def on_one_process() -> dict[str, Any]:
    model, batch = towers()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        return loss.detach()

    return train(model, step, batch, steps=10)


@captured_once()
def trained(owners: dict[str, int] | None, mesh: str, seed: int = 0) -> tuple[Any, int]:
    """What training gives, and the bytes of parameters that this rank keeps; under a random plan without owners."""
    made = compiled(owners, mesh, seed)
    results = train(made, made.step, towers()[1], steps=10)
    return results, sum(p.to_local().nbytes for p in made.parameters())


def compiled(owners: dict[str, int] | None, mesh: str, seed: int = 0, **options: Any) -> autopar.CompiledModule:
    model, batch = towers()
    prepared = prepared_once(model, batch, loss_fn)
    graph, fingerprint, axes = (prepared.analysis.graph, prepared.captured.fingerprint, Mesh.parse(mesh))
    if owners is not None:
        plan = towers_plan(graph, fingerprint, owners, axes)
    else:
        plan = random_plan(graph, axes, seed=seed, fingerprint=fingerprint, lone_ops=True)
    return autopar.compile(model, loss_fn=loss_fn, plan=plan, **options)


def test_towers_on_two_ranks_train_as_one_process_does(two_ranks: Ranks) -> None:
    found = two_ranks.run(trained, OWNERS, "dp=2")
    expected = on_one_process()
    assert all(difference(each, expected) < 1e-9 for each, _ in found)
    # a: 8 x 16 + 16 + 16 x 4 + 4; b: 8 x 32 + 32 + 2 x 32 + 32 x 4 + 4; head: 8 x 3 + 3; in float64
    assert [held for _, held in found] == [8 * (212 + 27), 8 * (484 + 27)]


def test_a_chain_of_owners_trains_as_one_process_does(two_ranks: Ranks) -> None:
    found = two_ranks.run(trained, {"a": 0, "b": 0, "head": 1}, "dp=2")
    assert max(difference(each, on_one_process()) for each, _ in found) < 1e-9


@pytest.mark.parametrize("seed", often(range(3), [2]))  # in 2 the loss counts its targets over the owners of the loss
def test_random_lone_ops_on_four_ranks(four_ranks: Ranks, seed: int) -> None:
    found = four_ranks.run(trained, None, "a=2,b=2", seed)
    assert max(difference(each, on_one_process()) for each, _ in found) < 1e-9


@captured_once()
def pinned() -> dict[str, Any]:
    model, batch = towers()
    made = autopar.compile(model, loss_fn=loss_fn, mesh={"dp": 2}, pins={"a": "@0", "b.*": "@1"}, example_inputs=batch)
    assert made.plan.ops["linear_2"] == ("@1",)
    return train(made, made.step, batch, steps=10)


SERVED = {"mesh": {"ps": 2}, "recipe": "serve"}
PINNED = {"mesh": {"dp": 2}, "recipe": "ddp", "pins": {"a": "@0", "b": "@1"}}


def with_other_sizes(step: Callable[..., Tensor]) -> list[float]:
    """The losses of a whole batch, of two smaller ones, and of the first again."""
    x, y = towers()[1]
    return [step(x[:rows], y[:rows]).item() for rows in (8, 4, 6, 8)]


def after_other_sizes(asked: dict[str, Any]) -> tuple[list[str], list[float]]:
    """What is said of plans of their own, and the losses."""
    made = autopar.compile(towers()[0], loss_fn=loss_fn, **asked)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        losses = with_other_sizes(made.step)
    return [text for each in warned if "of its own" in (text := str(each.message))], losses


@pytest.mark.parametrize("asked", [SERVED, PINNED], ids=["serve", "pins"])
def test_batches_of_other_sizes_keep_their_owners(two_ranks: Ranks, asked: dict[str, Any]) -> None:
    model = towers()[0]
    expected = with_other_sizes(lambda x, y: loss_fn(model(x), y))
    for warned, losses in two_ranks.run(after_other_sizes, asked):
        assert not warned and losses == pytest.approx(expected, rel=1e-9)


def test_pinned_towers_train_as_one_process_does(two_ranks: Ranks) -> None:
    expected = on_one_process()
    assert all(difference(each, expected) < 1e-9 for each in two_ranks.run(pinned))


@captured_once()
def pinned_in_stages() -> dict[str, Any]:
    model, batch = towers()
    made = autopar.compile(
        model,
        loss_fn=loss_fn,
        mesh={"pp": 2, "dp": 2},
        recipe="pp:1f1b,dp:ddp",
        micro_batches=2,
        pins={"a": "@0@dp", "b.*": "@1@dp"},
        example_inputs=batch,
    )
    assert made.plan.ops["linear_2"] == ("@1",) and made.plan.pipeline is not None
    return train(made, made.step, batch, steps=10)


def test_pinned_towers_in_stages_train_as_one_process_does(four_ranks: Ranks) -> None:
    """Each rank of the pipeline has the parameters of its own stage."""
    whole: dict[str, Any] = {}
    for each in four_ranks.run(pinned_in_stages):
        whole |= each
    expected = on_one_process()
    assert difference({name: whole[name] for name in expected}, expected) < 1e-9


@captured_once()
def sharded() -> dict[str, Any]:
    model, batch = towers()
    made = autopar.compile(
        model,
        loss_fn=loss_fn,
        mesh="x=2,y=2 order y,x",
        recipe={"x": "ddp", "y": "zero1"},
        pins={"b": "@0@x"},
        example_inputs=batch,
    )
    plan = str(made.plan)
    assert "parameter a.2.weight: S(0)@y | V@y V@x" in plan
    assert "parameter b.2.weight: S(0)@y O(0)@x | V@y O(0)@x" in plan
    return train(made, made.step, batch, steps=10)


def test_shards_of_one_rank_and_of_all_travel_apart(four_ranks: Ranks) -> None:
    """Ranks beside the owner of `b` have nothing to gather of it, and shards of `b` to gather."""
    expected = on_one_process()
    assert all(difference(each, expected) < 1e-9 for each in four_ranks.run(sharded))


def test_a_compiling_executor_is_refused(two_ranks: Ranks) -> None:
    messages = two_ranks.run(_refusal)
    assert all('executor="eager"' in message for message in messages)


def _refusal() -> str:
    with pytest.raises(PlanError) as caught:
        made = compiled(OWNERS, "dp=2", executor="aot_eager")
        made.step(*towers()[1])
    return str(caught.value)
