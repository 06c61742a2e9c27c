"""Batches of many lengths: two captures give the programs of all, which compute what one device computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.errors import StepError
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.model.test_shapes import cross_entropy, distance, reader, tokens
from tests.support.staged import plan_for

pytestmark = pytest.mark.multiprocess

LENGTHS = range(2, 17)


def over_lengths(settings: dict[str, Any], rows: int = 4) -> tuple[float, int, int]:
    """The worst distance from one device over batches of 15 lengths, the captures, and the plans."""
    settings = dict(settings)
    layers = 2 if "stages" in settings else 1
    if stages := settings.pop("stages", None):
        settings["plan"] = plan_for(reader(layers), tokens((rows, 16)), cross_entropy, *stages)
    made = autopar.compile(reader(layers), loss_fn=cross_entropy, **settings)
    lengths = [16, *LENGTHS[:-1]] if stages else LENGTHS
    worst = [distance(made, reader(layers), tokens((rows, n), n)) for n in lengths]
    ready = made._kept.ready[True]
    assert len(ready) == 15
    assert len({id(r.captures) for r in ready}) == 1
    plans = {str(r.bound.program.plan.ops) for r in ready}
    return max(worst, key=nan_last), ready[-1].captures.count, len(plans)


@pytest.mark.parametrize(
    ("settings", "captures"),
    [
        ({"mesh": {"dp": 2}, "recipe": "zero3"}, 2),
        pytest.param({"mesh": {"tp": 2}, "recipe": "tp"}, 2, marks=pytest.mark.slow),
        ({"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 2}, 4),  # of a batch, and of a part
        ({"stages": ("1f1b", 2, 4)}, 4),
    ],
)
def test_15_lengths_take_two_captures(two_ranks: Ranks, settings: dict[str, Any], captures: int) -> None:
    for worst, count, plans in two_ranks.run(over_lengths, settings):
        assert worst < 1e-12
        assert count == captures
        assert plans == 1


class Scaled(nn.Module):
    """A map whose result is multiplied by a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.scale = nn.Linear(4, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).square().mean() * self.scale


def test_the_code_of_a_graph_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new length passes through a dozen passes; each could write the Python code of the graph anew."""
    made, (x, y) = autopar.compile(reader(1), loss_fn=cross_entropy), tokens((2, 16))
    for length in (16, 8):
        made.step(x[:, :length], y[:, :length])
    written, write = [], fx.Graph.python_code

    def counted(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        written.append(len(graph.nodes))
        return write(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    made.step(x[:, :12], y[:, :12])
    assert len(written) == 1


def test_another_python_value_is_captured_again() -> None:
    model, single = autopar.compile(Scaled()), Scaled()
    for length, scale, captures in [(3, 1, 1), (4, 1, 2), (5, 1, 2), (6, 2, 1), (7, 2, 2), (8, 1, 2)]:
        x = torch.ones(2, length, 4)
        model.scale = single.scale = scale
        assert torch.equal(model.step(x), single(x))
        assert model._kept.ready[True][-1].captures.count == captures


def test_a_forward_and_a_step_have_captures_of_their_own() -> None:
    model, single = autopar.compile(Scaled()), Scaled()
    for length in (3, 4, 5, 6):
        x = torch.ones(2, length, 4)
        assert torch.equal(model.step(x), single(x))
        with torch.no_grad():
            assert torch.equal(model(x), single(x))
    counts = [model._kept.ready[is_step][-1].captures.count for is_step in (True, False)]
    assert counts == [2, 2]


class Cut(nn.Module):
    """A model that takes another way for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x[:, :4] if x.shape[1] > 4 else x).square().mean()


def test_the_reason_for_a_capture_of_every_size_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = autopar.compile(Cut())
    with caplog.at_level(logging.INFO, "autopar"):
        for length in (3, 4, 6, 7):
            model.step(torch.ones(2, length, 4))
    (said,) = [r.getMessage() for r in caplog.records if "by itself" in r.getMessage()]
    assert said == "Captured by itself, as the model takes another branch for a size over 4."
    assert model._kept.ready[True][-1].captures.count == 4


def one_by_one(model: Any) -> None:
    for length in (3, 4, 5, 4):
        model.prepare(torch.empty(2, length, 4, device="meta"))


def with_a_batch(model: Any) -> None:
    model.prepare(torch.ones(2, 3, 4), shapes=[(2, length, 4) for length in (3, 4, 5, 4)])


def after_a_batch(model: Any) -> None:
    model.prepare(torch.ones(2, 3, 4))
    model.prepare(shapes=[(2, 4, 4), [(2, 5, 4)]])


@pytest.mark.parametrize("prepare", [one_by_one, with_a_batch, after_a_batch])
def test_sizes_are_prepared_before_they_come(prepare: Callable[[Any], None]) -> None:
    model, single = autopar.compile(Scaled()), Scaled()
    prepare(model)
    programs = list(model._kept.ready[True])
    for length in (5, 3, 4):
        x = torch.ones(2, length, 4)
        assert torch.equal(model.step(x), single(x))
    assert len(programs) == 3
    assert {id(r) for r in model._kept.ready[True]} == {id(r) for r in programs}
    assert programs[-1].captures.count == 2


def test_a_list_of_shapes_says_what_is_being_prepared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        with_a_batch(autopar.compile(Scaled()))
    said = [text for text in caplog.messages if text.startswith("Shapes")]
    assert said == [f"Shapes {n} of 4: [2, {length}, 4]." for n, length in enumerate((3, 4, 5, 4), 1)]


def test_a_list_of_shapes_needs_a_batch_and_shapes_of_it() -> None:
    model = autopar.compile(Scaled())
    with pytest.raises(StepError, match="the model's inputs are not known"):
        model.prepare(shapes=[(2, 3, 4)])
    with pytest.raises(StepError, match=r"the shape \(2, 3\) for a batch of shapes \[2, 3, 4\]"):
        model.prepare(torch.ones(2, 3, 4), shapes=[(2, 3)])
