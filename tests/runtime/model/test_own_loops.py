"""A model under a training loop of the script's own, which calls `model(...)` and methods of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import planner
from autopar.errors import SearchError
from autopar.ir import Plan
from tests.runtime.gloo_ranks import Ranks, equal_on_all


class Writer(nn.Module):
    """A model with a `generate` that the script defines: it calls the model, and keeps what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out = self.layer(x)
        return out, None if y is None else (out - y).pow(2).mean()

    @torch.no_grad()
    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self.drawn(x)
        self.seen += count
        return x

    def drawn(self, x: Tensor) -> Tensor:
        return torch.cat([x, self(x)[0][-1:] + torch.rand(1)])


def loop(model: Any) -> tuple[float, list[float], int]:
    """Two steps of nanoGPT's loop: the loss of a tuple divided, clipped, evaluated; then `generate`."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(0)
    for _ in range(2):
        loss = model(torch.ones(4, 4), torch.zeros(4, 4))[1] / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item(), model.generate(torch.ones(2, 4), 2).flatten().tolist(), model.seen


def compiled_loop(options: dict[str, Any]) -> tuple[float, list[float], int]:
    return loop(autopar.compile(Writer(), **options))


@pytest.mark.multiprocess
def test_the_loop_and_the_generate_of_a_script_do_what_they_do_plainly(two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    loss, drawn, seen = loop(Writer())
    found = equal_on_all(two_ranks.run(compiled_loop, {"recipe": "zero3"}))
    assert found[0] == pytest.approx(loss) and found[1] == pytest.approx(drawn) and found[2] == seen == 2


@pytest.mark.parametrize(("fits", "asked"), [(True, [(1,)]), (False, [(1,), None])])
def test_a_loop_of_its_own_gets_stages_only_where_nothing_fits_without(
    monkeypatch: pytest.MonkeyPatch, fits: bool, asked: list[Any]
) -> None:
    found = []
    make_plan = planner.make_plan

    def noted(prepared: Any, request: Any, **options: Any) -> Plan:
        found.append(request.stages)
        if request.stages and not fits:
            raise SearchError("does not fit")
        return make_plan(prepared, request.but(stages=None), **options)

    monkeypatch.setattr(planner, "make_plan", noted)
    autopar.compile(nn.Linear(4, 4))(torch.ones(2, 4))
    assert found == asked


def test_a_step_and_a_loss_function_leave_stages_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found, make_plan = [], planner.make_plan
    monkeypatch.setattr(
        planner,
        "make_plan",
        lambda p, request, **options: found.append(request.stages) or make_plan(p, request, **options),
    )
    loss_fn = nn.functional.mse_loss
    # Of a small model on a machine that nobody names, stages are searched only where nothing else fits.
    autopar.compile(nn.Linear(4, 4), loss_fn=loss_fn, hardware="cpu-gloo")(torch.ones(2, 4))
    assert found == [None]


def test_a_compiled_container_is_one() -> None:
    model: Any = autopar.compile(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert len(model) == 2 and list(model)[1] is model[-1] and isinstance(model, autopar.CompiledModule)
    model[1] = nn.ReLU()
    assert type(model.original[1]) is nn.ReLU and len(copy.deepcopy(model)) == 2
    assert autopar.compile(nn.Linear(2, 2)), "a module without length is true"
