"""Three captured layers say of every stage what all layers captured say: seconds, bytes, cuts."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from autopar.analysis.factors import analyze
from autopar.cost_model import H100
from autopar.ir import Graph, Stack
from autopar.models import build, example_inputs, repeated_layers
from autopar.models.description import EncoderDecoder, Transformer
from autopar.passes.unroll_layers import unroll_layers
from autopar.pipeline.parts import block_starts
from autopar.pipeline.stage_costs import StageTables
from autopar.planning.planning import Prepared, prepare_step
from autopar.search import search
from autopar.search.pipeline import search_pipeline
from autopar.search.request import Request
from tests.support.llama import Llama

LAYERS = 7
SMALL = {"hidden": 32, "heads": 4, "ffn": 64, "vocab": 64}
GPT = Transformer.from_dimensions("gpt", layers=LAYERS, **SMALL, max_positions=16)
T5 = EncoderDecoder(
    **SMALL, layers=LAYERS, encoder_layers=LAYERS, norm="rms", bias=False, activation="relu"
)
TINY = replace(H100, memory_bytes=10**9, reserved_bytes=0)


def described(description: Transformer | EncoderDecoder, layers: int | None) -> Prepared:
    with torch.device("meta"):
        model = build(description, layers=layers)
    return prepare_step(model, example_inputs(description, 4, 16))


def llama(layers: int | None) -> Prepared:
    with torch.device("meta"):
        model = Llama(vocab=64, width=32, inner=64, heads=4, kv_heads=2, layers=layers or LAYERS)
        tokens = torch.zeros(4, 16, dtype=torch.int64)
    return prepare_step(model, (tokens, tokens))


def few(prepared: Prepared, paths: dict[str, int]) -> Graph:
    stacks = tuple(Stack(path, layers, 3) for path, layers in paths.items())
    _, copies = unroll_layers(prepared.captured, stacks)
    return replace(prepared.analysis.graph, stacks=stacks, copies=copies)


MODELS = ["llama", "gpt", "t5"]
Graphs = tuple[Graph, Graph]  # of three layers, of all


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graphs]:
    found = {"llama": (few(llama(3), {"layers": LAYERS}), llama(None).analysis.graph)}
    for name, description in (("gpt", GPT), ("t5", T5)):
        short = few(described(description, 3), repeated_layers(description))
        found[name] = short, described(description, None).analysis.graph
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layers", [pytest.param(4, marks=pytest.mark.slow), LAYERS])
def test_an_unrolled_capture_is_the_capture_of_all_layers(model: str, layers: int) -> None:
    if model == "llama":
        short, whole, paths = llama(3), llama(layers), {"layers": layers}
    else:
        description = GPT if model == "gpt" else T5
        paths = dict.fromkeys(repeated_layers(description), layers)
        short, whole = described(description, 3), described(description, layers)
    stacks = [Stack(path, count, 3) for path, count in paths.items()]
    unrolled, copies = unroll_layers(short.captured, stacks)
    assert unrolled.fingerprint == whole.captured.fingerprint
    assert unrolled.parameters == whole.captured.parameters
    assert analyze(unrolled).graph == whole.analysis.graph
    names = [name for op in short.analysis.graph.ops for name in copies[op.name]]
    assert sorted(names) == sorted(op.name for op in whole.analysis.graph.ops)


@pytest.mark.parametrize("model", MODELS)
def test_blocks_have_the_names_of_the_whole_model(model: str, graphs: dict[str, Graphs]) -> None:
    short, whole = graphs[model]
    assert block_starts(short) == block_starts(whole)


@pytest.mark.parametrize("recompute", ["none", 2, "full"])
@pytest.mark.parametrize("recipe", ["dp:zero1,tp:tp", "dp:zero3,tp:tp+sp"])
@pytest.mark.parametrize("model", MODELS)
def test_a_table_of_three_layers_is_that_of_all(
    model: str, recipe: str, recompute: str | int, graphs: dict[str, Graphs]
) -> None:
    tables = []
    for graph in graphs[model]:
        plan = search(graph, {"dp": 2, "tp": 2}, hardware=TINY, recipe=recipe)
        tables.append(StageTables(graph, plan, TINY).at(recompute))  # type: ignore[arg-type]
    for field in fields(tables[0]):
        a, b = (getattr(table, field.name) for table in tables)
        if isinstance(a, np.ndarray):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-15, err_msg=field.name)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_the_pipeline_found_is_the_same(model: str, stages: int, graphs: dict[str, Graphs]) -> None:
    short, whole = (
        search_pipeline(
            graph, Request(TINY, mesh={"pp": stages, "dp": 2}, recipe="dp:zero1", schedule="gpipe")
        )
        for graph in graphs[model]
    )
    assert short.best.setting == whole.best.setting
    assert short.plan.pipeline == whole.plan.pipeline
    assert short.best.seconds == pytest.approx(whole.best.seconds, rel=1e-9)
    assert short.best.balance.rank_bytes == pytest.approx(whole.best.balance.rank_bytes)


@pytest.mark.parametrize(
    "recompute",
    [
        2,
        pytest.param(
            0.5,
            marks=pytest.mark.xfail(
                strict=True, reason="ops are selected only in graphs that have all their layers"
            ),
        ),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_recomputation_is_the_same(
    model: str, recompute: int | float, graphs: dict[str, Graphs]
) -> None:
    short, whole = (
        search_pipeline(
            graph,
            Request(
                TINY,
                mesh={"pp": 2, "dp": 2},
                recipe="dp:ddp",
                schedule="gpipe",
                recompute=recompute,
            ),
        )
        for graph in graphs[model]
    )
    assert short.plan.recompute == whole.plan.recompute != "none"
    assert short.plan.pipeline == whole.plan.pipeline
    assert short.best.seconds == pytest.approx(whole.best.seconds, rel=1e-9)
