"""The search finds what experts found, on a captured Llama-3-8B-sized model, from the rules alone."""

import pytest
import torch

from autopar.cost_model import H100
from autopar.ir import Mesh
from autopar.pipeline.composed import composed
from autopar.planning.planning import make_plan, prepare_step
from autopar.program.program import build_program
from autopar.search.request.request import Request
from tests.support.llama import Llama

EIGHT = Mesh.of({"x": 8})


def prepared(batch, sequence, layers=2):
    with torch.device("meta"):
        model = Llama(vocab=32768, width=4096, inner=14336, heads=32, kv_heads=8, layers=layers)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return prepare_step(model.bfloat16(), (tokens, tokens))


@pytest.fixture(scope="module")
def one_sequence():
    return prepared(batch=1, sequence=4096)


@pytest.fixture(scope="module")
def many_sequences():
    return prepared(batch=4096, sequence=512)  # two million tokens: gradients cost little beside them


def splits(plan, graph):
    """(module, kind) -> names of the factors that its ops split."""
    found = {}
    for op in graph.ops:
        if not op.is_view:
            choice = op.choice(plan.ops[op.name][0])
            found.setdefault((op.module, op.kind), []).append(choice.factor)
    return found


def test_one_sequence_is_split_as_megatron_does(one_sequence):
    graph = one_sequence.analysis.graph
    plan = make_plan(one_sequence, Request(H100, mesh=EIGHT))
    found = splits(plan, graph)
    heads = graph.tensors[graph.parameters["layers.0.attention.key.weight"]].factors[0][0]
    inner = graph.tensors[graph.parameters["layers.0.mlp.up.weight"]].factors[0][0]
    for name in ("query", "key", "value", "output"):  # columns, then rows: one factor, the heads
        assert found[f"layers.0.attention.{name}", "aten.linear"] == [heads]
    for name in ("gate", "up", "down"):
        assert found[f"layers.0.mlp.{name}", "aten.linear"] == [inner]
    assert found["layers.0", "aten.add"] == ["seq", "seq"]  # the residual stream
    assert set(found["layers.0.mlp_norm", "aten.mul"]) == {"seq"}


def test_its_collectives_are_gathers_and_scatters_around_attention_and_mlp(one_sequence):
    plan = make_plan(one_sequence, Request(H100, mesh=EIGHT))
    program = build_program(one_sequence.captured, one_sequence.analysis, plan)
    around = [
        n
        for n in program.module.graph.nodes
        if str(n.target).startswith(("autopar.all_gather", "autopar.reduce_scatter")) and list(n.args[1]) == [1]
    ]
    names = [str(n.target).split(".")[1] for n in around]
    # two blocks, each gathering before and scattering after attention and MLP; and one more gather
    # or scatter on each side may serve the embedding and the head
    assert names.count("all_gather") >= 4 and names.count("reduce_scatter") >= 4
    gathers = [n for n in around if "all_gather" in str(n.target)]
    assert all(n.args[4] == "reduce_scatter" for n in gathers[:4])  # and the transpose in backward


def test_loose_memory_gives_plain_data_parallelism(many_sequences):
    graph = many_sequences.analysis.graph
    plan = make_plan(many_sequences, Request(H100, mesh=EIGHT, memory_bytes=10**15))
    ddp = make_plan(many_sequences, Request(H100, mesh=EIGHT, recipe="ddp", memory_bytes=10**15))
    assert composed(graph, plan, H100).step_seconds <= composed(graph, ddp, H100).step_seconds
    linears = [f for (_, kind), fs in splits(plan, graph).items() if kind == "aten.linear" for f in fs]
    assert set(linears) == {"batch"}


def test_tight_memory_shards_the_parameters(many_sequences):
    graph = many_sequences.analysis.graph
    loose = make_plan(many_sequences, Request(H100, mesh=EIGHT, memory_bytes=10**15))
    parameters = sum(2 * torch.Size(graph.tensors[t].shape).numel() for t in graph.parameters.values())
    # replicas need 8 bytes of bfloat16 states a parameter: half of that is too little
    bound = memory_of(loose) - 2 * parameters
    plan = make_plan(many_sequences, Request(H100, mesh=EIGHT, memory_bytes=bound))
    big = [n for n in plan.parameters if "norm" not in n]
    sharded = [n for n in big if plan.parameters[n].storage[0].kind == "S"]
    assert len(sharded) >= len(big) / 2
    linears = [f for (_, kind), fs in splits(plan, graph).items() if kind == "aten.linear" for f in fs]
    assert linears.count("batch") >= 0.9 * len(linears)


def memory_of(plan):
    """Bytes a rank, read off the plan's own notes."""
    (line,) = [note for note in plan.notes if "GB a rank" in note]
    return int(float(line.split()[0]) * 1e9)
