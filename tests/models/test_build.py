"""What the built models compute: against the papers' formulas, against each other, and in parallel."""

import functools
import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.ir import Mesh
from autopar.models import EncoderDecoder, Transformer, VisionTransformer, build, example_inputs, with_layers
from autopar.models.blocks import Attention, ExpertLayer, LatentAttention, Positions, rotate
from autopar.models.build import alibi_slopes, positions_of, relative_bucket
from autopar.models.description import Latent
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.proof.verify import verify
from tests.support.tables import often

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 64, "max_positions": 16}
T5 = {"norm": "rms", "bias": False, "activation": "relu"}
MIXTURE = {**SMALL, "experts": 4, "experts_per_token": 2}
BLOCKS = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 64}
CLASSES = 8

TINY = {
    "llama": Transformer.from_dimensions("llama", **SMALL, kv_heads=2),
    "llama, fused": Transformer.from_dimensions("llama", **SMALL, kv_heads=2, fused_projections=True),
    "gpt": Transformer.from_dimensions("gpt", **SMALL),
    "llm-foundry": Transformer.from_dimensions("llm-foundry", **SMALL),
    "mpt": Transformer.from_dimensions("mpt", **SMALL),
    "bert": Transformer.from_dimensions("bert", **SMALL),
    "experts": Transformer.from_dimensions("llama", **MIXTURE),
    "qwen3-30b-a3b": Transformer.from_dimensions("llama", **MIXTURE, kv_heads=2, head_dim=16, norms_heads=True),
    "gpt-oss": Transformer.from_dimensions("llama", **MIXTURE, kv_heads=2, head_dim=16, bias=True),
    "deepseek": Transformer.from_dimensions(
        "llama",
        **MIXTURE,
        head_dim=8,
        shared_experts=1,
        dense_layers=1,
        dense_ffn=48,
        latent=Latent(queries=24, keys=16, rotary=4),
    ),
    "t5": EncoderDecoder(**BLOCKS, encoder_layers=2, vocab=64, head_dim=16, fused_attention=False, **T5),
    "vit": VisionTransformer(**BLOCKS, image=12, patch=4, classes=CLASSES),
}


def drawn(description, batch=4):
    """Inputs of small numbers, for real."""
    vision = isinstance(description, VisionTransformer)
    top = CLASSES if vision else SMALL["vocab"]
    examples = example_inputs(description, batch, None if vision else SMALL["max_positions"], dtype=torch.float64)
    return tuple(
        torch.randn(x.shape, dtype=x.dtype) if x.is_floating_point() else torch.randint(top, x.shape) for x in examples
    )


def made(description, seed=0):
    torch.manual_seed(seed)
    return build(description, dtype=torch.float64), drawn(description)


@pytest.mark.parametrize("name", often(TINY, ("llama", "gpt", "mpt", "qwen3-30b-a3b", "t5", "vit")))
def test_tiny_model_in_parallel_is_the_single_device_model(name):
    model, args = made(TINY[name])
    report = verify(model, args, mesh={"dp": 2, "tp": 2}, recipe="dp:zero3,tp:tp+sp")
    assert report.passed, str(report)


@pytest.mark.parametrize("name", TINY)
def test_a_new_model_knows_nothing(name):
    description = TINY[name]
    choices = CLASSES if name == "vit" else SMALL["vocab"]
    model, args = made(description)
    assert model(*args).item() == pytest.approx(math.log(choices), rel=0.1)


def test_a_causal_model_sees_no_later_token():
    for name in ("llama", "gpt", "mpt"):
        model, (tokens, _) = made(TINY[name])
        logits = []
        model.head.register_forward_hook(lambda m, i, y, seen=logits: seen.append(y))
        later = tokens.clone()
        later[:, 8:] = (later[:, 8:] + 1) % SMALL["vocab"]
        model(tokens, tokens), model(later, tokens)
        assert torch.allclose(logits[0][:, :8], logits[1][:, :8])
        assert not torch.allclose(logits[0][:, 8:], logits[1][:, 8:])


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_attention_in_parts_is_the_fused_one(family):
    fused = Transformer.from_dimensions(family, **SMALL, kv_heads=2)
    parts = Transformer.from_dimensions(family, **SMALL, kv_heads=2, fused_attention=False)
    (one, args), (other, _) = made(fused), made(parts)
    other.load_state_dict(one.state_dict())
    assert torch.allclose(one(*args), other(*args), rtol=1e-12)


