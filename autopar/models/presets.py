"""Models that the literature quotes, each with where its sizes are printed.

Vocabularies that no power of two divides are padded to a multiple of 128, as those who train these
models do: 50257 of GPT-2's tokenizer to 50304, 30522 of BERT's to 30592.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import AutoparError
from autopar.models.description import (
    LLAMA,
    Description,
    EncoderDecoder,
    Latent,
    Transformer,
    VisionTransformer,
    padded,
)


@dataclass(frozen=True)
class Preset:
    """A model with a name.

    Attributes:
        name: as users write it.
        description: its sizes.
        parameters: as its source, or those who publish its weights, count them.
        source: paper and table, or configuration file.
    """

    name: str
    description: Description
    parameters: float
    source: str

    def __str__(self) -> str:
        return self.name


def _llama3(hidden: int, layers: int, heads: int, ffn: int) -> Transformer:
    return Transformer(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, max_positions=8192, **LLAMA
    )


def _gpt(hidden: int, layers: int, heads: int, max_positions: int) -> Transformer:
    return Transformer(
        hidden=hidden, layers=layers, heads=heads, ffn=4 * hidden, vocab=padded(50257), max_positions=max_positions
    )


def _gpt_oss(layers: int, experts: int) -> Transformer:
    return Transformer(
        hidden=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        max_positions=131072,
        experts=experts,
        experts_per_token=4,
        **LLAMA | {"bias": True},
    )


_LLAMA3 = "The Llama 3 Herd of Models, arXiv 2407.21783, table 3; vocabulary of its config.json"
_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2"
_GPT_OSS = "arXiv 2508.10925, table 1; openai"

_ROWS = (
    Preset("gpt2", _gpt(768, 12, 12, 1024), 124e6, f"{_GPT2} (whose 117M is 124M in the code)"),
    Preset("gpt2-xl", _gpt(1600, 48, 25, 1024), 1558e6, f"{_GPT2} (whose 1542M is 1558M in the code)"),
    # Its layers alternate between dense and sparse attention; here all are dense.
    Preset("gpt3-175b", _gpt(12288, 96, 96, 2048), 175e9, "arXiv 2005.14165, table 2.1"),
    Preset("llama3-8b", _llama3(4096, 32, 32, 14336), 8.03e9, _LLAMA3),
    Preset("llama3-70b", _llama3(8192, 80, 64, 28672), 70.6e9, _LLAMA3),
    Preset("llama3-405b", _llama3(16384, 126, 128, 53248), 405e9, _LLAMA3),
    Preset(
        "mixtral-8x7b",
        Transformer(
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=32000,
            max_positions=32768,
            experts=8,
            experts_per_token=2,
            **LLAMA,
        ),
        46.7e9,
        "arXiv 2401.04088, table 1",
    ),
    Preset(
        "qwen3-30b-a3b",
        Transformer(
            hidden=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            ffn=768,
            vocab=151936,
            max_positions=40960,
            experts=128,
            experts_per_token=8,
            norms_heads=True,
            **LLAMA,
        ),
        30.5e9,
        "arXiv 2505.09388, table 2; Qwen/Qwen3-30B-A3B, config.json",
    ),
    # Every second layer of these attends to the last 128 tokens alone; here all attend to all. Left out are a number a
    # head that takes part in the softmax (a sink), and what clamps the gate.
    Preset("gpt-oss-20b", _gpt_oss(24, 32), 20.9e9, f"{_GPT_OSS}/gpt-oss-20b, config.json"),
    Preset("gpt-oss-120b", _gpt_oss(36, 128), 116.8e9, f"{_GPT_OSS}/gpt-oss-120b, config.json"),
    # Without its module that predicts one more token (14 billion). A token visits the 8 experts with the
    # largest shares, where the router of the original picks them from the best 4 of 8 groups.
    Preset(
        "deepseek-v3",
        Transformer(
            hidden=7168,
            layers=58,
            heads=128,
            head_dim=128,
            ffn=2048,
            vocab=129280,
            max_positions=163840,
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            dense_layers=3,
            dense_ffn=18432,
            latent=Latent(queries=1536, keys=512, rotary=64),
            **LLAMA,
        ),
        671e9,
        "arXiv 2412.19437, section 4.2; deepseek-ai/DeepSeek-V3, config.json",
    ),
    # Without its pooler, its token types and the small product before its head: 2.1 of 336 million.
    Preset(
        "bert-large",
        Transformer(
            hidden=1024,
            layers=24,
            heads=16,
            ffn=4096,
            vocab=padded(30522),
            max_positions=512,
            causal=False,
            post_norm=True,
        ),
        336e6,
        "arXiv 1810.04805, section 3 (whose 340M is 336M in the code)",
    ),
    Preset(
        "t5-11b",
        EncoderDecoder(
            hidden=1024,
            layers=24,
            encoder_layers=24,
            heads=128,
            head_dim=128,
            ffn=65536,
            vocab=32128,
            activation="relu",
            norm="rms",
            bias=False,
            fused_attention=False,
        ),
        11.3e9,
        "arXiv 1910.10683, section 3.7; google-t5/t5-11b, config.json",
    ),
    Preset(
        "vit-h",
        VisionTransformer(hidden=1280, layers=32, heads=16, ffn=5120, image=224, patch=14, classes=1000),
        632e6,
        "arXiv 2010.11929, table 1; patches of 14",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({row.name: row for row in _ROWS})


def find_preset(name: str) -> Preset:
    """The preset of this name. Raises AutoparError with the nearest names where there is none."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise AutoparError(f"There is no model {name!r}; {hint}Known are {', '.join(PRESETS)}.")
