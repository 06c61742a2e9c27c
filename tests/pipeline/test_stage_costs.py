"""What stages cost: sums, what they share, what crosses, and what is saved for backward."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model.machines.software import Software
from autopar.ir import Graph, Mesh, ParameterPlan, Pipeline, Plan, R
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.search import search
from tests.search.graphs import mlp
from tests.search.stacked import Sizes, in_modules, residual
from tests.search.toy import TOY
from tests.support.price_oracle import price
from tests.support.stage_costs import costs_of_stages

SIZES = Sizes(batch=8, width=16, hidden=32, vocab=64)
WORLD = Mesh.of({"pp": 2, "dp": 1})
ROW = SIZES.batch * 4  # bytes of a batch of one number each


def unsplit(graph: Graph) -> Plan:
    whole = ParameterPlan((R,), (R,))
    return Plan(
        Mesh.of({"dp": 1}),
        "",
        "auto",
        1,
        dict.fromkeys(graph.parameters, whole),
        dict.fromkeys(graph.inputs, (R,)),
        {op.name: ("-",) for op in graph.ops},
    )


def table(graph: Graph, plan: Plan | None = None, **options: object) -> StageTable:
    plan = plan or unsplit(graph)
    return StageTables(graph, plan, TOY, world=WORLD, **options).at(plan.recompute)  # type: ignore[arg-type]


def test_one_stage_is_the_whole_model() -> None:
    """Memory as the search counts it; time too, but for adding gradients up."""
    graph = residual(3)
    whole, cost = table(graph), price(graph, unsplit(graph), TOY)
    assert whole.saved_bytes[0, -1] == cost.saved_bytes
    assert whole.kept_bytes[0, -1] == cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes
    adding = 3 * 4 * sum(np.prod(graph.tensors[t].shape) for t in graph.parameters.values())
    seconds = float(whole.forward_seconds[0, -1] + whole.backward_seconds[0, -1])
    launches = sum(2 + (op.kind == "linear") for op in graph.ops) * TOY.launch_seconds
    assert seconds == pytest.approx(cost.compute_seconds + adding / TOY.memory_bytes_per_second, abs=2 * launches)


def test_work_adds_up_wherever_it_is_cut() -> None:
    found = table(residual(3))
    for name in ("forward_seconds", "backward_seconds", "weight_seconds", "split_seconds", "once_seconds"):
        # The first stage does not split its backward.
        first = 1 if name in ("weight_seconds", "split_seconds") else 0
        values = getattr(found, name)
        for i, k, j in itertools.combinations(range(first, found.blocks + 1), 3):
            assert values[i, k] + values[k, j] == pytest.approx(values[i, j]), name
        assert (np.diff(values[first, first:]) > 0).all(), name


def test_more_than_half_of_backward_makes_gradients_of_weights() -> None:
    """Each product has one product for its input and one for its matrix; gradients are added up besides."""
    found = table(residual(2))
    share = found.weight_seconds[1, 2] / found.backward_seconds[1, 2]
    assert 0.5 < share < 1
    assert found.weight_seconds[0, 1] == pytest.approx(found.backward_seconds[0, 1])  # the input needs none
    assert found.split_seconds[0].max() == 0 < found.split_seconds[1].max()


def test_a_tied_embedding_is_held_by_both_ends_and_once_by_a_stage_of_both() -> None:
    graph, apart = residual(2, tied=True), residual(2)
    size = 4 * 4 * SIZES.vocab * SIZES.width  # parameter, gradient, two moments
    assert table(graph).kept_bytes[0, 1] == size == table(graph).kept_bytes[3, 4]
    assert table(apart).kept_bytes[0, 4] - table(graph).kept_bytes[0, 4] == size


def test_work_on_a_tied_parameter_belongs_to_the_first_block_that_uses_it() -> None:
    graph = residual(2, tied=True)
    blocks = PricedBlocks(graph, unsplit(graph), TOY, world=WORLD)
    (tied,) = (name for name, tensor in graph.parameters.items() if len(blocks.uses[tensor]) > 1)
    assert blocks.rows_of(replace(blocks.items[0], of=tied, moves="")) == ([0], 1.0)


def test_what_crosses_is_the_residual_stream() -> None:
    found = table(residual(3))
    assert list(found.sent_bytes) == [0, *[ROW * SIZES.width] * 4, 0]
    assert (found.gradient_bytes == found.sent_bytes).all()
    assert found.send_seconds[1] > 0 == found.send_seconds[0] == found.send_seconds[-1]


def test_what_is_used_far_behind_is_carried_by_every_stage_between() -> None:
    """The head of a model that also takes what the embedding made."""
    graph = residual(3)
    *ops, head, loss = graph.ops
    ops[-1] = replace(ops[-1], operands=(ops[-1].operands[0], ops[0].results[0]))
    skipping = replace(graph, ops=(*ops, head, loss))
    found = table(skipping)
    assert list(found.sent_bytes) == [0, ROW * 16, *[2 * ROW * 16] * 2, ROW * 16, 0]
    assert found.saved_bytes[2, 3] == table(graph).saved_bytes[2, 3] + ROW * SIZES.width


def test_a_stage_holds_what_its_ops_keep_and_what_it_received_and_sent() -> None:
    """Counted by hand: a layer's input and hidden numbers, and the output that is sent on."""
    found = table(residual(3))
    layer = ROW * (SIZES.width + SIZES.hidden)
    assert found.saved_bytes[1, 2] == layer + ROW * SIZES.width
    assert found.saved_bytes[1, 4] == 3 * layer + ROW * SIZES.width
    inputs = ROW * (SIZES.vocab + 1)
    head = ROW * (SIZES.width + SIZES.vocab)
    assert found.saved_bytes[0, 5] == inputs + 3 * layer + head


