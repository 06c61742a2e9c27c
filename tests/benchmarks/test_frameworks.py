"""What runtimes keep in memory, by hand: figures of one layer and one token, in units of the hidden width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.items import COMPUTE
from autopar.ir.recompute import Selection
from autopar.search.request.options import PlanOptions
from benchmarks.accuracy.experts import choice_of, repeats_of
from benchmarks.accuracy.memory_verdicts import Verdict, verdict
from benchmarks.accuracy.pricing import step_of
from benchmarks.accuracy.rows import Row, parse
from benchmarks.accuracy.subjects import EAGER_HOST_SECONDS, subject
from benchmarks.accuracy.traits import SINGLE

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
    found = priced(TITAN, framework="torchtitan")
    layers, logits = 2 * 7.75 * 4096 * 8192 * 32, 4 * 8192 * 128256
    assert saved_bytes(found) == pytest.approx(layers + logits, rel=0.01)


def test_a_compiled_loss_keeps_no_logits_in_float32() -> None:
    """Layers keep what they keep without; the table has the peak of a compiled run."""
    found = priced(TITAN)
    assert saved_bytes(found) == pytest.approx(2 * 7.75 * 4096 * 8192 * 32, rel=0.02)
    assert found.priced_bytes == pytest.approx(39.09 * 2**30, rel=0.15)


# DeepSeek-V3 on 256 GB300, Megatron-Bridge.
DEEPSEEK = {
    "source": "Megatron-Bridge perf summary 26.02 NeMo Container",
    "model": "DeepSeekV3",
    "seq_len": "4096",
    "gpu": "GB300 NVL72",
    "n_gpus": "256",
    "framework": "Megatron-Core via NeMo/Megatron-Bridge",
    "dp": "128",
    "tp": "1",
    "pp": "2",
    "vpp": "8",
    "ep": "32",
    "micro_batch": "2",
    "global_batch": "4096",
    "precision": "MXFP8",
    "step_time_s": "14.2",
    "status": "ok",
}


def test_makers_of_latent_attention_make_queries_keys_and_values_again() -> None:
    """Of 128 heads, queries and keys of 192 numbers and values of 128, in 2 bytes; 8192 tokens of a layer in flight on
    the first of 2 stages of 8 chunks: 61 / 2 layers times 1 + 1 / 8, and one chunk more."""
    again, kept = (priced(DEEPSEEK, source=source) for source in (DEEPSEEK["source"], "NeMo"))
    assert again.subject.row.recomputes == ("mla_up_proj",)
    assert not again.is_false_no and kept.is_false_no
    saved = saved_bytes(kept) - saved_bytes(again)
    heads = 2 * 128 * (192 + 192 + 128)
    assert saved / (heads * 8192) == pytest.approx(61 / 2 * (2 + 1 / 8), rel=0.1)


def test_the_host_issues_the_products_of_every_expert() -> None:
    """With 64 ranks of 256 experts each has 4, with 32 it has 8: 4 more of 6 products each, in 58 of 61 layers."""
    few, many = (subject(parse(DEEPSEEK | {"ep": ep, "micro_batch": "1"})) for ep in ("64", "32"))
    steps = [step_of([s.row], s.shape, s.recompute, s.hardware, s.software) for s in (few, many)]
    counts = [
        sum(times * item.count for item, times in step.runs("layers", COMPUTE) if item.name == SINGLE) for step in steps
    ]
    assert counts[1] - counts[0] == pytest.approx(4 * 6 * 58)
    assert few.software.hides_activations == 0 and few.software.host_seconds == EAGER_HOST_SECONDS


def test_a_configuration_counts_more_than_a_guess() -> None:
    """Logs of MLPerf tell two micro-batches, where the table has a layout of another system."""
    row = {"source": "MLPerf Training v5.0 closed division", "source_ref": "Dell/results/x", "gpu": "H200 SXM 141GB"}
    row |= {
        "model": "Llama 2 70B LoRA fine-tuning",
        "n_gpus": "8",
        "global_batch": "8",
        "dp": "8",
        "tp": "1",
        "pp": "1",
    }
    found = parse(LLAMA | row | {"cp": "1", "micro_batch": "1", "grad_accum": "1", "vpp": ""})
    assert (found.dp, found.cp, found.micro_batch, found.grad_accum) == (8, 2, 0.5, 2)
