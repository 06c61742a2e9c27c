"""Sizes: closed forms against built modules, against transformers, and against what papers print."""

import dataclasses

import pytest
import torch
import transformers

from autopar.errors import AutoparError
from autopar.models import (
    PRESETS,
    EncoderDecoder,
    Transformer,
    VisionTransformer,
    build,
    find_preset,
    padded,
    parameter_count,
)
from autopar.models.description import Latent

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "vocab": 64, "max_positions": 16}


def built_count(description):
    with torch.device("meta"):
        return sum(p.numel() for p in build(description).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_parameters_of_the_closed_form_and_of_the_literature(name):
    preset = PRESETS[name]
    assert parameter_count(preset.description) == built_count(preset.description)
    assert parameter_count(preset.description) == pytest.approx(preset.parameters, rel=0.01)
    assert preset.source


@pytest.mark.parametrize(
    "description",
    [
        Transformer.from_dimensions("gpt", **SMALL),
        Transformer.from_dimensions("mpt", **SMALL),
        Transformer.from_dimensions("llama", **SMALL, kv_heads=2, fused_projections=True),
        Transformer.from_dimensions("llama", **SMALL, head_dim=16, bias=True),
        Transformer.from_dimensions("gpt", **SMALL, gated=True, tied=False),
        Transformer.from_dimensions("llama", **SMALL, experts=4, experts_per_token=2, gated=False),
        Transformer.from_dimensions("llama", **SMALL, kv_heads=1, experts=4, experts_per_token=2, bias=True),
        Transformer.from_dimensions("llama", **SMALL, kv_heads=2, norms_heads=True, tied=True),
        EncoderDecoder(hidden=32, layers=2, encoder_layers=3, heads=4, ffn=64, vocab=64),
        VisionTransformer(hidden=32, layers=2, heads=4, ffn=64, image=8, patch=4, classes=5, channels=1),
    ],
    ids=lambda d: f"{type(d).__name__}-{d.activation}-{d.kv_heads}",
)
def test_closed_form_counts_what_is_built(description):
    assert parameter_count(description) == built_count(description)


def their_count(model, config):
    with torch.device("meta"):
        return sum(p.numel() for p in getattr(transformers, model)(config).parameters())


def with_vocab(name, vocab):
    return parameter_count(dataclasses.replace(PRESETS[name].description, vocab=vocab))


def test_counts_are_those_of_transformers():
    gpt2 = transformers.GPT2Config()
    assert with_vocab("gpt2", 50257) == 124_439_808 == their_count("GPT2LMHeadModel", gpt2)
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
    assert parameter_count(PRESETS["llama3-8b"].description) == 8_030_261_248
    assert their_count("LlamaForCausalLM", llama) == 8_030_261_248
    mixtral = their_count("MixtralForCausalLM", transformers.MixtralConfig())
    assert parameter_count(PRESETS["mixtral-8x7b"].description) == mixtral
    qwen = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    qwen_count = their_count("Qwen3MoeForCausalLM", qwen)
    assert parameter_count(PRESETS["qwen3-30b-a3b"].description) == qwen_count == 30_532_122_624
    deepseek = their_count("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(tie_word_embeddings=False))
    assert parameter_count(PRESETS["deepseek-v3"].description) == deepseek == 671_026_404_352
    # Of gpt-oss every head has a sink.
    oss = their_count("GptOssForCausalLM", transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32))
    assert parameter_count(PRESETS["gpt-oss-20b"].description) == oss - 24 * 64
    t5 = transformers.T5Config(d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128)
    t5_count = their_count("T5ForConditionalGeneration", t5)
    assert parameter_count(PRESETS["t5-11b"].description) == t5_count
    vit = transformers.ViTConfig(
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        num_labels=1000,
    )
    vit_count = their_count("ViTForImageClassification", vit)
    assert parameter_count(PRESETS["vit-h"].description) == vit_count


def test_bert_lacks_only_pooler_types_and_the_product_before_the_head():
    vocab, hidden = 30522, 1024
    bert = transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=vocab
    )
    # two token types; a product with bias and norm before the head; a bias of the head
    lacking = 2 * hidden + hidden * (hidden + 3) + vocab
    assert with_vocab("bert-large", vocab) + lacking == their_count("BertForMaskedLM", bert)


# Parameters as the sources of published measurements print them.
@pytest.mark.parametrize(
    ("family", "sizes", "seq", "vocab", "parameters"),
    [
        # llm-foundry, scripts/train/benchmarking/README.md
        ("llm-foundry", (8192, 80, 64), 2048, 50368, 64_862_437_376),
        ("llm-foundry", (5120, 40, 40), 32768, 50368, 13_011_240_960),
        ("llm-foundry", (2560, 32, 20), 2048, 50368, 2_651_837_440),
        # mosaicml/mpt-7b
        ("mpt", (4096, 32, 32), 2048, 50432, 6_649_286_656),
        # BigScience, 104B of the BLOOM tuning: GPT with a vocabulary of 250880
        ("gpt", (14400, 77, 96), 2048, 250880, 195_257_246_400),
    ],
)
def test_rows_of_dimensions_give_published_counts(family, sizes, seq, vocab, parameters):
    hidden, layers, heads = sizes
    description = Transformer.from_dimensions(
        family, hidden=hidden, layers=layers, heads=heads, vocab=vocab, max_positions=seq
    )
    assert parameter_count(description) == parameters


def test_defaults_follow_from_other_sizes():
    description = Transformer.from_dimensions("gpt", **SMALL)
    assert (description.head_dim, description.kv_heads, description.ffn) == (8, 4, 128)
    assert Transformer.from_dimensions("llama", **SMALL, tied=True).tied
    assert padded(50257) == 50304
    assert padded(128256) == 128256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden=0 is not a whole number of at least 1"),
        ({"layers": -3}, "layers=-3 is not a whole number of at least 1"),
        ({"heads": 5}, "heads=5 do not divide hidden=32; give head_dim too"),
        ({"kv_heads": 3}, "kv_heads=3 do not divide heads=4"),
        ({"vocab": 0}, "vocab=0"),
        ({"activation": "tanh"}, "activation='tanh' is none of gelu, silu, relu"),
        ({"positions": "sine"}, "positions='sine' is none of learned, rotary, alibi"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token=3 of experts=2"),
        ({"positions": "rotary", "head_dim": 3}, "even head_dim, not 3"),
        ({"positions": "alibi", "causal": False}, "causal"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"dense_layers": 2}, "dense_ffn=0 is not a whole number"),
        ({"latent": Latent(queries=8, keys=8, rotary=4)}, "give positions='rotary'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(AutoparError, match=message):
        Transformer(**{**SMALL, "ffn": 64} | changes)


def test_other_kinds_refuse_too():
    blocks = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 64}
    with pytest.raises(AutoparError, match="patch=5 does not divide image=16"):
        VisionTransformer(**blocks, image=16, patch=5, classes=3)
    with pytest.raises(AutoparError, match="encoder_layers=0"):
        EncoderDecoder(**blocks, vocab=8, encoder_layers=0)


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(AutoparError, match=r"no model 'llama3-8B'; did you mean llama3-8b"):
        find_preset("llama3-8B")
    with pytest.raises(AutoparError, match="Known are gpt2, gpt2-xl"):
        find_preset("zzzz")
    with pytest.raises(AutoparError, match="no family 'lama'; there are llama, gpt, mpt"):
        Transformer.from_dimensions("lama", **SMALL)
