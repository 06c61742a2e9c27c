"""What the built models compute: against the papers' formulas, against each other, and in parallel."""

import math

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.models import EncoderDecoder, Transformer, VisionTransformer, build, example_inputs, with_layers
from autopar.models.blocks import Attention, ExpertLayer, Positions, rotate
from autopar.models.build import alibi_slopes, positions_of, relative_bucket
from autopar.proof.verify import verify
from tests.support.tables import often

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 64, "max_positions": 16}
T5 = {"norm": "rms", "bias": False, "activation": "relu"}
BLOCKS = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 64}
CLASSES = 8

TINY = {
    "llama": Transformer.from_dimensions("llama", **SMALL, kv_heads=2),
    "llama, fused": Transformer.from_dimensions("llama", **SMALL, kv_heads=2, fused_projections=True),
    "gpt": Transformer.from_dimensions("gpt", **SMALL),
    "llm-foundry": Transformer.from_dimensions("llm-foundry", **SMALL),
    "mpt": Transformer.from_dimensions("mpt", **SMALL),
    "bert": Transformer.from_dimensions("bert", **SMALL),
    "experts": Transformer.from_dimensions("llama", **SMALL, experts=4, experts_per_token=2),
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


@pytest.mark.parametrize("name", often(TINY, ("llama", "gpt", "mpt", "experts", "t5", "vit")))
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
    """Every token in turn, as the words of `ExpertLayer` say it."""
    capacity = math.ceil(experts.per_token * x.shape[1] / experts.experts)
    result = torch.zeros_like(x)
    for b, sequence in enumerate(x):
        taken = [0] * experts.experts
        for s, token in enumerate(sequence):
            best = experts.router(token).topk(experts.per_token)
            for weight, e in zip(best.values.softmax(-1), best.indices.tolist(), strict=True):
                if taken[e] < capacity:
                    inner = F.silu(token @ experts.gate[e]) * (token @ experts.up[e])
                    result[b, s] += weight * (inner @ experts.down[e])
                taken[e] += 1
    return result


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_experts_take_the_first_tokens_that_choose_them(per_token):
    torch.manual_seed(0)
    description = Transformer.from_dimensions("llama", **SMALL, experts=4, experts_per_token=per_token)
    experts = ExpertLayer(description).double()
    x = torch.randn(3, 10, 32, dtype=torch.float64)
    assert torch.allclose(experts(x), by_hand(experts, x))


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
