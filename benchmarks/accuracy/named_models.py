"""What the names in a row tell where a table leaves it out, each with where it is printed.

Of sizes of models, the first pattern that a name matches decides. Sizes that a row has are kept, so that a shortened
model stays short. Configurations of runs stand in the files that the makers publish beside their tables; all that match
count, the last first, and count more than the row, whose layout may be a guess from another file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.models import Transformer
from autopar.models.description import LLAMA, Latent
from autopar.models.presets import PRESETS


def _preset(name: str) -> Transformer:
    found = PRESETS[name].description
    assert isinstance(found, Transformer), "these are decoders"
    return found


def _llama(hidden: int, layers: int, heads: int, ffn: int, vocab: int, **others: Any) -> Transformer:
    sizes: dict[str, Any] = {"max_positions": 8192, **LLAMA, **others}
    return Transformer(hidden=hidden, layers=layers, heads=heads, ffn=ffn, vocab=vocab, **sizes)


def _gpt(hidden: int, layers: int, heads: int, vocab: int = 50304) -> Transformer:
    return Transformer(hidden=hidden, layers=layers, heads=heads, ffn=4 * hidden, vocab=vocab, max_positions=2048)


_DEEPSEEK = _preset("deepseek-v3")
_QWEN3 = _preset("qwen3-30b-a3b")
_MIXTRAL = _preset("mixtral-8x7b")

NAMED: Mapping[str, Transformer] = MappingProxyType(
    {
        # arXiv 2412.19437, section 4.2; its module for one more token is left out.
        r"deepseek.?v3\b(?!.*\b16b)": _DEEPSEEK,
        # arXiv 2405.04434, section 3.1.2.
        r"deepseek.?v2\b": replace(
            _DEEPSEEK,
            hidden=5120,
            layers=59,
            ffn=1536,
            vocab=102400,
            experts=160,
            experts_per_token=6,
            shared_experts=2,
            dense_layers=1,
            dense_ffn=12288,
        ),
        # torchtitan, models/deepseek_v3 `16B` at b5bcd76, the sizes of DeepSeek-V2-Lite. It makes queries without a
        # narrow vector, which takes as many products as one of 1,300 numbers.
        r"deepseek.*\b16b": replace(
            _DEEPSEEK,
            hidden=2048,
            layers=26,
            heads=16,
            kv_heads=16,
            ffn=1408,
            vocab=102400,
            experts=64,
            experts_per_token=6,
            shared_experts=2,
            dense_layers=1,
            dense_ffn=10944,
            latent=Latent(queries=1300, keys=512, rotary=64),
        ),
        # arXiv 2507.20534, table 2; moonshotai/Kimi-K2-Base, config.json.
        r"kimi.?k2": replace(
            _DEEPSEEK, layers=60, heads=64, kv_heads=64, vocab=163840, experts=384, dense_layers=1, dense_ffn=18432
        ),
        r"gpt.?oss.?120b": _preset("gpt-oss-120b"),
        r"gpt.?oss.?20b": _preset("gpt-oss-20b"),
        # arXiv 2505.09388, table 2.
        r"qwen3.*235b": replace(_QWEN3, hidden=4096, layers=94, heads=64, ffn=1536),
        r"qwen3.*30b": _QWEN3,
        # mistralai/Mixtral-8x22B-v0.1, config.json.
        r"mixtral.*8x22b": replace(_MIXTRAL, hidden=6144, layers=56, heads=48, head_dim=128, ffn=16384, vocab=32768),
        r"mixtral": _MIXTRAL,
        # xai-org/grok-1, README: 64 layers, 48 heads, 8 experts of which a token visits 2.
        r"grok.?1": _llama(6144, 64, 48, 32768, 131072, kv_heads=8, head_dim=128, experts=8, experts_per_token=2),
        # meta-llama/Llama-4-Scout-17B-16E, config.json.
        r"llama.?4.*scout": _llama(
            5120, 48, 40, 8192, 202048, kv_heads=8, head_dim=128, experts=16, experts_per_token=1, shared_experts=1
        ),
        # meta-llama/Llama-4-Maverick-17B-128E, config.json: every second layer has experts.
        r"llama.?4.*maverick": _llama(
            5120,
            24,
            40,
            8192,
            202048,
            kv_heads=8,
            head_dim=128,
            experts=128,
            experts_per_token=1,
            shared_experts=1,
            dense_layers=24,
            dense_ffn=16384,
        ),
        r"llama.?3.*405b": _preset("llama3-405b"),
        r"llama.?3.*70b": _preset("llama3-70b"),
        r"llama.?3.*8b": _preset("llama3-8b"),
        # arXiv 2307.09288, table 1; config.json of meta-llama.
        r"llama.?2.*70b": _llama(8192, 80, 64, 28672, 32000, kv_heads=8),
        r"llama.?2.*13b": _llama(5120, 40, 40, 13824, 32000),
        r"llama.?2.*7b": _llama(4096, 32, 32, 11008, 32000),
        # arXiv 2005.14165, table 2.1, which others take for the same number of parameters.
        r"(gpt|modalities).*\b2\.7b": _gpt(2560, 32, 32),
        r"(gpt|modalities).*\b6\.7b": _gpt(4096, 32, 32),
        r"(gpt|modalities).*\b13b": _gpt(5120, 40, 40),
        r"gpt.*\b175b": _gpt(12288, 96, 96, vocab=51200),
    }
)

# "source | address | model | GPU | GPUs | precision | ZeRO stage" -> columns of a table, and what tables have no column
# for: "host_layers", layers whose saved activations lie on the host; "expert_overlap", whether rows go to experts and
# back beside the compute of another micro-batch; "graph", whether the whole step is one CUDA graph.
# Megatron-Bridge: containers 25.11, 26.02, 26.04 and 26.06 have its versions v0.2.0, v0.3.0, v0.4.2 and v0.5.1 with
# `scripts/performance/configs/*/*workload_base_configs.py`, and 26.08 has v0.6.0 with `perf_recipes`.
RECIPES: tuple[tuple[str, Mapping[str, str]], ...] = (
    # NeMo AutoModel at 36044ad, examples/llm_benchmark: `activation_checkpointing`, `ep_size` of the linked files.
    (r"automodel.*\| (deepseek|kimi|qwen3 moe|qwen2\.5 32b)", {"recompute": "full"}),
    (r"automodel.*\| gpt-oss 120b", {"ep": "64"}),
    (r"automodel.*\| gpt-oss 20b", {"ep": "8"}),
    # `recompute_modules`
    (r"bridge.* (25\.11|26\.\d+).*\| (deepseek ?v3|kimi)", {"recompute": "modules mla_up_proj"}),
    (r"bridge.* (25\.11|26\.\d+).*\| (deepseek ?v3|kimi).*\| h100", {"recompute": "modules mla_up_proj mlp"}),
    (r"bridge.* 25\.11.*\| deepseek ?v3.*\| gb300", {"recompute": "modules moe_act"}),
    (r"bridge.* 26\.04.*\| deepseek ?v3.*\| gb200.*fp8", {"recompute": "modules mlp"}),
    (r"bridge.* 26\.0[68].*\| deepseek ?v3.*\| gb300.*mxfp8", {"recompute": ""}),
    (r"bridge.*\| gpt oss 120b.*\| (gb200|b200|h100).*bf16", {"recompute": "modules layernorm moe_act"}),
    (r"bridge.* 25\.11.*\| gpt oss 120b.*\| h100", {"micro_batch": "1", "grad_accum": ""}),
    # `moe_a2a_overlap`, and full-iteration graphs with it
    (r"bridge.* 26\.0[68].*mxfp8", {"expert_overlap": "yes", "graph": "yes"}),
    (r"bridge.* (25\.11|26\.).*\| qwen3.235b.*\| h100", {"expert_overlap": "yes"}),
    (r"bridge.* (25\.11|26\.02).*\| qwen3.30b.*\| h100", {"expert_overlap": "yes"}),
    (r"bridge.* 25\.11.*\| (deepseek ?v3.*\| h100|qwen3.235b.*\| b200)", {"expert_overlap": "yes"}),
    (r"bridge.* 26\.02.*\| qwen3.235b.*\| b300", {"expert_overlap": "yes"}),
    (r"bridge.* 26\.04\.01.*\| deepseek ?v3.*\| b200", {"expert_overlap": "yes"}),
    # NeMo at 06c0e70, scripts/performance/recommended_model_configs/model_configs_gb200.csv.
    (r"(25\.07|25\.09).*\| llama3\.1.405b.*\| gb200.*fp8.*\| zero 3", {"host_layers": "95"}),
    # mlcommons/training_results_v4.1, v5.0, v5.1: every log of these runs with 8 sequences a step, on 8 H200 and on 32
    # H100, has `gradient_accumulation_steps` 2. NVIDIA's and Supermicro's file for 8 H200 is
    # config_DGXH200_1x8x2xtp1pp1cp2.sh, and QCT's config_D74H-7U.sh has the same; Dell's log of v5.1 has
    # tensor_model_parallel_size 2. With H100 every file of Dell and NVIDIA has tp=4, which leaves cp=2.
    (
        r"mlperf training (v4\.1.*g593|v5\.[01].*(dell|qct|quanta|supermicro)).*lora.*\| h200 sxm 141gb \| 8 \|",
        {"tp": "1", "cp": "2", "dp": "4", "micro_batch": "1", "grad_accum": "2"},
    ),
    (r"mlperf training v5\.1.*1xxe9680lx8h200", {"tp": "2", "cp": "1", "dp": "4"}),
    (
        r"mlperf training v4\.1.*4xxe9680x8h100",
        {"tp": "4", "cp": "2", "dp": "4", "micro_batch": "1", "grad_accum": "2"},
    ),
)

# Layers with a state space (Mamba) between those with attention, which none of our models has.
_STATE_SPACES = re.compile(r"nemotron.?(h\b|3|v3)|mamba|jamba")
_MIXTURE = re.compile(r"(\d+) experts top-(\d+)")


def has_state_spaces(name: str) -> bool:
    """Whether layers of the model keep a state instead of attending."""
    return bool(_STATE_SPACES.search(_plain(name)))


def recipe(text: Mapping[str, str]) -> dict[str, str]:
    """What the configuration that a row's names lead to tells, by columns."""
    names = ("source", "source_ref", "model", "gpu", "n_gpus", "precision")
    plain = _plain(" | ".join(text.get(name, "") for name in names) + f" | zero {text.get('zero_stage', '')}")
    found: dict[str, str] = {}
    for pattern, columns in RECIPES:
        if re.search(pattern, plain):
            found |= columns
    return found


def named_model(name: str) -> Transformer | None:
    """The model of this name; None where its sizes are not known."""
    plain = _plain(name)
    return next((model for pattern, model in NAMED.items() if re.search(pattern, plain)), None)


def mixture(name: str) -> tuple[int, int] | None:
    """The number of experts and of those that a token visits, where a name of another model tells both."""
    found = _MIXTURE.search(_plain(name))
    return (int(found[1]), int(found[2])) if found else None


def sizes_of(model: Transformer) -> Iterator[tuple[str, str]]:
    """The columns of a table that a model fills, and their texts."""
    layers = model.layers + model.dense_layers
    ffn = model.dense_ffn if model.dense_layers else model.ffn
    values = (model.hidden, layers, model.heads, model.kv_heads, ffn, model.vocab)
    yield from zip(("hidden", "layers", "heads", "kv_heads", "ffn", "vocab"), map(str, values), strict=True)


def _plain(name: str) -> str:
    return name.lower().replace("_", " ")
