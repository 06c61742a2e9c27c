"""What enters blocks, what is kept of it in slices, and what that costs."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from gpt import GPT, GPTConfig, loss_fn
from torch import nn

from autopar.cost_model import find_hardware
from autopar.errors import PlanError
from autopar.ir import Graph, Pipeline, Plan, R, S
from autopar.ir.recompute import Selection
from autopar.ir.saved import SavedLayout
from autopar.pipeline.composed import composed, step_of
from autopar.pipeline.parts import block_starts
from autopar.pipeline.producers import recomputable_names
from autopar.pipeline.saved_values import SavedValues, possible_lines
from autopar.pipeline.stage_costs import StageTables
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request.request import Request

HARDWARE = find_hardware("cpu-gloo")
LAYERS, ROWS, SEQ, WIDTH, FLOAT = 3, 4, 16, 32, 4
STREAM = ROWS * SEQ * WIDTH * FLOAT  # what enters a block


@functools.cache
def planned() -> tuple[Graph, Plan]:
    """Tensor parallelism over two ranks, which all have the residual stream; all blocks are recomputed."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=SEQ, layers=LAYERS, heads=4, width=WIDTH))
    batch = (torch.randint(256, (ROWS, SEQ)), torch.randint(256, (ROWS, SEQ)))
    prepared = prepare_step(model, batch, loss_fn=loss_fn)
    plan = make_plan(prepared, Request(HARDWARE, mesh={"dp": 1, "tp": 2}, recipe={"tp": "tp"}))
    return prepared.analysis.graph, replace(plan, recompute="full")


def with_line(state: str, name: str = "blocks.*.input") -> Plan:
    _, plan = planned()
    return replace(plan, saved={name: SavedLayout.parse(state, name, plan.mesh)})


def test_inputs_have_the_names_of_their_blocks():
    values = SavedValues(*planned())
    assert [each.name for each in values.inputs] == [f"blocks.{i}.input" for i in range(LAYERS)]
    # The table of embeddings is split by its rows, so that the first block gets a partial sum.
    assert [each.layout[1].kind for each in values.inputs] == ["P", "R", "R"]
    assert values.partitioned() == {"blocks.*.input": SavedLayout((R, S(0)))}
    assert values.partitioned("host") == {"blocks.*.input": SavedLayout((R, S(0)), "host")}
    assert values.slices == ()


def test_what_a_block_makes_has_the_name_of_its_maker():
    """A line keeps in slices what another op saves; of the result that its own op saves all stays."""
    graph, plan = planned()
    plan = replace(plan, recompute="none")
    made = [each.name for each in SavedValues(graph, plan).of.made if each.path == "blocks.1"]
    own = ["attention_norm/layer_norm", "attention.query/linear", "/add", "mlp_norm/layer_norm", "mlp/gelu"]
    assert {f"blocks.1.{name}" for name in own} <= {*made}
    assert not any("attention/" in name for name in made)  # attention saves its result itself
    name = "blocks.*.mlp_norm/layer_norm"
    sliced = replace(plan, saved={name: SavedLayout((R, S(2)))})
    assert held(graph, plan) - held(graph, sliced) == LAYERS * STREAM / 2
    again = replace(sliced, recompute="full")
    assert SavedValues(graph, again).slices == ()  # it is recomputed


def test_an_exact_name_goes_before_a_pattern():
    graph, _ = planned()
    plan = with_line("S(1)@tp")
    plan = replace(plan, saved={**plan.saved, "blocks.2.input": SavedLayout((R, S(2)))})
    found = {each.name: each.slice_layout[1] for each in SavedValues(graph, plan).slices}
    assert found == {"blocks.1.input": S(1), "blocks.2.input": S(2)}