def test_relative_attention_in_parts_is_the_fused_one():
    sizes = {**BLOCKS, "encoder_layers": 2, "vocab": 64, **T5}
    (one, args), (other, _) = (made(EncoderDecoder(**sizes, fused_attention=kind)) for kind in (True, False))
    other.load_state_dict(one.state_dict())
    assert torch.allclose(one(*args), other(*args), rtol=1e-12)


def test_alibi_adds_slope_times_distance():
    description = TINY["mpt"]
    slopes = alibi_slopes(4, torch.device("cpu"))
    assert slopes.flatten().tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    q, k, v = torch.randn(3, 1, 4, 300, 8, dtype=torch.float64)
    positions = positions_of(description, torch.empty(1, 300, 32, dtype=torch.float64))
    found = Attention(description, causal=True)._fused(q, k, v, positions)
    distance = torch.arange(300) - torch.arange(300).unsqueeze(-1)
    mask = (slopes * distance).double().masked_fill(distance > 0, float("-inf"))
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_places_of_alibi_are_exact_in_bfloat16():
    columns = positions_of(TINY["mpt"], torch.empty(1, 40_000, 32, dtype=torch.bfloat16)).alibi[1]
    assert torch.equal(columns.long().sum(-1), torch.arange(40_000))


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = positions_of(TINY["llama"], torch.empty(1, 16, 32, dtype=torch.float64)).rotary
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 16, 8) for _ in range(2))
    scores = rotate(q, *rotary) @ rotate(k, *rotary).transpose(-1, -2)
    assert torch.allclose(scores[0, 0, 3, 1], scores[0, 0, 12, 10], rtol=1e-6)
    assert not torch.allclose(scores[0, 0, 3, 1], scores[0, 0, 12, 9])


def test_latent_attention_is_that_of_heads_with_all_their_keys():
    """Equations 9 to 19 of arXiv 2405.04434, for one query at a time."""
    torch.manual_seed(0)
    latent, x = LatentAttention(TINY["deepseek"], causal=True).double(), torch.randn(2, 6, 32, dtype=torch.float64)
    rotary = positions_of(TINY["deepseek"], x).rotary
    low = latent.key_norm(latent.key_down(x))
    queries = latent.query_up(latent.query_norm(latent.query_down(x))).view(2, 6, 4, 12)
    turned = rotate(latent.key_turned(x), *rotary)
    heads = []
    for head in range(4):
        own = slice(8 * head, 8 * head + 8)
        keys, values = low @ latent.key.weight[own].T, low @ latent.value.weight[own].T
        plain, turns = queries[:, :, head, :8], rotate(queries[:, :, head, 8:], *rotary)
        scores = (plain @ keys.mT + turns @ turned.mT) / math.sqrt(12)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values)
    assert torch.allclose(latent(x, Positions(rotary=rotary)), latent.output(torch.cat(heads, -1)))


@pytest.mark.parametrize("causal", [True, False])
def test_relative_buckets_are_those_of_t5(causal):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional=not causal)
    assert torch.equal(relative_bucket(distance, causal=causal), theirs)


def test_fused_projections_compute_the_same():
    apart = Attention(TINY["llama"], causal=True)
    fused = Attention(TINY["llama, fused"], causal=True)
    rows = [x.weight.unflatten(0, (2, -1)) for x in (apart.query, apart.key, apart.value)]
    fused.query_key_value.weight = torch.nn.Parameter(torch.cat(rows, dim=1).flatten(0, 1))
    fused.output = apart.output
    x = torch.randn(2, 16, 32)
    assert torch.allclose(apart(x, Positions()), fused(x, Positions()), atol=1e-6)


