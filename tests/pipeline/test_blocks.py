"""Where stages may begin: at layers, whatever the models are like."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.errors import SearchError
from autopar.ir import Stack
from autopar.models import EncoderDecoder, Transformer, build, example_inputs
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.parts import block_starts
from autopar.planning.planning import prepare_step
from tests.search.stacked import in_a_row, residual, starts_by_module


def test_a_block_is_a_layer_with_the_sum_behind_it() -> None:
    graph = residual(3)
    blocks = find_blocks(graph)
    assert [(b.module, b.repeats) for b in blocks] == [
        ("embed", False),
        ("layers.0", True),
        ("layers.1", True),
        ("layers.2", True),
        ("head", False),
    ]
    assert block_starts(graph) == ("linear_0", "linear_1", "linear_5", "linear_9", "linear_13")


def test_a_mask_begins_no_block() -> None:
    """A stage that needs it recomputes it, so a cut before it and a cut after it are the same."""
    graph = in_a_row(
        ("embed", "w"),
        ("layers.0", "m"),
        ("layers.0", "w"),
        ("layers.1", "m"),
        ("layers.1", "w"),
        ("", "m"),
        ("head", "w"),
    )
    assert block_starts(graph) == ("linear_0", "linear_2", "linear_4", "linear_6")


def test_an_encoder_and_a_decoder() -> None:
    graph = in_a_row(
        ("embed", "w"),
        ("encoder.0", "w"),
        ("encoder.1", "w"),
        ("norm", "w"),
        ("embed", "w"),
        ("decoder.0", "w"),
        ("decoder.0.cross", "w"),
        ("decoder.1", "w"),
        ("decoder.1", "w"),
        ("norm", "w"),
        ("head", "w"),
    )
    assert starts_by_module(graph, block_starts(graph)) == [
        "embed",
        "encoder.0",
        "encoder.1",
        "norm",
        "decoder.0",
        "decoder.1",
        "norm",
    ]


def test_layers_that_alternate_between_two_lists() -> None:
    """A sum between the last layers of both has no parameter, and stays with the one before."""
    graph = in_a_row(
        ("attentions.0", "w"),
        ("", "+"),
        ("mlps.0", "w"),
        ("", "+"),
        ("attentions.1", "w"),
        ("", "+"),
        ("mlps.1", "w"),
        ("", "+"),
        ("head", "w"),
    )
    assert starts_by_module(graph, block_starts(graph)) == ["attentions.0", "mlps.0", "attentions.1", "mlps.1", "head"]


def test_a_u_shape() -> None:
    graph = in_a_row(
        ("stem", "w"),
        ("downs.0.a", "w"),
        ("downs.0.b", "w"),
        ("downs.1.a", "w"),
        ("middle", "w"),
        ("ups.0.a", "w"),
        ("ups.0.b", "w"),
        ("ups.1.a", "w"),
        ("head", "w"),
    )
    assert starts_by_module(graph, block_starts(graph)) == [
        "stem",
        "downs.0.a",
        "downs.1.a",
        "middle",
        "ups.0.a",
        "ups.1.a",
        "head",
    ]


def test_layers_that_run_twice_are_blocks_twice() -> None:
    graph = in_a_row(("layers.0", "w"), ("layers.1", "w"), ("layers.0", "w"), ("layers.1", "w"))
    assert len(block_starts(graph)) == 4


def test_a_layer_in_pieces_with_sums_of_its_parent_is_one_block() -> None:
    graph = in_a_row(
        ("layers.0.attention", "w"),
        ("", "+"),
        ("layers.0.mlp", "w"),
        ("", "+"),
        ("layers.1.attention", "w"),
        ("", "+"),
        ("layers.1.mlp", "w"),
        ("", "+"),
        ("head", "w"),
    )
    assert starts_by_module(graph, block_starts(graph)) == ["layers.0.attention", "layers.1.attention", "head"]


def test_a_model_without_stacks_has_its_outermost_modules() -> None:
    graph = in_a_row(("net.first.a", "w"), ("net.first.b", "w"), ("net.second", "w"), ("", "+"), ("net.third", "w"))
    assert not graph.stacks
    assert starts_by_module(graph, block_starts(graph)) == ["net.first.a", "net.second", "net.third"]


def test_refuses_to_cut_where_the_names_of_most_layers_are_unknown() -> None:
    graph = dataclasses.replace(residual(3), stacks=(Stack("layers", 32, 3),))
    with pytest.raises(SearchError, match="the names of the others are not known"):
        block_starts(graph)


def test_refuses_a_model_without_parameters() -> None:
    with pytest.raises(SearchError, match="has no parameters"):
        find_blocks(in_a_row(("a", "+"), ("b", "+")))


SMALL = {"hidden": 16, "layers": 3, "heads": 2, "ffn": 32, "vocab": 32}
GPT = Transformer.from_dimensions("gpt", **SMALL, max_positions=8)
T5 = EncoderDecoder(**SMALL, encoder_layers=2, norm="rms", bias=False, activation="relu")


@pytest.mark.parametrize(("description", "count"), [(GPT, 5), (T5, 8)])
def test_captured_models(description: Transformer | EncoderDecoder, count: int) -> None:
    """embed + 3 layers + head; embed + 2 + (norm and embed) + 3 + head."""
    with torch.device("meta"):
        model = build(description)
    prepared = prepare_step(model, example_inputs(description, 2, 8))
    blocks = find_blocks(prepared.analysis.graph)
    assert len(blocks) == count, blocks
    assert sum(block.repeats for block in blocks) == count - (2 if description is GPT else 3)