def test_operands_of_a_transient_op_take_memory_while_it_runs() -> None:
    graph = residual(3)
    loss = replace(graph.ops[-1], transient=True)
    found = table(replace(graph, ops=(*graph.ops[:-1], loss))).transient_bytes - table(graph).transient_bytes
    assert found[0, -1] == found[-2, -1] == ROW * (SIZES.vocab + 1) + 4  # logits, labels and the loss
    assert found[0, -2] == 0


def test_layers_that_run_again_keep_what_enters_them() -> None:
    graph = residual(3)
    plain = table(graph)
    again = table(graph, replace(unsplit(graph), recompute="full"))
    assert again.saved_bytes[1, 4] == 4 * ROW * SIZES.width  # three that enter, one that leaves
    assert again.transient_bytes[1, 4] == ROW * (SIZES.width + SIZES.hidden)  # one layer at a time
    # the sum that ends a layer reads two tensors and writes one; nothing keeps it, so it is not repeated
    sums = 3 * 3 * ROW * SIZES.width / TOY.memory_bytes_per_second
    assert again.backward_seconds[1, 4] == pytest.approx(
        plain.backward_seconds[1, 4] + plain.forward_seconds[1, 4] - sums
    )
    for name in ("backward_seconds", "saved_bytes"):
        same = np.isclose(getattr(again, name), getattr(plain, name))
        assert same[0, 1] and same[4, 5], name  # the ends run once


def test_what_hides_behind_compute_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if buckets were so small that even the last one hid."""
    monkeypatch.setattr("autopar.cost_model.buckets.hidden_part", lambda buckets: 1.0)
    graph = residual(3)
    plan = search(graph, {"dp": 2}, hardware=TOY, recipe="zero3")
    world = Mesh.of({"pp": 2, "dp": 2})
    exposed = StageTables(graph, plan, TOY, world=world).at(plan.recompute)
    hidden = StageTables(graph, plan, TOY, world=world, software=Software(hides=1.0)).at(plan.recompute)
    above = np.triu_indices(exposed.blocks + 1, 1)
    assert (hidden.backward_seconds <= exposed.backward_seconds)[above].all()
    assert hidden.backward_seconds[0, -1] < exposed.backward_seconds[0, -1]


def test_work_of_forward_alone_before_the_first_layer() -> None:
    """An input's copy for the first layer is a kernel of no seconds, with no backward; single ops run again."""
    modules = [f"layers.{i}{part}" for i in range(3) for part in (".up", "", ".down")]
    graph = in_modules(mlp(layers=3), [*modules, ""])
    plan = unsplit(graph)
    columns = replace(
        plan,
        mesh=Mesh.of({"tp": 2}),
        ops=plan.ops | {"linear_0": ("f",)},
        recompute=Selection.of({"layers.*": ["relu"]}),
    )
    slow = replace(TOY, host_seconds=1e-3)
    found = StageTables(graph, columns, slow).at(columns.recompute).forward_seconds[0, -1]
    # of every layer three, the copy, the collective after the first product, and the sum
    assert found == pytest.approx(12 * slow.host_seconds, rel=0.01)


def test_stages_of_any_cuts() -> None:
    """A cut inside a layer carries what is inside, and the stages make up the whole."""
    graph = residual(3)
    cuts = ("relu_2", "linear_9")
    plan = replace(unsplit(graph), pipeline=Pipeline(3, "gpipe", cuts))
    stages = costs_of_stages(graph, plan, TOY)
    whole = table(graph)
    assert sum(s.forward_seconds for s in stages) == pytest.approx(whole.forward_seconds[0, -1])
    assert sum(s.kept_bytes for s in stages) == whole.kept_bytes[0, -1]
    carried = stages[0].send_forward_seconds / stages[1].send_forward_seconds
    assert carried == pytest.approx((SIZES.width + SIZES.hidden) / SIZES.width, rel=0.01)
    (one,) = costs_of_stages(graph, unsplit(graph), TOY)
    assert one.forward_seconds == pytest.approx(whole.forward_seconds[0, -1])
    assert one.saved_bytes == whole.saved_bytes[0, -1]


def test_bytes_of_every_stage_by_sets() -> None:
    """An oracle that knows no blocks: names in sets, stage by stage."""
    graph = residual(3, tied=True)
    found = table(graph)
    places = {op.name: i for i, op in enumerate(graph.ops)}
    edges = [*(places[name] for name in found.starts), len(graph.ops)]
    parameters = set(graph.parameters.values())
    for i, j in itertools.combinations(range(found.blocks + 1), 2):
        ops = graph.ops[edges[i] : edges[j]]
        made_before = {r for op in graph.ops[: edges[i]] for r in op.results}
        made_inside = {r for op in ops for r in op.results}
        used_inside = {n for op in ops for n in op.operands}
        used_behind = {n for op in graph.ops[edges[j] :] for n in op.operands}
        received = made_before & (used_inside | used_behind)
        sent = (made_before | made_inside) & used_behind
        saved = {n for op in ops for n in op.saved} - parameters
        sizes = {n: 4 * int(np.prod(graph.tensors[n].shape)) for n in graph.tensors}
        assert found.saved_bytes[i, j] == sum(sizes[n] for n in saved | received | sent), (i, j)
        assert found.kept_bytes[i, j] == 4 * sum(sizes[n] for n in used_inside & parameters), (i, j)


@pytest.mark.parametrize("recompute", ["none", 1, 2, "full"])
def test_figures_of_the_whole_model_need_no_table(recompute: Recompute) -> None:
    graph = residual(3)
    tables = StageTables(graph, unsplit(graph), TOY, world=WORLD)
    assert tables.whole(recompute) == tables.at(recompute).whole
