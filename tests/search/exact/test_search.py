"""What the search finds: the experts' plans from the rules alone, the same ones every time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cost_model import H100
from autopar.errors import MeshError, SearchError, StateError
from autopar.ir import Graph, Op, P, ParameterPlan, Plan, R, S, V, operand_layouts, result_layouts
from autopar.pipeline.composed import cost_of
from autopar.planning.planning import make_plan, prepare_step
from autopar.program.program import build_program
from autopar.search import search, search_with_cost
from autopar.search.exact.search import MeshSearch
from autopar.search.request.request import Request
from tests.search.graphs import Builder, LlamaSizes, llama, mlp
from tests.search.toy import TOY

SMALL = LlamaSizes(batch=8, seq=16, layers=2, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)

ONE_LAYER = dataclasses.replace(SMALL, layers=1)


def split_by(graph: Graph, plan: Plan, op: Op, axis: int = 0) -> str:
    return op.choice(plan.ops[op.name][axis]).factor


def block_linears(graph: Graph) -> list[Op]:
    """q, k, v, o, gate, up, down of the only layer; the head comes last and is left out."""
    return [op for op in graph.ops if op.kind == "linear"][:7]


def stages(plan: Plan, axis: int = 0) -> set[int]:
    return {how.zero_stage(axis) for how in plan.parameters.values()}


# What experts found (issue 2, "What must be shown", 3)


def test_batch_one_is_split_as_megatron_with_sequence_parallelism_does() -> None:
    """Columns then rows, all-gather before and reduce-scatter after, residual stream along seq."""
    graph = llama(LlamaSizes(batch=1, layers=1))
    plan = search(graph, {"tp": 8}, hardware=H100)
    q, k, v, o, gate, up, down = block_linears(graph)
    assert {split_by(graph, plan, op) for op in (q, k, v, o)} == {"h"}
    assert {split_by(graph, plan, op) for op in (gate, up, down)} == {"f"}
    assert result_layouts(o, plan.ops[o.name]) == ((P,),)
    assert result_layouts(down, plan.ops[down.name]) == ((P,),)
    for op in graph.ops:
        if op.kind == "add":  # the residual stream: split along seq, and what is added to it too
            assert operand_layouts(op, plan.ops[op.name]) == ((S(1),), (S(1),))
    for op in (q, gate):  # the normalized stream is gathered once for all its consumers
        assert operand_layouts(op, plan.ops[op.name])[0] == (V,)
    stored = plan.parameters
    assert stored["layers.0.attention.q.weight"] == ParameterPlan((S(0),), (S(0),))
    assert stored["layers.0.attention.o.weight"] == ParameterPlan((S(1),), (S(1),))
    assert stored["layers.0.mlp.down.weight"] == ParameterPlan((S(1),), (S(1),))


def test_large_batch_and_tight_memory_split_the_batch_and_shard_parameters() -> None:
    """Activations of 64 sequences take 24.5 GB and 1 is reserved. Copies of all parameters (2.5) with a
    shard of their gradients and AdamW states (0.95) are the smallest plan of nothing but the batch:
    gathered for one use after the other, they would be there at once, as the graph is one block.
    """
    graph = llama(LlamaSizes(batch=64, layers=1))
    plan = search(graph, {"dp": 8}, hardware=H100, memory_bytes=28_960_000_000)
    layer = [op for op in graph.ops if op.kind not in ("cos", "embedding")]
    assert {split_by(graph, plan, op) for op in layer} == {"b"}
    weights = {n: p for n, p in plan.parameters.items() if n.startswith("layers")}
    large = [p for n, p in weights.items() if "norm" not in n]
    assert all(p.storage[0].kind == "S" for p in large)
    assert cost_of(graph, plan, H100).memory_bytes <= 28_960_000_000


def test_loose_memory_gives_data_parallelism_whose_optimizer_is_split() -> None:
    """No parameter is gathered for its use; an optimizer of an eighth of the states is the faster one."""
    graph = llama(LlamaSizes(batch=64, layers=1))
    plan = search(graph, {"dp": 8}, hardware=dataclasses.replace(H100, memory_bytes=10**12))
    body = [op for op in block_linears(graph)]
    assert {split_by(graph, plan, op) for op in body} == {"b"}
    layers = {n: p for n, p in plan.parameters.items() if n.startswith("layers")}
    assert stages(dataclasses.replace(plan, parameters=layers)) <= {1, 2}
    ddp = search(graph, {"dp": 8}, hardware=H100, recipe="ddp")
    assert cost_of(graph, plan, H100).seconds < cost_of(graph, ddp, H100).seconds


# Laws


def test_the_same_input_gives_the_same_bytes() -> None:
    first, second = (str(search(llama(SMALL), {"x": 2, "y": 2}, hardware=TOY)) for _ in range(2))
    assert first == second


def test_the_seed_of_hashes_changes_nothing() -> None:
    """A process that hashes otherwise than this one makes the same plans and programs."""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    elsewhere = subprocess.run(
        [sys.executable, "-c", "from tests.search.exact.test_search import made; print(made(), end='')"],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": other},
    ).stdout
    assert elsewhere == made()
    assert "note" in elsewhere and "reduce_scatter" in elsewhere


def made() -> str:
    """A plan that memory binds, and what is made of a captured model."""
    plan = search(llama(ONE_LAYER), {"x": 2, "y": 2}, hardware=TOY, memory_bytes=200_000)
    return f"{plan}\n{captured_program()}"


def captured_program() -> str:
    """The plan of a captured model and one rank's program: ranks, each of which makes them, must agree."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    prepared = prepare_step(model, (torch.ones(4, 8),), loss_fn=torch.mean)
    plan = make_plan(prepared, Request(TOY, mesh={"dp": 2, "tp": 2}, recipe="dp:zero3,tp:tp+sp"))
    return f"{plan}\n{build_program(prepared.captured, prepared.analysis, plan).module.code}"


