"""Twenty-six small `transformers` architectures with random weights, for parity tests.

Each is built from its configuration class, without any download: two layers, hidden size 64, no
dropout, no cache. `build` wraps the model in a `Loss`, whose `forward(*inputs)` is the scalar loss,
in training mode. Inputs are of batch 4 and sequence 16; an image is of shape `(3, 32, 32)`, audio
of shape `(16, 64)`: mel bins by frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, SEQ, VOCAB, CLASSES, HIDDEN = 4, 16, 128, 2, 64
NOISE = 0.1  # standard deviation of what `perturb_constants` adds

Inputs = dict[str, Tensor]  # keyword of the model's forward -> example tensor

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    **LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
}


class Loss(nn.Module):
    """A model as a function from positional inputs to its scalar loss.

    The model's parameters keep their names behind the prefix `model.`. A model that gives no loss
    gets the mean square of its last hidden state.
    """

    def __init__(self, model: nn.Module, *, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *args: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.inputs, args, strict=True)))
        if "loss" in output:
            return output.loss
        return output.last_hidden_state.square().mean()


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ))


def language(dtype: torch.dtype) -> Inputs:
    """Ids and labels of shape `(batch, seq)`, drawn apart: export merges inputs that are one."""
    return {"input_ids": tokens(), "labels": tokens()}


def ids_only(dtype: torch.dtype) -> Inputs:
    return {"input_ids": tokens()}


def image(dtype: torch.dtype) -> Inputs:
    """Pixels of shape `(batch, 3, 32, 32)`, and one class per image."""
    pixels = torch.randn(BATCH, 3, 32, 32, dtype=dtype)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (BATCH,))}


def audio(dtype: torch.dtype) -> Inputs:
    """Log-mel features of shape `(batch, mel, frames)`, and ids of shape `(batch, seq)`."""
    return {"input_features": torch.randn(BATCH, 16, 64, dtype=dtype), "labels": tokens()}


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo.

    Attributes:
        name: what `build` calls it.
        config: name of its configuration class in `transformers`.
        model: name of its model class in `transformers`.
        sizes: arguments of the configuration class.
        inputs: draws the keyword inputs of the model from torch's generator.
        dtype: the widest dtype of weights in which all its ops run; many cast to float32 inside.
    """

    name: str
    config: str
    model: str
    sizes: Mapping[str, Any] = field(hash=False)
    inputs: Callable[[torch.dtype], Inputs] = language
    dtype: torch.dtype = torch.float64


ARCHITECTURES = (
    Architecture("llama", "LlamaConfig", "LlamaForCausalLM", GROUPED),
    Architecture("mistral", "MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 16}),
    Architecture("qwen2", "Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    Architecture("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    Architecture("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {**GROUPED, "head_dim": 16}),
    Architecture("phi3", "Phi3Config", "Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0, "eos_token_id": 2}),
    Architecture(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": HIDDEN,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": VOCAB,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    Architecture("gptneox", "GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT),
    Architecture(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        {
            **LAYERS,
            "hidden_size": HIDDEN,
            "ffn_dim": 2 * HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
        },
    ),
    Architecture(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    ),
    Architecture(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        {**LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": 2 * HIDDEN, "vocab_size": VOCAB},
    ),
    # grouped_mm, which runs the experts, takes no float64.
    Architecture(
        "mixtral", "MixtralConfig", "MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, dtype=torch.float32
    ),
    Architecture(
        "qwen3moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": HIDDEN, "head_dim": 16},
        dtype=torch.float32,
    ),
    Architecture(
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCAB},
    ),
    Architecture("bert", "BertConfig", "BertForMaskedLM", TEXT),
    Architecture("roberta", "RobertaConfig", "RobertaForMaskedLM", TEXT),
    Architecture("deberta", "DebertaV2Config", "DebertaV2ForMaskedLM", TEXT),
    Architecture(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**TEXT, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4},
    ),
    Architecture(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 2 * HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 0,
        },
    ),
    Architecture(
        "bart", "BartConfig", "BartForConditionalGeneration", {**ENCODER_DECODER, "max_position_embeddings": 64}
    ),
    Architecture(
        "vit",
        "ViTConfig",
        "ViTForImageClassification",
        {**LAYERS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "image_size": 32, "patch_size": 8},
        image,
    ),
    Architecture(
        "swin",
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        image,
    ),
    Architecture(
        "convnext",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        image,
    ),
    Architecture(
        "resnet",
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        image,
    ),
    Architecture(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "num_mel_bins": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        audio,
    ),
    Architecture(
        "clip_text", "CLIPTextConfig", "CLIPTextModel", {**TEXT, "bos_token_id": 126, "eos_token_id": 127}, ids_only
    ),
)

NAMES = tuple(row.name for row in ARCHITECTURES)


def architecture(name: str) -> Architecture:
    """The row of that name. Raises ValueError, with the names there are, where there is none."""
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise ValueError(f"no architecture {name!r} in the zoo; there are {', '.join(NAMES)}")


def without_dropout(config: Any) -> Any:
    """`config` with every probability of dropping an element, path or layer set to 0, in place."""
    return with_dropout(config, 0.0)


def with_dropout(config: Any, p: float) -> Any:
    """`config` with every probability of dropping an element or path set to `p`, and that of a layer to 0, in place.

    Whether a layer runs is decided in Python, which cannot be captured.
    """
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0 if "layer" in key else p)
    return config


@torch.no_grad()
def perturb_constants(module: nn.Module) -> None:
    """Add noise to parameters born constant, in place.

    A bias of zeros added once per rank instead of once, or a norm's weight of ones taken from the
    wrong shard, would not change the loss.
    """
    for parameter in module.parameters():
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            parameter.add_(NOISE * torch.randn_like(parameter))


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype | None = None, dropout: float = 0.0
) -> tuple[Loss, tuple[Tensor, ...]]:
    """Build one architecture with random weights, and an example batch for it.

    Args:
        name: a row of `ARCHITECTURES`.
        seed: seed of weights and inputs; torch's global generator is left as it was.
        dtype: type of weights and floating inputs; None for the widest that the architecture runs in.
        dropout: probability of dropping, wherever the architecture drops.

    Returns:
        The module, in training mode, and positional inputs: `module(*inputs)` is the scalar loss.
    """
    row = architecture(name)
    dtype = dtype or row.dtype
    config = with_dropout(getattr(transformers, row.config)(**row.sizes), dropout)
    config.use_cache = False
    if row.inputs is image:
        config.num_labels = CLASSES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, row.model)(config).to(dtype)
        perturb_constants(model)
        inputs = row.inputs(dtype)
    return Loss(model.train(), inputs=tuple(inputs)), tuple(inputs.values())
