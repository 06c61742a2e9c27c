"""Folding: repetition is found from structure alone, and the price stays exact."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any

import pytest

from autopar.ir import UNSPLIT, Graph, Mesh
from autopar.pipeline import composed
from autopar.search import fold, search_with_cost
from autopar.search.exact.milp import Assignment, AxisProgram
from autopar.search.exact.problem import Problem
from autopar.search.exact.question import LayoutQuestion
from tests.search.graphs import Builder, LlamaSizes, llama, mlp
from tests.search.toy import TOY

SMALL = LlamaSizes(batch=4, seq=8, layers=3, dim=16, kv_heads=2, group=2, head_dim=4, ffn=32, vocab=64)


def members(graph: Graph) -> list[int]:
    return [len(each.members) for each in fold(graph).classes]


def problem(graph: Graph, *, repeats: bool) -> Problem:
    return Problem(LayoutQuestion(graph, Mesh.of({"x": 2}), TOY, repeats=repeats))


def axis_program(found: Problem) -> AxisProgram:
    labels = tuple((UNSPLIT,) for _ in found.ops)
    return AxisProgram(found, 0, Assignment(labels, {}, {}), saves_memory=False)


def test_depth_leaves_classes_and_entries_as_they_are() -> None:
    shallow, deep = (fold(llama(dataclasses.replace(SMALL, layers=n))) for n in (4, 16))
    assert len(shallow.classes) == len(deep.classes)
    assert len(shallow.entries) == len(deep.entries)
    assert len(shallow.saved) == len(deep.saved)


def test_every_layer_is_folded() -> None:
    per_layer = len(llama(dataclasses.replace(SMALL, layers=2)).ops) - len(
        llama(dataclasses.replace(SMALL, layers=1)).ops
    )
    graph = llama(dataclasses.replace(SMALL, layers=8))
    assert len(members(graph)) <= len(graph.ops) - 7 * per_layer
    assert max(members(graph)) == 8


def test_nothing_repeats_in_one_layer() -> None:
    assert set(members(mlp(layers=1))) == {1}


def test_two_runs_are_both_folded() -> None:
    """An encoder of width 16 feeds a decoder of width 32."""
    b = Builder({"b": 4, "d": 16, "w": 32})
    x = b.op("scale", "b d, d -> b d", [b.input("x", "b d"), b.parameter("scale", "d")])
    for i in range(6):
        for j in range(10):
            x = b.op(f"enc{j}", "b d -> b d", [x])
        x = b.op("linear", "b d, d' d -> b d'", [x, b.parameter(f"enc.{i}", "d' d")])
    y = b.op("widen", "b d -> b w", [x])
    for i in range(5):
        for j in range(9):
            y = b.op(f"dec{j}", "b w -> b w", [y])
        y = b.op("linear", "b w, w' w -> b w'", [y, b.parameter(f"dec.{i}", "w' w")])
    b.output(y)
    assert members(b.graph()) == [1] + [6] * 11 + [1] + [5] * 10


def test_short_repeats_become_blocks_that_leave_neighbours_free() -> None:
    """32 times linear, relu become 8 times 4 of them, so that columns and rows can alternate."""
    b = Builder({"b": 4, "d": 16})
    x = b.op("scale", "b d, d -> b d", [b.input("x", "b d"), b.parameter("scale", "d")])
    for i in range(32):
        x = b.op("linear", "b d, d' d -> b d'", [x, b.parameter(f"{i}", "d' d")])
        x = b.op("relu", "b d -> b d", [x])
    b.output(x)
    assert members(b.graph()) == [1] + [8] * 8


def test_a_mark_keeps_a_layer_apart() -> None:
    graph = llama(dataclasses.replace(SMALL, layers=6))
    special = "layers.3.mlp.up.weight"
    found = fold(graph, mark=lambda name: name == special)
    entry = next(e for e in found.entries if graph.parameters[special] in e.names)
    assert entry.names == (graph.parameters[special],)


def test_the_last_block_has_its_own_entry() -> None:
    """What the last layer returns is normalized by the final norm, which is a class of its own."""
    graph = llama(dataclasses.replace(SMALL, layers=8))
    found = fold(graph)
    last = [op for op in graph.ops if op.kind == "add"][-1].results[0]
    entry = next(e for e in found.entries if last in e.names)
    assert entry.names == (last,)


def test_unfolded_with_ties_costs_what_folded_costs() -> None:
    """The oracle: every op of three layers has columns, and rows make the layers equal."""
    graph = llama(SMALL)
    folded = axis_program(problem(graph, repeats=True)).solve()
    whole = problem(graph, repeats=False)
    program = axis_program(whole)
    by_name = {each.op.name: index for index, each in enumerate(whole.fold.classes)}
    for each in fold(graph).classes:
        for first, second in itertools.pairwise(each.members):
            tie(program, by_name[first], by_name[second])
    tied = program.solve()
    free = axis_program(whole).solve()
    assert folded is not None and tied is not None and free is not None
    assert tied.seconds == pytest.approx(folded.seconds, rel=1e-9)
    assert free.seconds <= folded.seconds * (1 + 1e-9)


def tie(program: AxisProgram, first: int, second: int) -> None:
    columns = [{labels: column for column, labels in program._labels(index)} for index in (first, second)]
    for labels in columns[0].keys() & columns[1].keys():
        program.program.row([columns[0][labels]], [columns[1][labels]], lower=0.0, upper=0.0)


@pytest.mark.parametrize("recipe", ["auto", "zero3", "tp+sp"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_expanded_plan_costs_what_the_solver_said(recipe: str, micro_batches: int) -> None:
    """`search_with_cost` asserts it; two axes and several micro-batches make it hard."""
    mesh = {"x": 2, "y": 2}
    found = search_with_cost(llama(SMALL), mesh, hardware=TOY, recipe=recipe, micro_batches=micro_batches)
    assert found.cost.seconds == pytest.approx(min(found.descents), rel=1e-6)


def test_a_wrong_solver_price_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = composed.cost_of

    def slower(*args: Any, **named: Any) -> composed.StepCost:
        cost = exact(*args, **named)
        return dataclasses.replace(cost, compute_seconds=1.017 * cost.compute_seconds)

    monkeypatch.setattr(importlib.import_module("autopar.search.exact.search"), "cost_of", slower)
    with pytest.raises(AssertionError, match=r"the search said .* s, but the expanded plan costs"):
        search_with_cost(llama(SMALL), {"x": 2}, hardware=TOY)