def test_meshes_in_either_order_give_the_same_plans() -> None:
    meshes = [{"x": 4}, {"x": 2, "y": 2}]
    forward = [str(search(llama(SMALL), mesh, hardware=TOY)) for mesh in meshes]
    backward = [str(search(llama(SMALL), mesh, hardware=TOY)) for mesh in meshes[::-1]]
    assert forward == backward[::-1]


@pytest.mark.parametrize(
    ("graph", "mesh"),
    [
        pytest.param(llama(ONE_LAYER), {"x": 4}, id="llama x"),
        pytest.param(mlp(layers=2, batch=64), {"x": 2, "y": 2}, id="mlp x y"),
        pytest.param(llama(ONE_LAYER), {"x": 2, "y": 2}, id="llama x y", marks=pytest.mark.slow),
    ],
)
def test_more_memory_never_gives_a_slower_plan(graph: Graph, mesh: dict[str, int]) -> None:
    loose = search_with_cost(graph, mesh, hardware=TOY).cost
    bounds = [int(loose.memory_bytes * part) for part in (0.8, 0.9, 0.95, 2.0)]
    seconds = []
    for bound in bounds:
        try:
            cost = search_with_cost(graph, mesh, hardware=TOY, memory_bytes=bound).cost
        except SearchError:
            assert not seconds
            continue
        assert cost.memory_bytes <= bound
        seconds.append(cost.seconds)
    assert len(seconds) >= 3
    tolerance = 1 + 1e-4  # what the solver may leave open where memory binds
    assert all(more <= less * tolerance for less, more in itertools.pairwise(seconds))
    assert seconds[-1] == pytest.approx(loose.seconds)


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}])
def test_auto_is_never_worse_than_a_recipe(mesh: dict[str, int]) -> None:
    graph = llama(SMALL)
    best = search_with_cost(graph, mesh, hardware=TOY).cost.seconds
    for recipe in ("ddp", "zero1", "zero2", "zero3", "tp", "tp+sp"):
        named = search_with_cost(graph, mesh, hardware=TOY, recipe=recipe).cost.seconds
        assert best <= named * (1 + 1e-9), recipe


def test_the_program_does_not_grow_with_depth() -> None:
    """32 layers are 8 layers said four times: classes and entries, which make rows and columns, are the same."""
    mesh = {"dp": 8, "tp": 8}
    searched = [MeshSearch.of(llama(LlamaSizes(batch=8, layers=n)), mesh, hardware=H100) for n in (8, 32)]
    assert len({(len(each.problem.free), len(each.problem.priced_entries)) for each in searched}) == 1
    found = [each.within(None) for each in searched]
    shared = llama(LlamaSizes(batch=8, layers=7)).ops[:-5]
    assert all(found[0].plan.ops[op.name] == found[1].plan.ops[op.name] for op in shared)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    graph = llama(SMALL)
    plain = search_with_cost(graph, {"x": 4}, hardware=TOY)
    padded = search_with_cost(graph, {"one": 1, "x": 4}, hardware=TOY)
    assert padded.cost.seconds == pytest.approx(plain.cost.seconds)
    assert {labels[0] for labels in padded.plan.ops.values()} == {"-"}


def test_plans_are_text_that_reads_back() -> None:
    plan = search(llama(SMALL), {"x": 2, "y": 2}, hardware=TOY, recipe="x:zero3,y:tp+sp")
    assert Plan.parse(str(plan)) == plan
    assert plan.recipe == "x:zero3,y:tp+sp"


