"""Entries of configurations that the names of sizes do not tell: what agrees with another, or has no default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.zoo.models import VOCAB

Entries = Mapping[str, Any]  # of a configuration; those of a part of it stand in a mapping

SHALLOW_SWIN: Entries = {"depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4, "out_indices": [2]}
LAGGED: Entries = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
# each stage takes what the one before gives
HGNET: Entries = {
    "hidden_sizes": [16, 32, 64, 64],
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 16, 32, 64],
    "stage_mid_channels": [8, 8, 16, 16],
    "stage_out_channels": [16, 32, 64, 64],
}
ROPE: Entries = {"rope_type": "default", "rope_theta": 10000.0}
COMPASS: Entries = {"rope_parameters": {"full_attention": ROPE}}
HALF_HYBRID: Entries = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
# the last two layers reuse keys and values of the first two
SHARED_KEYS: Entries = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": [128] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 16,
    "hidden_size_per_layer_input": 16,
}
FEW_SAMPLES: Entries = {"downsampling_ratios": [2] * 6, "depths": [1] * 7}
SAM_VISION: Entries = {"output_channels": 64, "num_pos_feats": 32, "global_attn_indexes": [1]}

OVERRIDES: Mapping[str, Entries] = {
    # a window is no wider than the grid of its stage
    **{key: SHALLOW_SWIN for key in ("swin", "swinv2", "donut-swin")},
    # a threshold on differences of scores; at 0 the router keeps the scores that equal their own maximum, and rounding
    # may leave none
    "phimoe": {"router_jitter_noise": 0.01},
    "mobilebert": {"intra_bottleneck_size": 64},
    "xmod": {"default_language": "en_XX"},
    **{key: LAGGED for key in ("autoformer", "informer", "time_series_transformer")},
    "longt5": {"local_radius": 4, "global_block_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
        "num_key_value_heads": 2,
    },
    "nemotron_h": {"n_groups": 2},
    "longcat_flash": {"qk_head_dim": 32, "zero_expert_num": 2, "num_key_value_heads": 4},
    "zamba": HALF_HYBRID,
    "zamba2": {**HALF_HYBRID, "mamba_headdim": 32, "hybrid_layer_ids": [1, 3]},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 64, "pad_token_id": 0},
    "gemma3n_text": SHARED_KEYS,
    "emu3": {"vocabulary_map": {"<image>": 70, "<|extra_200|>": 71, "<|visual token 000000|>": 80}},
    "chameleon": {"vocabulary_map": {"<image>": 70, "IMGIMGAZ": 80}},
    "cohere_compass_text": COMPASS,
    "cohere_compass": {"text_config": COMPASS},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "glm5_next_text": {"index_kpool": 4},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    # an image of 32 has a grid of 4 patches; two by two are merged, two by two of those make a window
    **{key: {"window_size": 32} for key in ("qwen2_5_vl_vision", "exaone4_5_vision")},
    "sam": {"vision_config": SAM_VISION},
    "d_fine": {"backbone_config": HGNET, "encoder_in_channels": [32, 64, 64]},
    "pp_doclayout_v3": {"backbone_config": HGNET, "encoder_in_channels": [32, 64, 64], "x4_feat_dim": 16},
    "pp_ocrv5_server_rec": {"backbone_config": HGNET, "image_size": 128},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "instructblip": {"image_token_index": 70},
    # a row of ids for each codebook of each sample
    **{key: {"decoder": {"num_codebooks": 1}} for key in ("musicgen", "musicgen_melody")},
    "perceiver": {"max_position_embeddings": 16, "d_latents": 64, "num_self_attends_per_block": 2},
    "clap": {
        "audio_config": {
            "spec_size": 64,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 128,
            "window_size": 2,
            "num_attention_heads": [2] * 4,
        }
    },
    "clvp": {"decoder_config": {"feature_size": 16}},
    "kosmos-2": {"latent_query_num": 4},
    "seggpt": {
        "image_size": [64, 32],
        "pretrain_image_size": 32,
        "num_hidden_layers": 5,
        "merge_index": 0,
        "intermediate_hidden_state_indices": [1, 2, 3, 4],
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "oneformer": {"is_training": False, "task_seq_len": 16},
    "vits": {"noise_scale": 0.0, "noise_scale_duration": 0.0, "upsample_initial_channel": 32},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}, "audio_config": {"num_stacked_frames": 4}},
    "vibevoice_acoustic_tokenizer_decoder": FEW_SAMPLES,
    "xcodec": {"semantic_model_config": {"attention_dropout": 0.0}},
}