def test_a_second_input_has_a_number():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.both = nn.Bilinear(8, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.first(x), self.second(x)
            return self.both(a, b).sum()

    prepared = prepare_step(Twice(), (torch.randn(4, 8),))
    graph = prepared.analysis.graph
    plan = make_plan(prepared, Request(HARDWARE, mesh={"x": 2}))
    names = [each.name for each in SavedValues(graph, plan).inputs]
    assert [name for name in names if name.startswith("both")] == ["both.input", "both.input#2"]


@pytest.mark.parametrize(
    ("state", "name", "says"),
    [
        (
            "S(1)@tp",
            "layers.*.input",
            "gives a saved layout for layers.*.input, which the model does not "
            "have. The activations that enter its blocks are blocks.*.input;",
        ),
        (
            "S(1)@tp",
            "blocks.*.input#2",
            "The activations that enter its blocks are blocks.*.input; they make and keep "
            "blocks.*.attention_norm/layer_norm<0, ",
        ),
        (
            "S(3)@tp",
            "blocks.*.input",
            "saves blocks.1.input as S(3)@tp, which does not slice it: it has the shape [4, 16, 32]",
        ),
    ],
)
def test_lines_that_mean_nothing_are_refused(state, name, says):
    graph, _ = planned()
    with pytest.raises(PlanError) as error:
        SavedValues(graph, with_line(state, name)).check()
    assert says in str(error.value)
    assert possible_lines(graph, with_line(state, name)) == {}
    assert possible_lines(graph, with_line("S(1)@tp")) == with_line("S(1)@tp").saved


def held(graph: Graph, plan: Plan) -> float:
    return float(step_of(graph, plan, HARDWARE).held("saved activations", "first"))


def gathers(graph: Graph, plan: Plan) -> float:
    """Seconds of the gathers of one micro-batch."""
    items = step_of(graph, plan, HARDWARE).items
    found = [item for item in items if "of saved" in item.name]
    assert all((i.phase, i.kind, i.resource) == ("backward", "all_gather", "tp") for i in found)
    return sum(float(i.count * i.seconds) for i in found)


def test_slices_halve_what_enters_and_cost_a_gather_each():
    graph, plan = planned()
    sliced = with_line("S(1)@tp")
    assert held(graph, plan) - held(graph, sliced) == 2 * STREAM / 2  # of the second and the third block
    (item,) = {i.traffic_bytes for i in step_of(graph, sliced, HARDWARE).items if "of saved" in i.name}
    assert item == STREAM / 2  # of two ranks, each gets the other's half
    slower = composed(graph, sliced, HARDWARE).step_seconds - composed(graph, plan, HARDWARE).step_seconds
    assert slower == pytest.approx(gathers(graph, sliced)) and slower > 0


@pytest.mark.parametrize("how", ["none", 2, "ops", "full"])
def test_the_formulas_of_a_step_and_the_tables_of_stages_agree(how):
    """With blocks that are not recomputed too, of which ops save what enters them."""
    graph, plan = planned()
    if how == "ops":
        known = recomputable_names(graph, plan).items()
        how = Selection.of({path: [n for n in names if "norm" in n] for path, names in known})
    for saved in ({}, with_line("S(1)@tp").saved):
        each = replace(plan, recompute=how, saved=saved)
        table = StageTables(graph, each, HARDWARE, world=each.mesh).at(how)
        assert held(graph, each) == table.saved_bytes[0, -1]
    slices = SavedValues(graph, each).slices
    assert [kept.name for kept in slices] == ["blocks.1.input", "blocks.2.input"]
    assert held(graph, replace(each, saved={})) - held(graph, each) == STREAM


def test_what_crosses_between_stages_is_left_alone():
    """The pipeline keeps what a stage received."""
    graph, _ = planned()
    plan = with_line("S(1)@tp")
    starts = block_starts(graph)
    staged = replace(plan, micro_batches=4, pipeline=Pipeline(2, "1f1b", (starts[2],)))
    assert [each.name for each in SavedValues(graph, staged).slices] == ["blocks.2.input"]
    whole = replace(staged, saved={})
    assert composed(graph, staged, HARDWARE).peak_bytes <= composed(graph, whole, HARDWARE).peak_bytes
    assert composed(graph, staged, HARDWARE).step_seconds > composed(graph, whole, HARDWARE).step_seconds