def test_micro_batches_favour_reducing_gradients_once() -> None:
    """ZeRO-1 and ZeRO-2 cost the same time, but ZeRO-2 reduces for every micro-batch."""
    graph = llama(SMALL)

    def seconds(recipe: str, micro_batches: int) -> float:
        found = search_with_cost(graph, {"x": 4}, hardware=TOY, recipe=recipe, micro_batches=micro_batches)
        return found.cost.parameter_seconds

    assert seconds("zero1", 1) == pytest.approx(seconds("zero2", 1))
    assert seconds("zero1", 4) == pytest.approx(seconds("zero1", 1))
    assert seconds("zero2", 4) > 2 * seconds("zero1", 4)


def test_fixed_storage_is_kept() -> None:
    graph = llama(SMALL)
    trained = search(graph, {"x": 2, "y": 2}, hardware=TOY, recipe="x:zero3,y:tp")
    again = search(graph, {"x": 2, "y": 2}, hardware=TOY, fixed_storage=trained.parameters)
    assert again.parameters == trained.parameters


def test_frozen_parameters_cost_no_gradient() -> None:
    b = Builder({"b": 8, "k": 16, "j": 32}, {"b": "batch"}, itemsize_bytes=4)
    x, w = b.input("x", "b k"), b.parameter("w", "j k", needs_grad=False)
    b.output(b.op("linear", "b k, j k -> b j", [x, w], linear=[[0]]))
    cost = search_with_cost(b.graph(), {"x": 2}, hardware=TOY, recipe="ddp").cost
    assert (cost.parameter_seconds, cost.gradient_bytes, cost.optimizer_bytes) == (0.0, 0, 0)


def test_outputs_are_delivered_without_partial_sums() -> None:
    """The loss of a split batch is summed over the ranks: one all-reduce more than without."""
    graph = mlp()
    plan = search(graph, {"x": 2}, hardware=TOY, recipe="ddp")
    undelivered = dataclasses.replace(graph, outputs=())
    delivered, dropped = (cost_of(g, plan, TOY).conversion_seconds for g in (graph, undelivered))
    assert plan.ops[graph.ops[-1].name] == ("b",)
    assert delivered > dropped == 0.0


# Errors


def test_an_axis_that_divides_nothing_says_which_sizes_are_close() -> None:
    with pytest.raises(MeshError) as error:
        search(mlp(batch=1, width=16, hidden=32), {"x": 29}, hardware=TOY)
    assert "Axis x has size 29, but no dim of this model can be split into 29 parts." in str(error.value)
    assert "32 (f), 16 (d)" in str(error.value)
    with pytest.raises(MeshError, match=r"be split into 2 parts\. None of its sizes is above 1\.$"):
        search(mlp(batch=1, width=1, hidden=1), {"x": 2}, hardware=TOY)


def test_a_recipe_that_splits_nothing_says_what_it_would_split() -> None:
    with pytest.raises(SearchError) as error:
        search(mlp(batch=1), {"x": 2}, hardware=TOY, recipe="ddp")
    assert "Put the samples into dim 0 (batch_first=True in torch.nn), at least two of them" in str(error.value)


def test_a_batch_is_split_by_any_number_of_ranks() -> None:
    plan = search(mlp(batch=3), {"x": 2}, hardware=TOY, recipe="ddp")
    assert {label for labels in plan.ops.values() for label in labels} == {"b"}


def test_too_little_memory_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(SearchError) as error:
        search(llama(SMALL), {"x": 2, "y": 2}, hardware=TOY, recipe="ddp", memory_bytes=300_000)
    message = str(error.value)
    assert "fits into 300 kB: the smallest found takes 318 kB" in message
    assert "17.7 kB too much" in message and 'recipe="auto" instead of' in message
    assert "more micro-batches" in message


def test_a_state_that_does_not_fit_needs_no_smaller_batch() -> None:
    with pytest.raises(StateError) as error:
        search(llama(SMALL), {"x": 2, "y": 2}, hardware=TOY, recipe="ddp", memory_bytes=100_000)
    message = str(error.value)
    assert "gradients, optimizer states and buffers alone take 214 kB" in message
    assert "micro-batches" not in message


def test_the_axis_name_pp_is_reserved() -> None:
    with pytest.raises(MeshError, match="reserved for pipeline stages"):
        search(mlp(), {"pp": 2}, hardware=TOY)


def test_resident_is_r_only_where_every_use_is() -> None:
    graph = llama(SMALL)
    for recipe in ("auto", "tp", "tp+sp", "ddp", "zero1"):
        plan = search(graph, {"x": 2, "y": 2}, hardware=TOY, recipe=recipe)
        for name, how in plan.parameters.items():
            uses = [
                layout
                for op in graph.ops
                for operand, layout in zip(op.operands, operand_layouts(op, plan.ops[op.name]), strict=True)
                if operand == graph.parameters[name]
            ]
            for axis, state in enumerate(how.resident):
                if state.kind in "RV":
                    assert (state == R) == all(use[axis] == R for use in uses), (recipe, name)
