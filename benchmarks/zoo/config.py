"""The configuration of a small model of an architecture of `transformers`, from its default one.

`shrink` names the sizes that make a model small and leaves all else to the configuration class: two layers,
hidden size 64, ids below 128, images of `(3, 32, 32)`. What the names of sizes do not tell is how they hang
together, so there are five degrees: where a small configuration does not hold together, a trimmed one shortens
the lists with an entry for each layer too, a shallow one keeps the widths of the default and has two layers, an
own one is the default as it is, and a filled one is a trimmed one with the sizes that the default leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from benchmarks.zoo.models import VOCAB, without_dropout
from benchmarks.zoo.overrides import OVERRIDES, Entries

IMAGE, MEL, CLASSES, LAYERS = 32, 16, 2, 2
FIRST_WORD, FIRST_SPECIAL = 10, 64  # ids of words lie between these two, special ones above
SMALL, TRIMMED, SHALLOW, OWN, FILLED = DEGREES = ("small", "trimmed", "shallow", "own", "filled")
NARROW = (SMALL, TRIMMED, FILLED)

# (what a name is, the size it may have at most); the first that matches counts. What repeats:
REPEATS: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_labels", 2),
    (r".*vocab_size(_per_layer_input)?", VOCAB),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k|topk", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers", 1),
    (r"n_(routed|shared)_experts|(moe_)?num(_local)?_experts", 4),
    (r"num_feat_extract_layers", 16),
    (r"num_residual_layers|num_nextn_predict_layers", 1),
    (r".*_layers|layers|n_layers?|depth|num_blocks|num_kv_shared_layers|depths", 2),
    (r".*(n_positions|position.*embeddings|source_positions|target_positions|max_seq_len)", 128),
    (r"(max_)?2d_position_embeddings|relative_attention_max_distance|max_length|context_length", 64),
    (r"sliding_window|attention_window|local_attention|block_size|chunk_size|attention_chunk_size", 8),
    (r"image_embedding_size", IMAGE // 8),
    (r"image_size|img_size|pretrain_image_size|crop_size", IMAGE),
    (r"num_frames|frames_per_clip", 4),
    (r"num_codebooks|n_codebooks|num_quantizers", 2),
)
# and what is wide:
WIDE: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|.*num_kv_heads|index_n_heads|.*num_key_heads", 2),
    (r".*heads|n_head", 4),
    (r"qk_nope_head_dim|v_head_dim|index_head_dim|.*head_dim|d_kv|d_head|dim_head", 16),
    (r"kv_lora_rank|q_lora_rank|codebook_dim|latent_dim", 16),
    (r"qk_rope_head_dim|rotary_dim|index_topk", 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feedforward|linear_units).*", 128),
    (r"d_ff|mlp_dim|d_inner|n_inner|moe_intermediate.*", 128),
    (r".*(hidden_size|hidden_dim|projection_dim|embedding_size|embed_dim|proj_dim)(_.*)?", 64),
    (r"projector_(in|out)put_dim|vision_output_dim|projection_hidden_dim", 64),
    (r".*feature_size|d_model|n_embd|dim|emb_dim|proj.*_size|out_hidden_size|embedding_dim|lru_width|.*latents", 64),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_projection_input_dim", MEL),
    (r"codebook_size|num_embeddings|num_queries|num_query_tokens|num_filters|.*codevectors.*", 16),
    (r".*(channels|filters)|stem_width|upsample_groups|groups_width", 32),
    (r"num_groups|n_window", 8),
    (r"mamba_d_state|.*state_size|mamba_dt_rank|time_step_rank", 8),
    (r"window_size|num_conv_pos_embeddings", 4),
    (r"conv_depthwise_kernel_size|conv_kernel_size", 5),
)
# What a default leaves open, and the model needs:
OPEN: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
WIDTHS = re.compile(r"hidden_sizes|embed_dims?|.*channels|.*hidden_sizes|conv_dim|tdnn_dim|key_dim")
ONES = re.compile(r"depths|stage_numb_of_layers|stage_num_blocks|num_block_repeats|.*_per_stack")
OFF = (
    "mask_time_prob",
    "mask_feature_prob",
    "layerdrop",
    "apply_spec_augment",
    "use_cache",
    "output_router_logits",
    "jitter_noise",
    "router_jitter_noise",
    "embd_pdrop",
    "attn_pdrop",
    "resid_pdrop",
)
SPECIAL = re.compile(r".*(token_id|token_index|_id)s?")

# In place of a backbone that another package would build.
RESNET: Mapping[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}

# Attention that has as many key as query heads, whatever its configuration says.
UNGROUPED = ("esmc", "nemotron3_diarization_audio", "nemotron3_5_transcribe_asr_audio")


def shrink(name: str, degree: str = SMALL) -> Any:
    """The configuration of one architecture. Raises what its class does where sizes do not fit."""
    default = CONFIG_MAPPING[name]()
    changes = _changes(default, degree, {})
    return without_dropout(type(default)(**_merged(changes, OVERRIDES.get(name, {}))))


def _merged(changes: Entries, others: Entries) -> dict[str, Any]:
    """`changes` with `others` in their place, part by part."""
    merged = dict(changes)
    for key, value in others.items():
        parts = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if parts else value
    return merged


def _changes(config: PreTrainedConfig, degree: str, ids: dict[int, int]) -> dict[str, Any]:
    """The entries to change; `ids` maps the special ids met so far to small ones."""
    found = {key: _entry(key, value, config, degree, ids) for key, value in config.to_dict().items()}
    return {key: value for key, value in found.items() if value is not None}


def _entry(key: str, value: Any, config: PreTrainedConfig, degree: str, ids: dict[int, int]) -> Any:
    """The new value of one entry, None to leave it to the configuration class."""
    part = vars(config).get(key)
    if isinstance(part, PreTrainedConfig):
        return _part(part, degree, ids)
    if key in OFF and value:
        return type(value)(0)
    if degree == OWN:
        return None
    if value is None and degree == FILLED:
        return OPEN.get(key)
    if key == "rope_parameters" and "rope_theta" in (value or {}) and degree in NARROW:
        return {**value, "mrope_section": _sections(value.get("partial_rotary_factor", 1.0))}
    if key == "per_layer_config" and value:
        return _layers(value, config, degree, ids)
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)) or not value:
        return None
    return _size(key, value, config, degree, ids)


def _part(part: PreTrainedConfig, degree: str, ids: dict[int, int]) -> dict[str, Any]:
    if part.model_type == "timm_backbone":
        return {**RESNET, "out_indices": getattr(part, "out_indices", None) or [4]}
    named = {"model_type": part.model_type} if part.model_type else {}
    return {**named, **_changes(part, degree, ids)}


def _layers(
    layers: Mapping[Any, Mapping[str, Any]], config: PreTrainedConfig, degree: str, ids: dict[int, int]
) -> dict[Any, dict[str, Any]]:
    """What the layers that are left have each for itself."""
    left = {i: entries for i, entries in layers.items() if int(i) < LAYERS}
    return {
        i: {k: v if (new := _entry(k, v, config, degree, ids)) is None else new for k, v in entries.items()}
        for i, entries in left.items()
    }


def _size(key: str, value: Any, config: PreTrainedConfig, degree: str, ids: dict[int, int]) -> Any:
    if key == "out_indices" and hasattr(config, "depths"):
        return list(value)  # stages that the whole takes of a backbone
    if degree in (TRIMMED, FILLED) and isinstance(value, (list, tuple)) and len(value) == _depth(config):
        return (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]  # one of each kind
    if SPECIAL.fullmatch(key):
        return _small_ids(value, ids)
    if isinstance(value, (list, tuple)):
        return _small_list(key, list(value), degree)
    if key == "num_key_value_heads" and degree in NARROW:
        return _key_value_heads(config)
    if key == "embed_dim" and isinstance(getattr(config, "depths", None), (list, tuple)):
        return 16 if degree in NARROW else None  # doubles from stage to stage
    table = REPEATS + WIDE if degree in NARROW else REPEATS
    return next((min(value, most) for name, most in table if re.fullmatch(name, key)), None)


def _depth(config: PreTrainedConfig) -> int:
    names = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
    return next((n for key in names if isinstance(n := vars(config).get(key), int)), 0)


def _key_value_heads(config: PreTrainedConfig) -> int:
    every = "kv_lora_rank" in config.to_dict() or config.model_type in UNGROUPED
    return 4 if every else 2


def _sections(rotated: float) -> list[int]:
    """Half of the rotated part of a head of 16, shared by time, height and width."""
    half = int(16 * rotated) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _small_ids(value: Any, ids: dict[int, int]) -> Any:
    if isinstance(value, int):
        return ids.setdefault(value, FIRST_SPECIAL + len(ids)) if value >= FIRST_WORD else None
    return [ids.setdefault(i, FIRST_SPECIAL + len(ids)) if i >= FIRST_WORD else i for i in value]


def _small_list(key: str, values: list[Any], degree: str) -> list[Any] | None:
    """Widths keep their ratios, in multiples of 8; of layers one is left, of heads two."""
    if not all(isinstance(v, int) for v in values):
        return None
    if degree in NARROW and WIDTHS.fullmatch(key):
        return [max(8, round(v * 64 / max(values) / 8) * 8) if v > 8 else v for v in values]
    if ONES.fullmatch(key):
        return [1] * len(values)
    if key == "image_size":
        return [min(v, IMAGE) for v in values]
    return [min(v, 2) for v in values] if degree in NARROW and key.endswith("heads") else None
