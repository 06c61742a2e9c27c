"""A search that takes more than a minute says so before it begins."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from autopar.cost_model import find_cluster
from autopar.ir import Mesh
from autopar.planning import duration, planning
from autopar.planning.duration import search_seconds, words_if_long
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.search.request.request import Request


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    x = torch.ones(64, 16)
    layers = (nn.Linear(16 + 16 * i, 32 + 16 * i) for i in range(3))
    return prepare_step(nn.Sequential(*layers, nn.Linear(64, 16)), (x, x), loss_fn=nn.functional.mse_loss)


def test_the_time_grows_with_the_ops_and_the_axes_and_not_with_many_ranks() -> None:
    dp, both = Mesh.parse("dp=8"), Mesh.parse("dp=2,tp=4")
    assert search_seconds(100, 8, dp) == 1 and search_seconds(200, 8, dp) == 2 and search_seconds(100, 8, both) == 4
    assert [search_seconds(100, ranks, None) for ranks in (1, 2, 7, 8, 64, 1024)] == [0, 2, 2, 18, 72, 72]


def test_the_ways_to_store_a_parameter_grow_with_every_axis(prepared: Prepared) -> None:
    """Eight for each axis: 8^5 = 32,768 ways of a kind take 4.1 s, and those of 8 kinds 33 s."""
    five = Mesh.of(dict.fromkeys("abcde", 2))
    assert search_seconds(0, 32, five, 8) == pytest.approx(32.8, abs=0.1)
    six = Request.on(find_cluster("h100x8x8"), batch=64, mesh=Mesh.of(dict.fromkeys("abcdef", 2)))
    assert "On the mesh dp=64 it takes about" in words_if_long(prepared.analysis.graph, six)
    assert not words_if_long(prepared.analysis.graph, six.but(recipe="ddp"))


def test_a_long_search_says_so_before_it_begins(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request.on(find_cluster("h100x8"), batch=64)
    assert not words_if_long(prepared.analysis.graph, request)
    monkeypatch.setattr(duration, "LONG_SECONDS", 1.0)
    monkeypatch.setattr(planning, "search_plan", lambda *_, **__: pytest.fail(caplog.text))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(pytest.fail.Exception, match=r"The search may take about 1\.08 s"),
    ):
        make_plan(prepared, request)
    assert "since the model has 6 different ops and the mesh is searched for 8 ranks. On the mesh dp=8" in caplog.text
