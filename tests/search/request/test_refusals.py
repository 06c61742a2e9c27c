"""The errors of searches without a plan: one for all meshes, with remedies that can help."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.cost_model import find_hardware
from autopar.errors import MemoryBoundError, RecipeError, SearchError, StateError
from autopar.ir import Mesh
from autopar.search.candidates.outer import search_plan
from autopar.search.request.refusals import refusal_of_all
from autopar.search.request.request import Request
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

GRAPH = residual(2, Sizes(batch=4, width=64, hidden=128, vocab=64))


def refusal(**options: Any) -> MemoryBoundError:
    request = Request(TOY, **{"ranks": 4, "memory_bytes": 10**5, **options})
    with pytest.raises(MemoryBoundError) as caught:
        search_plan(GRAPH, request)
    return caught.value


def test_what_does_not_fit_is_one_error_of_the_mesh_that_needs_least() -> None:
    error = refusal()
    text = str(error)
    first, on, *_, last = text.splitlines()
    assert first.startswith("No plan on 4 ranks fits into 100 kB: a rank needs ")
    sizes = [each.split(" on ")[0] for each in first.split("needs ")[1].split(" kB")]
    assert first.split(" on ")[2].split(",")[0] in on and len(sizes) <= 6
    assert text.count("What would help") == 1 and f"memory_bytes={error.needed_bytes} (--max" in last
    assert len(text.splitlines()) <= 4
    assert search_plan(GRAPH, Request(TOY, ranks=4, memory_bytes=error.needed_bytes)).best


def test_a_recipe_is_left_open_only_where_one_was_named() -> None:
    assert "recipe=" not in str(refusal())
    for options in ({"recipe": "ddp"}, {"recipe": "ddp", "mesh": {"dp": 4}}):
        assert "What would help: recipe=\"auto\" instead of 'ddp', " in str(refusal(**options))


def test_memory_that_is_all_reserved_is_refused_at_once() -> None:
    h100 = find_hardware("h100")
    for options in ({"ranks": 4}, {"mesh": {"dp": 2}}):
        with pytest.raises(StateError, match=r"h100 every rank has 1\.00 GB reserved") as caught:
            search_plan(GRAPH, Request(h100, memory_bytes=10**5, **options))
        (needed,) = re.findall(r"--max-memory\) above (\d+)\.$", str(caught.value))
        assert int(needed) > 10**9, "the least that is known of a plan, not the reserve alone"
        with pytest.raises(MemoryBoundError, match=r"fits into 1\.00 GB"):
            search_plan(GRAPH, Request(h100, memory_bytes=int(needed) - 1, **options))


def test_every_other_reason_is_a_line_once() -> None:
    request = Request(TOY, ranks=4)
    meshes = [Mesh.of({"dp": 4}), Mesh.of({"tp": 4}), Mesh.of({"dp": 2, "tp": 2})]
    found = refusal_of_all(request, [(mesh, RecipeError("It is ruled out.")) for mesh in meshes])
    assert str(found) == "No plan on 4 ranks.\nIt is ruled out."
    many = [(meshes[0], SearchError(f"Reason {i}.")) for i in range(7)]
    assert str(refusal_of_all(request, many)).endswith("Reason 4.\nAnd 2 other reasons on other meshes.")
