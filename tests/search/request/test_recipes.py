"""Recipes and pins: what they mean, and what they say when they cannot hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_model import Sizes, find_hardware
from autopar.cost_model.items import COMPUTE
from autopar.cost_model.pricer import Pricer
from autopar.errors import RecipeError, SearchError
from autopar.ir import Graph, Mesh, Plan, R, S, V, operand_layouts
from autopar.ir.note import kind_of
from autopar.models import Transformer, build, example_inputs
from autopar.models.description import LLAMA
from autopar.planning.planning import make_plan, prepare_step
from autopar.search import RECIPES, format_recipe, resolve, search
from autopar.search.request.request import Request
from tests.search.graphs import LlamaSizes, llama
from tests.search.toy import TOY

SIZES = LlamaSizes(batch=8, seq=16, layers=2, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)


def factors(graph: Graph, plan: Plan, axis: int = 0) -> dict[str, str]:
    return {op.name: op.choice(plan.ops[op.name][axis]).factor for op in graph.ops}


def stages(plan: Plan, axis: int = 0) -> set[int]:
    return {how.zero_stage(axis) for how in plan.parameters.values()}


@pytest.mark.parametrize(("recipe", "stage"), [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_data_parallel_recipes_split_the_batch_and_name_the_stage(recipe: str, stage: int) -> None:
    graph = llama(SIZES)
    plan = search(graph, {"x": 4}, hardware=TOY, recipe=recipe)
    split = factors(graph, plan)
    assert {split[op.name] for op in graph.ops if op.kind != "cos"} == {"b"}
    assert split["cos_0"] == ""  # it has no batch, and runs whole on every rank
    assert stages(plan) == {stage}


def test_tp_is_megatron() -> None:
    """Columns and rows of every matrix; everything around them whole on every rank."""
    graph = llama(SIZES)
    plan = search(graph, {"x": 4}, hardware=TOY, recipe="tp")
    split = factors(graph, plan)
    for op in graph.ops:
        if op.kind in ("linear", "embedding", "attention"):
            assert split[op.name] in ("h", "f", "v"), op.name
        if op.kind in ("add", "pow", "mean", "rsqrt"):
            assert split[op.name] == "" and plan.ops[op.name] == ("-",), op.name
    stored = plan.parameters
    assert stored["layers.1.mlp.up.weight"].storage == (S(0),)
    assert stored["layers.1.mlp.down.weight"].storage == (S(1),)
    assert stored["layers.1.mlp.norm.weight"].storage == (R,)


def test_tp_sp_splits_the_rest_along_the_sequence() -> None:
    graph = llama(SIZES)
    plan = search(graph, {"x": 4}, hardware=TOY, recipe="tp+sp")
    split = factors(graph, plan)
    around = ("add", "pow", "mean", "rsqrt", "cast")
    assert {split[op.name] for op in graph.ops if op.kind in around[:4]} == {"s"}
    norm = plan.parameters["layers.0.mlp.norm.weight"]
    assert (norm.storage, norm.resident) == ((R,), (V,))


def test_parameters_are_used_as_stored_under_tp() -> None:
    graph = llama(SIZES)
    for recipe in ("tp", "tp+sp"):
        plan = search(graph, {"x": 4}, hardware=TOY, recipe=recipe)
        by_tensor = {tensor: plan.parameters[name] for name, tensor in graph.parameters.items()}
        for op in graph.ops:
            layouts = operand_layouts(op, plan.ops[op.name])
            for name, layout in zip(op.operands, layouts, strict=True):
                if name in by_tensor and by_tensor[name].storage[0].kind == "S":
                    assert layout == by_tensor[name].storage


def test_recipes_combine_over_axes() -> None:
    graph = llama(SIZES)
    plan = search(graph, {"dp": 2, "tp": 2}, hardware=TOY, recipe={"dp": "zero3", "tp": "tp+sp"})
    assert set(factors(graph, plan, 0).values()) == {"b", ""}
    assert set(factors(graph, plan, 1).values()) <= {"s", "h", "f", "v", "t", ""}
    assert stages(plan, 0) == {3}
    weight = plan.parameters["layers.0.mlp.up.weight"]
    assert weight.storage[1] == S(0) and weight.storage[0].kind == "S"


def test_ddp_over_two_axes_splits_the_batch_over_both() -> None:
    graph = llama(SIZES)
    plan = search(graph, {"x": 2, "y": 4}, hardware=TOY, recipe="ddp")
    assert plan.inputs["tokens"] == (S(0), S(0))


def test_the_text_of_a_recipe_reads_back() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2})
    for text in ("auto", "zero3", "dp:zero3,tp:tp+sp", "tp:tp"):
        assert format_recipe(text) == text
        assert resolve(format_recipe(text), mesh) == resolve(text, mesh)
    assert format_recipe("dp:ddp,x,y:2d") == "dp:ddp,x:columns,y:zero3"
    assert resolve("2d", mesh) == resolve({"dp,tp": "2d"}, mesh) == resolve("dp:columns,tp:zero3", mesh)
    assert format_recipe({"dp": "fsdp"}) == "dp:zero3"
    assert [row.name for row in resolve("tp:tp", mesh)] == ["auto", "tp"]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("zero4", "There is no recipe 'zero4' (did you mean zero3 or zero2 or zero1?); choose among "),
        ("nothing", "There is no recipe 'nothing'; choose among " + ", ".join(RECIPES)),
        ("pp:1f1", "There is no recipe '1f1' for the axis pp (did you mean 1f1b?); choose among auto, "),
        ("dp:ddp,ep:tp", "names the axis 'ep', but the mesh dp=2,tp=2 has dp, tp"),
        ("dp:ddp,tp", "Cannot read 'tp' in the recipe"),
        ("dp,tp:zero3", "'zero3' is for a single axis, but 'dp,tp' names 2. Write {'dp': 'zero3', 'tp': 'zero3'}"),
        ("dp:2d", "The recipe '2d' is for 2 axes, but 'dp' names 1. Write recipe={'x,y': '2d'}"),
        ("3d", "The recipe '3d' is for 3 axes, but 'dp,tp' names 2"),
        ({"dp,tp": "2d", "tp": "ddp"}, "The axis 'tp' is given two recipes, by 'dp,tp': '2d' and by 'tp': 'ddp'"),
        ("dp:zero1,tp:zero2", "reduces gradients once per step and zero2 on tp per micro-batch"),
    ],
)
def test_recipes_that_cannot_hold(recipe: Any, says: str) -> None:
    with pytest.raises(RecipeError) as error:
        resolve(recipe, Mesh.of({"dp": 2, "tp": 2}))
    assert says in str(error.value)


@pytest.mark.parametrize("recipe", [None, 3, ("zero3",), {"dp": None}, {"dp": ["ddp"]}])
def test_what_is_no_recipe_says_so(recipe: Any) -> None:
    for read in (lambda: resolve(recipe, Mesh.of({"dp": 2})), lambda: format_recipe(recipe)):
        with pytest.raises(RecipeError, match=r"is not a recipe; write|There is no recipe"):
            read()


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1])
def test_memory_for_nothing_does_not_fit(memory_bytes: int) -> None:
    with pytest.raises(SearchError) as error:
        search(llama(SIZES), {"dp": 2}, hardware=TOY, memory_bytes=memory_bytes)
    assert "if a rank has that much" in str(error.value)


# Pins


def pinned(pins: dict[str, str], recipe: str = "auto") -> Plan:
    return search(llama(SIZES), {"dp": 2, "tp": 4}, hardware=TOY, pins=pins, recipe=recipe)


def test_a_pin_fixes_the_storage_of_all_it_matches() -> None:
    plan = pinned({"layers.*.mlp.up.weight": "S(1)@tp"})
    for layer in range(2):
        assert plan.parameters[f"layers.{layer}.mlp.up.weight"].storage[1] == S(1)


def test_a_pin_of_one_layer_leaves_the_others_free() -> None:
    plan = pinned({"layers.0.mlp.up.weight": "S(1)@tp R@dp"})
    free = pinned({})
    assert plan.parameters["layers.0.mlp.up.weight"].storage == (R, S(1))
    name = "layers.1.mlp.up.weight"
    assert plan.parameters[name].storage == free.parameters[name].storage


def test_a_pin_fixes_the_choice_of_an_op() -> None:
    plan = pinned({"add_*": "-@tp"})
    assert {labels[1] for name, labels in plan.ops.items() if name.startswith("add_")} == {"-"}


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"layers.*.moe": "S(0)@tp"}, "'layers.*.moe' matches no parameter of the model, whose"),
        ({"conv_*": "j@tp"}, "'conv_*' matches no op of the model"),
        ({"norm.weight": "S(1)@tp"}, "asks for dim 1, but its shape is (32,)"),
        ({"norm.weight": "S(0)@ep"}, "The mesh dp=2,tp=4 has no axis 'ep'"),
        ({"norm.weight": "S(0)"}, "names no axis; write S(0)@dp"),
        ({"norm.weight": "P@tp"}, "asks to store it as P, but a pin stores a parameter as R or S(dim)"),
        ({"norm.weight": "O(0)@tp"}, "Owners O(i) come from the recipes data-parallel, parameter-server and serve"),
        ({"cos_0": "z@tp"}, "asks cos_0 (cos) for the choice 'z', but its choices are -, s, e"),
    ],
)
def test_pins_that_cannot_hold(pins: dict[str, str], says: str) -> None:
    with pytest.raises(RecipeError) as error:
        pinned(pins)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (
            {"norm.*": "S(0)@tp", "norm.weight": "R@tp"},
            "The pins 'norm.*' (S(0)@tp) and 'norm.weight' (R@tp) both match norm.weight",
        ),
        ({"add_*": "-@tp", "ad*": "d@tp"}, "The pins 'add_*' (-@tp) and 'ad*' (d@tp) both match"),
    ],
)
def test_pins_that_differ_name_both(pins: dict[str, str], says: str) -> None:
    with pytest.raises(RecipeError) as error:
        pinned(pins)
    assert says in str(error.value)


def test_pins_that_agree_may_meet() -> None:
    plan = pinned({"norm.*": "R@tp", "norm.weight": "R@tp R@dp"})
    assert plan.parameters["norm.weight"].storage == (R, R)


def test_a_pin_may_store_parts_of_different_sizes() -> None:
    plan = search(llama(SIZES), {"tp": 3}, hardware=TOY, recipe="zero3", pins={"norm.weight": "S(0)@tp"})
    assert plan.parameters["norm.weight"].storage == (S(0),)


def test_a_pin_that_does_not_divide_gives_the_numbers() -> None:
    with pytest.raises(RecipeError) as error:
        search(llama(SIZES), {"tp": 64}, hardware=TOY, pins={"norm.weight": "S(0)@tp"})
    assert "dim 0 has size 32, which tp=64 does not divide" in str(error.value)
    with pytest.raises(RecipeError) as error:
        search(llama(SIZES), {"tp": 64}, hardware=TOY, pins={"add_*": "s@tp"})
    assert "its factor s has size 16, too few for the ranks of tp=64" in str(error.value)


def test_a_pin_against_the_recipe_says_so() -> None:
    with pytest.raises(RecipeError) as error:
        pinned({"norm.weight": "S(0)@dp"}, recipe="ddp")
    assert "norm.weight of shape (32,) is pinned to S(0)@dp, but the recipe dp:ddp" in str(error.value)
    with pytest.raises(RecipeError) as error:
        pinned({"add_*": "d@tp"}, recipe="dp:ddp,tp:tp")
    assert "the recipe tp allows only -, +0+1" in str(error.value)


# --- what depends on no parameter


class Rotated(nn.Module):
    """Attention with a table of positions and a causal mask that it makes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3 * 16, bias=False)
        self.outer = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        positions = torch.arange(x.shape[1])
        table = torch.cos(positions[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125]))
        mask = positions[:, None] >= positions[None, :]
        y = F.scaled_dot_product_attention(q * table, k * table, v, attn_mask=mask)
        return (x + self.outer(y.transpose(1, 2).flatten(2))).pow(2).mean()


