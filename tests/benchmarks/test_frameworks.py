"""What runtimes keep in memory, by hand: figures of one layer and one token, in units of the hidden width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.recompute import Selection
from autopar.search.request.options import PlanOptions
from benchmarks.accuracy.experts import choice_of, repeats_of
from benchmarks.accuracy.memory_verdicts import Verdict, verdict
from benchmarks.accuracy.rows import Row, parse
from benchmarks.accuracy.subjects import subject

# Llama 3.1 405B on 512 H100, MLPerf Training v5.0: 126 layers on 8 stages of 8 chunks, 4096 of 8192 tokens a rank.
LLAMA = {
    "model": "Llama 3.1 405B",
    "hidden": "16384",
    "layers": "126",
    "heads": "128",
    "kv_heads": "8",
    "ffn": "53248",
    "vocab": "32000",
    "tied_embeddings": "no",
    "seq_len": "8192",
    "gpu": "H100 SXM 80GB",
    "n_gpus": "512",
    "framework": "NVIDIA NeMo Framework",
    "dp": "4",
    "cp": "2",
    "tp": "8",
    "pp": "8",
    "vpp": "8",
    "schedule": "1F1B-I",
    "micro_batch": "1",
    "grad_accum": "288",
    "precision": "fp8",
    "step_time_s": "55.1",
    "status": "ok",
}

# Llama 3 8B under torchtitan on 8 GPUs, one sequence of 8192 tokens a rank, bfloat16.
TITAN = {
    "model": "Llama 3 8B",
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "tied_embeddings": "no",
    "seq_len": "8192",
    "gpu": "MI300X",
    "n_gpus": "8",
    "framework": "torchtitan + torchao",
    "dp": "8",
    "zero_stage": "3",
    "tp": "1",
    "pp": "1",
    "micro_batch": "1",
    "grad_accum": "1",
    "precision": "bf16",
    "recompute": "selective (per op)",
    "step_time_s": "1.52",
    "peak_memory_gib": "39.09",
    "status": "ok",
}


def priced(row: dict[str, str], **change: str) -> Verdict:
    found = parse(row | change)
    assert isinstance(found, Row)
    return verdict("by hand", subject(found))


def saved_bytes(found: Verdict) -> float:
    (term,) = (term for term in found.terms if term.name == "saved activations")
    return float(term.value[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("precision", "bytes_of_width"),
    [
        # Inputs of norms 2 + 2, of products 2 + 2, queries, keys, values and the result of attention 4.25, gate and
        # up 2 * 2 * 3.25, what goes into down 2 * 3.25.
        ("bf16", 31.75),
        # The inputs of products in one byte, and the result of attention in one byte more.
        ("fp8", 4 + 2 + 4.25 + 1 + 13 + 3.25),
    ],
)
def test_transformer_engine_keeps_shards_and_one_tensor_of_gate_and_up(precision: str, bytes_of_width: float) -> None:
    found = priced(LLAMA, precision=precision)
    assert found.stage == "middle"
    # Chunks of a stage in flight on the second of 8 stages: 7 * 8 + 1 + 2 * 6, of 8; a stage has 16 layers.
    token_layers = 4096 * 16 * (7 * 8 + 1 + 2 * 6) / 8
    assert saved_bytes(found) == pytest.approx(bytes_of_width * 16384 / 8 * token_layers, rel=0.01)


def test_a_run_of_products_in_8_bits_fits() -> None:
    assert not priced(LLAMA).is_false_no


def test_gradients_of_products_in_8_bits_are_added_up_in_bfloat16() -> None:
    narrow, wide = (priced(LLAMA, precision=each) for each in ("fp8", "bf16"))
    states = [
        {term.name: float(term.value[0]) for term in each.terms if term.name == "gradients"}  # type: ignore[index]
        for each in (narrow, wide)
    ]
    assert states[1]["gradients"] == 2 * states[0]["gradients"]


def test_a_makers_choice_recomputes_what_its_runtime_does_not_keep() -> None:
    found = subject(parse(LLAMA))
    repeats = repeats_of(found)
    assert repeats == ("attention.query/linear<0", "mlp.gate/linear<0", "mlp/silu")
    choice = choice_of(found.row, 1, True, repeats)
    assert choice.recomputation == Selection((("layers.*", repeats),))
    PlanOptions(recompute=choice.recomputation)  # which the search refuses where it does not know the words
    assert "recompute none [cp] but attention.query/linear<0, " in str(choice)
    assert replace(choice, recompute="full").recomputation == "full"


def test_recomputation_by_op_keeps_every_second_product_and_attention() -> None:
    """Kept of a layer: its input, query, value, the result of attention, gate and the result of the feed-forward part:
    1 + 1 + 0.25 + 1 + 3.5 + 1 widths of 2 bytes. The loss keeps 4 bytes for each logit."""
    found = priced(TITAN)
    layers, logits = 2 * 7.75 * 4096 * 8192 * 32, 4 * 8192 * 128256
    assert saved_bytes(found) == pytest.approx(layers + logits, rel=0.01)
    # The table's peak, of a compiled run, whose loss keeps less.
    assert found.priced_bytes == pytest.approx(39.09 * 2**30, rel=0.15)
