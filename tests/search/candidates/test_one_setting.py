"""The search of one setting: which error tells why no number of micro-batches has a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost_model.machines.hardware import Host
from autopar.errors import MemoryBoundError, SearchError
from autopar.ir import Mesh
from autopar.search.candidates.one_setting import SettingSearch, UnsearchedError
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.trials import Trial
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from autopar.units import format_bytes
from tests.search.graphs import mlp
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

HOST = replace(TOY, host=Host(10**12, 1e9, 1e-6, 1e9))
MESH = Mesh.of({"dp": 2})
FULL = "It takes 5 bytes, 4 too much."


def of(**options: Any) -> SettingSearch:
    request = Request(TOY, mesh=MESH, cuts_batch=True, **options)
    return SettingSearch(Case(mlp(batch=8), request))


def lacks_memory(search: SettingSearch, trial: Trial, _: float = 0, *, gives_up: bool = False) -> None:
    """Stands for `SettingSearch.plan`, where parts of one row have another error than larger ones."""
    if trial.micro_batches == search.case.rows:
        raise SearchError("It splits nothing of a batch of 1.")
    if gives_up:
        raise UnsearchedError("No plan fits.")
    raise MemoryBoundError.of(FULL, [], 5)


def test_memory_that_is_missing_is_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number fails for a reason of its own; the others were given up without a search."""
    monkeypatch.setattr(SettingSearch, "plan", lacks_memory)
    with pytest.raises(MemoryBoundError, match=FULL):
        of().search(Trial(MESH, None, "auto"))
    with pytest.raises(UnsearchedError):
        of().search(Trial(MESH, None, "auto"), gives_up=True)


def test_a_plan_that_cannot_fit_is_a_lack_of_memory() -> None:
    with pytest.raises(UnsearchedError, match="No plan with 2 micro-batches fits"):
        of(memory_bytes=1).plan(Trial(MESH, 2, "auto"), gives_up=True)
    with pytest.raises(MemoryBoundError, match="fits into 1 bytes: the smallest found takes"):
        of(memory_bytes=1).search(Trial(MESH, None, "auto"))


@pytest.mark.parametrize("mesh", ["dp=4", "tp=4", "dp=2,tp=2", "pp=2,dp=2", "pp=4"])
def test_memory_that_some_plan_fits_into_is_not_ruled_out(mesh: str) -> None:
    """The plan that recomputes all blocks shows that its own memory suffices; a tenth of it is less than its state."""
    graph = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
    request = Request(TOY, mesh=Mesh.parse(mesh), recompute="full", must_fit=False, cuts_batch=True)
    enough = math.ceil(GivenMesh(Case(graph, request)).search().price.peak_bytes)

    def cannot_fit(memory_bytes: int, offload: bool = False) -> bool:
        asked = Request(HOST, ranks=4, memory_bytes=memory_bytes, cuts_batch=True, offload=offload or None)
        return SettingSearch(Case(graph, asked)).cannot_fit

    assert not cannot_fit(enough) and not cannot_fit(enough, offload=True)
    assert cannot_fit(enough // 10)


def test_what_cannot_fit_says_what_a_rank_needs_at_least_before_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
    asked = Request(replace(HOST, reserved_bytes=500), ranks=4, memory_bytes=1000, cuts_batch=True)
    least = SettingSearch(Case(graph, asked)).least_rank_bytes
    at_least = asked.but(memory_bytes=math.ceil(least))
    assert not SettingSearch(Case(graph, at_least)).cannot_fit
    monkeypatch.setattr(SettingSearch, "plan", lacks_memory)
    said: list[str] = []
    words = f"a rank needs more than {format_bytes(least)}, 500 bytes of it reserved"
    with pytest.raises(MemoryBoundError, match=words) as raised:
        search_plan(graph, asked, progress=said.append)
    assert raised.value.needed_bytes == 5, "what a search has found"
    assert said[0].startswith("on the devices alone: No plan on 4 ranks fits into 1.00 kB") and words in said[0]


def test_memory_that_a_plan_with_parameters_on_the_host_fits_into_is_not_ruled_out() -> None:
    graph = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
    alone = SettingSearch(Case(graph, Request(HOST, ranks=2, cuts_batch=True))).least_rank_bytes
    asked = Request(HOST, ranks=2, memory_bytes=int(0.9 * alone), cuts_batch=True)
    assert SettingSearch(Case(graph, asked)).cannot_fit
    found = search_plan(graph, asked).best
    assert "host" in {how.tier for how in found.plan.parameters.values()}
    for further in ({"offload": True}, {"offload": True, "streams": True}):
        least = SettingSearch(Case(graph, asked.but(**further))).least_rank_bytes
        assert 0 < least <= found.price.peak_bytes, further
