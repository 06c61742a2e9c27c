"""What compiled models ask of NCCL is legal and within budgets: every recipe and schedule, played in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autopar import _torch
from autopar.api import planner
from autopar.ir.pipeline import PLACEMENTS
from autopar.search import RECIPES
from tests.support import shared_captures
from tests.support.experts import Routed, routes
from tests.support.nccl.launches import MODES, launches_of
from tests.support.nccl.programs import WORDS, Model, Program
from tests.support.nccl.rules import unlike_orders, violations
from tests.support.nccl.traces import NewGroup, Sync, Traces, between, calls_of

_SMALL_BYTES = 1024
# They read what lies on the host, whatever the device is: a loss that has arrived, shares and seeds.
_ON_HOST = (
    "runtime/failures/finite.py",
    "analysis/objective.py",
    "runtime/pipeline/pipeline.py",
    "runtime/ranks/seeds.py",
    "runtime/ranks/world.py",
    "runtime/execute/executor.py",
)
_STEPS = {"micro_batches": 4}


class Budget(NamedTuple):
    """The most that one rank may ask for.

    Attributes:
        new_groups: calls of `new_group`.
        communicators: communicators that are made when they are first used.
        syncs: places of a step where the host waits for the device.
        small: messages of a step below 1 kB.
    """

    new_groups: int = 0
    communicators: int = 1
    syncs: int = 0
    small: int = 2


def _experts() -> tuple[torch.Tensor, ...]:
    return torch.randn(32, 8), routes("even", 32), torch.randn(32, 8)


def _squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).pow(2).mean()


def _one_axis() -> Iterator[tuple[str, Program, Budget]]:
    """Every recipe of one axis; the more messages below 1 kB are this tiny model's activations."""
    own = {"serve": Budget(communicators=2), "columns": Budget(small=4)}
    # The host waits for each gradient that it takes, one a parameter, and for each that it writes to a file.
    own |= dict.fromkeys(("zero-offload", "zero3-offload", "zero-infinity"), Budget(syncs=16))
    own["zero-infinity-nvme"] = Budget(syncs=32)
    for name in sorted(RECIPES.keys() - {"auto", "tp+ep", "ep", "ep+zero1", "ep+zero3"}):
        yield name, Program({"x": 2}, name), own.get(name, Budget())
    yield "local:2", Program({"x": 2}, "local:2"), Budget()
    yield "geo:2", Program({"x": 2}, "geo:2"), Budget()
    # Parameters in shards are gathered and reduced one by one in so small a model.
    for name, budget in (("ep", Budget(syncs=2, small=5)), ("ep+zero3", Budget(syncs=2, small=7))):
        yield name, Program({"x": 2}, name, Routed, _experts, _squared), budget


def _pipelines() -> Iterator[tuple[str, Program, Budget]]:
    """Every schedule: a group and a communicator of two ranks; one sync a step for masked labels.

    One more group gives all stages what single ones have; it makes a communicator only if a script asks for that.
    """
    budget = Budget(new_groups=3, communicators=2, syncs=1, small=1)
    for name, placement in PLACEMENTS.items():
        options = _STEPS | ({"chunks": 2} if placement == "rounds" else {})
        model = partial(Model, blocks=1 if placement == "one" else 2)
        yield name, Program({"pp": 2}, {"pp": name}, model, options=options), budget
    tied = Program({"pp": 2}, {"pp": "1f1b"}, partial(Model, tied=True), options=_STEPS)
    yield "1f1b, tied weights", tied, budget
    frozen = Program({"pp": 2}, {"pp": "zb"}, partial(Model, 2, frozen=True), options=_STEPS | {"chunks": 2})
    yield "zb, frozen weights", frozen, budget


def _others() -> Iterator[tuple[str, Program, Budget]]:
    yield ("ddp, dropout", Program({"dp": 2}, "ddp", partial(Model, dropout=0.1)), Budget(small=3))
    yield "zero3 on 4", Program({"dp": 4}, "zero3"), Budget()
    mixed = {"dp": "zero3", "tp": "tp+sp"}
    yield "zero3 x tp+sp", Program({"dp": 2, "tp": 2}, mixed), Budget(8, 3, small=20)
    of_eight = Program({"pp": 2, "dp": 2, "tp": 2}, {"pp": "1f1b", **mixed}, options={"micro_batches": 2})
    yield "1f1b x zero3 x tp+sp", of_eight, Budget(28, 5, 1, 60)


_CASES = (*_one_axis(), *_pipelines(), *_others())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks read one capture."""
    monkeypatch.setattr(planner, "StoredCaptures", shared_captures._shared_unless_named)


@pytest.mark.filterwarnings("ignore:The loss of step")  # whose values are made up
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("name", "program", "budget"), _CASES, ids=[case[0] for case in _CASES])
def test_a_program_is_legal_and_within_its_budget(name: str, program: Program, budget: Budget, tmp_path: Path) -> None:
    if "nvme" in name:
        program.options = {"nvme": tmp_path}
    traces = program.play()
    for mode in MODES:
        assert not violations(traces, mode)
    assert "pp" in program.mesh or "serve" in name or not unlike_orders(traces)
    spent = _spent(traces)
    assert all(x <= most for x, most in zip(spent, budget, strict=True)), (spent, budget)


@pytest.mark.usefixtures("shared")
def test_over_nccl_a_limit_of_time_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "uses_nccl", lambda device: True)
    limited: dict[str, float] = {}
    monkeypatch.setattr(_torch, "set_group_timeout", lambda group, seconds: limited.update({group.group_name: seconds}))
    program = Program({"pp": 2}, {"pp": "1f1b"}, options=_STEPS | {"timeout_seconds": 60.0})
    traces = program.play()
    assert _spent(traces).new_groups == 3
    used = {call.group for event in traces[0] for call in calls_of(event)}
    assert used <= limited.keys() and {*limited.values()} == {60.0}


@pytest.mark.usefixtures("shared")
def test_1024_ranks_make_one_group_for_each_line_of_an_axis() -> None:
    batch = torch.randint(WORDS, (256, 8))
    program = Program({"dp": 256, "tp": 4}, {"dp": "zero3", "tp": "tp+sp"}, batch=lambda: (batch, batch.roll(1, 1)))
    traces = program.play([0, 3, 1020, 1023])
    for mode in MODES:
        assert not violations(traces, mode)
    assert _spent(traces)[:3] == (4 + 256, 3, 0)


def _spent(traces: Traces) -> Budget:
    """What the rank asks for that asks for the most."""
    every = [_of_rank(traces, rank) for rank in traces]
    return Budget(*map(max, zip(*every, strict=True)))


def _of_rank(traces: Traces, rank: int) -> Budget:
    step = between(traces[rank], "begin 3", "end 3")
    calls = [call for event in step for call in calls_of(event)]
    return Budget(
        sum(isinstance(event, NewGroup) for event in traces[rank]),
        len({each.communicator for each in launches_of(traces, "lazy")[rank].values()}),
        sum(isinstance(event, Sync) and not event.where.startswith(_ON_HOST) for event in step),
        sum(call.bytes < _SMALL_BYTES for call in calls),
    )