def by_hand(experts, x):
    """Every token in turn, through each of its experts."""
    result = torch.zeros_like(x)
    for place in itertools.product(*map(range, x.shape[:2])):
        best = experts.router(x[place]).topk(experts.per_token)
        for weight, e in zip(best.values.softmax(-1), best.indices.tolist(), strict=True):
            gate, up = (
                x[place] @ matrix[e] + (0 if bias is None else bias[e])
                for matrix, bias in ((experts.gate, experts.gate_bias), (experts.up, experts.up_bias))
            )
            y = (F.silu(gate) * up) @ experts.down[e]
            result[place] += weight * (y if experts.down_bias is None else y + experts.down_bias[e])
    return result


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_every_token_visits_all_experts_that_it_chooses(per_token, has_bias):
    torch.manual_seed(0)
    sizes = {**SMALL, "experts": 4, "experts_per_token": per_token, "bias": has_bias}
    experts = ExpertLayer(Transformer.from_dimensions("llama", **sizes)).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 10, 32, dtype=torch.float64)
    assert torch.allclose(experts(x), by_hand(experts, x))


def test_a_token_keeps_all_its_experts_where_all_tokens_choose_the_same():
    """A layer with a capacity would drop half of these."""
    experts = ExpertLayer(TINY["experts"]).double()
    torch.nn.init.zeros_(experts.router.weight)
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    assert torch.allclose(experts(x.expand(1, 10, 32)), experts(x).expand(1, 10, 32))


def test_experts_in_other_formats_without_transformers_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(AutoparError, match=r"Experts in float64 need .*pip install 'autopar\[transformers\]'"):
        ExpertLayer(TINY["experts"]).double()(torch.randn(1, 2, 32, dtype=torch.float64))
    found = ExpertLayer(TINY["experts"]).bfloat16()(torch.randn(1, 2, 32, dtype=torch.bfloat16))
    assert found.shape == (1, 2, 32)


@functools.cache
def subject_of(name):
    return Subject.of(*made(TINY[name]))


@pytest.mark.parametrize("mesh", ["a=2", "a=4", "a=2,b=2", "pp=2,a=2"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss", "deepseek"])
def test_random_plans_of_tiny_mixtures_equal_one_device(name, mesh):
    """The blocks of the presets, at a few numbers each; random plans draw exchanges of rows along some axes."""
    subject = subject_of(name)
    graph, fingerprint = subject.prepared.analysis.graph, subject.prepared.captured.fingerprint
    for seed in range(2):
        report = subject.compare(random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=fingerprint))
        assert report.passed, report


def test_example_inputs_and_their_errors():
    gpt = TINY["gpt"]
    assert [x.shape for x in example_inputs(gpt, 2, 8)] == [(2, 8)] * 2
    assert all(x.is_meta and x.dtype == torch.int64 for x in example_inputs(gpt, 2, 8))
    assert len(example_inputs(TINY["t5"], 1)) == 3
    assert example_inputs(TINY["vit"], 2)[0].shape == (2, 3, 12, 12)
    assert example_inputs(TINY["llama"], 1, 64)[0].shape == (1, 64)  # rotary positions have no end
    with pytest.raises(AutoparError, match="A batch of 0 is less than 1"):
        example_inputs(gpt, 0, 8)
    with pytest.raises(AutoparError, match="A sequence of -2 tokens is less than 1"):
        example_inputs(gpt, 1, -2)
    with pytest.raises(AutoparError, match="17 tokens is longer than the 16 positions"):
        example_inputs(gpt, 1, 17)
    with pytest.raises(AutoparError, match="is a sequence of 10, not 4"):
        example_inputs(TINY["vit"], 1, 4)


def test_fewer_layers():
    assert with_layers(TINY["t5"], 1).encoder_layers == 1
    assert len(build(TINY["gpt"], layers=1).layers) == 1
    assert len(build(TINY["gpt"], layers=9).layers) == 2
    with pytest.raises(AutoparError, match="at least 1 layer, not 0"):
        build(TINY["gpt"], layers=0)


def test_dropout_is_there_where_it_is_asked_for():
    for fused in (True, False):
        description = Transformer.from_dimensions("gpt", **SMALL, dropout=0.5, fused_attention=fused)
        model, args = made(description)
        assert model(*args) != model(*args)
        model.eval()
        assert model(*args) == model(*args)