def test_tables_and_masks_stay_whole_under_sequence_parallelism() -> None:
    """They depend on no parameter. The stream, an input, is whole for free; its sum over heads is scattered."""
    prepared = prepare_step(Rotated(), (torch.randn(4, 8, 16),))
    graph = prepared.analysis.graph
    plan = make_plan(prepared, Request(TOY, mesh={"tp": 2}, recipe="tp+sp"))
    links = [TOY.link(plan.mesh, 0)]
    pricer = Pricer(graph, plan, sizes=Sizes(plan.mesh), hardware=TOY, links=links)
    sent = Counter(item.kind for item in pricer.items() if item.resource != COMPUTE and item.phase == "forward")
    assert sent == {"reduce_scatter": 1, "all_reduce": 1}  # the second is of the loss


# --- parameters in shards without a batch that divides


@pytest.mark.parametrize(
    ("batch", "mesh"),
    [(1, {"dp": 2}), (2, {"dp": 2, "cp": 2}), (3, {"dp": 2})],
    ids=["one sample", "two samples on four ranks", "an odd number"],
)
def test_zero3_needs_no_batch_that_divides(batch: int, mesh: dict[str, int]) -> None:
    """Where the batch cannot be split every rank runs it, from parameters of which each keeps a part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    inputs = (torch.randn(batch, 8).double(), torch.randn(batch, 8).double())
    prepared = prepare_step(model, inputs, loss_fn=F.mse_loss)
    plan = make_plan(prepared, Request(TOY, mesh=mesh, recipe="zero3"))
    for axis in range(len(mesh)):
        assert stages(plan, axis) == {3}
    report = autopar.verify(model, inputs, mesh=mesh, plan=plan, loss_fn=F.mse_loss)
    assert report.passed, report


@pytest.mark.parametrize("rows", [32, 33])
def test_a_batch_in_parts_of_different_sizes_is_noted_with_what_it_costs(rows: int) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    prepared = prepare_step(model, (torch.randn(rows, 8), torch.randn(rows, 8)), loss_fn=F.mse_loss)
    plan = make_plan(prepared, Request(TOY, mesh={"dp": 3}, recipe="zero3"))
    assert stages(plan, 0) == {3}
    said = [note for note in plan.notes if kind_of(note) == "uneven"]
    noted = "of the 32 rows ranks have 11 or 10, and wait for those with the most in 3.0 % of their time"
    assert said == [noted] * (rows == 32)
    assert all(labels != ("-",) for name, labels in plan.ops.items() if "linear" in name)


class Tied(nn.Module):
    """A matrix that is looked up by columns and multiplied by rows, in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(8, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.up(self.table(tokens)).mean(1) @ self.table.weight.T
        return F.cross_entropy(scores, targets)


def test_a_tied_matrix_is_gathered_in_each_block_that_needs_it_otherwise() -> None:
    """Search and plan agree on memory, or the search says so by an assertion."""
    batch = (torch.randint(8, (4, 8)), torch.randint(8, (4,)))
    graph = prepare_step(Tied().double(), batch, {}, loss_fn=None).analysis.graph
    plan = search(graph, {"x": 2, "y": 2}, hardware=find_hardware("cpu-gloo"), recipe="2d")
    table = graph.parameters["table.weight"]
    used = {
        layout
        for op in graph.ops
        for name, layout in zip(op.operands, operand_layouts(op, plan.ops[op.name]), strict=True)
        if name == table
    }
    assert len(used) == 2


def test_ranks_of_tensor_and_expert_parallelism_share_whole_experts() -> None:
    """Both axes split the experts, and the optimizer states of all else lie in shards along `ep`."""
    sizes = dict(hidden=88, layers=1, heads=4, head_dim=18, ffn=104, vocab=68, max_positions=26)
    described = Transformer(**sizes, experts=44, experts_per_token=5, **LLAMA)
    with torch.device("meta"):
        model = build(described)
    graph = prepare_step(model, example_inputs(described, 4, 8)).analysis.graph
    plan = search(graph, {"ep": 2, "tp": 2}, hardware=find_hardware("h100"), recipe="ep:ep+zero1,tp:tp+ep")
    (mixture,) = (op for op in graph.ops if op.kind.endswith("experts"))
    assert plan.ops[mixture.name] == ("t.0>e", "t.1>e")
    assert plan.parameters["layers.0.mlp.up"].storage == (S(0), S(0))
    query = plan.parameters["layers.0.attention.query.weight"]
    assert (query.zero_stage(0), query.resident[0]) == (1, V)
