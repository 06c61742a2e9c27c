"""The search of one setting: which error tells why no number of micro-batches has a plan."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.errors import MemoryBoundError, SearchError
from autopar.ir import Mesh
from autopar.search.candidates.one_setting import SettingSearch, UnsearchedError
from autopar.search.candidates.trials import Trial
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from tests.search.graphs import mlp
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

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

    def cannot_fit(memory_bytes: int) -> bool:
        asked = Request(TOY, ranks=4, memory_bytes=memory_bytes, cuts_batch=True)
        return SettingSearch(Case(graph, asked)).cannot_fit

    assert not cannot_fit(enough)
    assert cannot_fit(enough // 10)
