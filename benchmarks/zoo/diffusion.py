"""Small diffusion blocks of `diffusers` with random weights; only where it is installed.

Each row gives the sizes of a model's constructor and draws its inputs; nothing is downloaded. Batch 4, latents
of `(channels, 8, 8)` or `(channels, 16, 16)`, conditions of 16 tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.models import BATCH, SEQ, perturb_constants
from benchmarks.zoo.small import Small, Step

PREFIX = "diffusers:"
WIDTH = 32  # of conditions and of attention

Inputs = dict[str, Tensor]


def _times() -> Tensor:
    return torch.randint(0, 100, (BATCH,))


def _image(channels: int, side: int = 16) -> Tensor:
    return torch.randn(BATCH, channels, side, side)


def _tokens(width: int = WIDTH) -> Tensor:
    return torch.randn(BATCH, SEQ, width)


def _noisy(channels: int, side: int = 16, key: str = "sample") -> Inputs:
    return {key: _image(channels, side), "timestep": _times()}


def _conditioned(channels: int, side: int = 16, key: str = "sample") -> Inputs:
    return {**_noisy(channels, side, key), "encoder_hidden_states": _tokens()}


def _flux() -> Inputs:
    places = torch.arange(SEQ)
    grid = torch.stack([0 * places, places // 4, places % 4], -1)
    return {
        "hidden_states": _tokens(4),
        "encoder_hidden_states": _tokens(),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": grid.double(),
        "txt_ids": torch.zeros(SEQ, 3),
    }


def _video(channels: int, *, frames_last: bool) -> Tensor:
    shape = (channels, 2, 8, 8) if frames_last else (2, channels, 8, 8)
    return torch.randn(BATCH, *shape)


UNET = {"layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
CROSS = {**UNET, "cross_attention_dim": WIDTH, "attention_head_dim": 8, "in_channels": 4}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}

# class -> (arguments of its constructor, inputs)
MODELS: Mapping[str, tuple[Mapping[str, Any], Callable[[], Inputs]]] = {
    "UNet2DModel": (
        {
            **UNET,
            "sample_size": 16,
            "in_channels": 3,
            "out_channels": 3,
            "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: _noisy(3),
    ),
    "UNet2DConditionModel": (
        {**CROSS, "sample_size": 16, "out_channels": 4, "down_block_types": DOWN, "up_block_types": UP},
        lambda: _conditioned(4),
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 64),
            "sample_size": 16,
            "in_channels": 8,
            "out_channels": 8,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "act_fn": "silu",
            "down_block_types": ("DownResnetBlock1D",) * 2,
            "up_block_types": ("UpResnetBlock1D",),
            "mid_block_type": "MidResTemporalBlock1D",
            "out_block_type": "OutConv1DBlock",
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "downsample_each_block": False,
            "layers_per_block": 1,
        },
        lambda: {"sample": torch.randn(BATCH, 8, 16), "timestep": _times()},
    ),
    "UNet3DConditionModel": (
        {
            **CROSS,
            "sample_size": 8,
            "out_channels": 4,
            "attention_head_dim": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        lambda: {"sample": _video(4, frames_last=True), "timestep": _times(), "encoder_hidden_states": _tokens()},
    ),
    "ControlNetModel": (
        {**CROSS, "down_block_types": DOWN, "conditioning_embedding_out_channels": (8, 16)},
        lambda: {**_conditioned(4), "controlnet_cond": _image(3, 32)},
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": WIDTH, "num_layers": 2},
        lambda: {"hidden_states": _image(32, 8), "encoder_hidden_states": _tokens()},
    ),
    "DiTTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 100,
        },
        lambda: {**_noisy(4, 8, "hidden_states"), "class_labels": torch.randint(0, 10, (BATCH,))},
    ),
    "PixArtTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "cross_attention_dim": 32,
            "caption_channels": WIDTH,
            "use_additional_conditions": False,
        },
        lambda: _conditioned(4, 8, "hidden_states"),
    ),
    "SD3Transformer2DModel": (
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        lambda: {**_conditioned(4, 8, "hidden_states"), "pooled_projections": torch.randn(BATCH, 32)},
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux,
    ),
    "AuraFlowTransformer2DModel": (
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        lambda: {**_conditioned(4, 8, "hidden_states"), "timestep": torch.rand(BATCH)},
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 32,
            "caption_channels": WIDTH,
            "sample_size": 8,
        },
        lambda: _conditioned(4, 8, "hidden_states"),
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": WIDTH,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "patch_size": 2,
            "temporal_compression_ratio": 1,
            "max_text_seq_length": SEQ,
        },
        lambda: {
            "hidden_states": _video(4, frames_last=False),
            "encoder_hidden_states": _tokens(),
            "timestep": _times(),
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": WIDTH,
            "freq_dim": 32,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": _video(4, frames_last=True),
            "timestep": _times(),
            "encoder_hidden_states": _tokens(),
        },
    ),
    "PriorTransformer": (
        {**HEADS, "num_layers": 2, "embedding_dim": 8, "num_embeddings": 7, "additional_embeddings": 4},
        lambda: {
            "hidden_states": torch.randn(BATCH, 8),
            "timestep": _times(),
            "proj_embedding": torch.randn(BATCH, 8),
            "encoder_hidden_states": torch.randn(BATCH, 7, 8),
        },
    ),
    "AutoencoderKL": (
        {
            **UNET,
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": _image(3, 32)},
    ),
    "AutoencoderTiny": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "encoder_block_out_channels": (32, 32),
            "decoder_block_out_channels": (32, 32),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        lambda: {"sample": _image(3, 32)},
    ),
    "VQModel": (
        {
            **UNET,
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 3,
            "num_vq_embeddings": 16,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": _image(3, 32)},
    ),
    "T2IAdapter": (
        {"in_channels": 3, "channels": [32, 32], "num_res_blocks": 1, "downscale_factor": 4},
        lambda: {"x": _image(3, 32)},
    ),
}
NAMES = tuple(PREFIX + name for name in MODELS)


def installed() -> bool:
    return importlib.util.find_spec("diffusers") is not None


def make(name: str, *, seed: int = 0) -> Small:
    """The small model of that name, in float64 where it runs so. Raises what the model does where it does not."""
    try:
        return _made(name, torch.float64, seed)
    except RuntimeError:  # it makes float32 numbers itself
        return _made(name, torch.float32, seed)


def _made(name: str, dtype: torch.dtype, seed: int) -> Small:
    import diffusers  # optional: see `installed`

    sizes, draw = MODELS[name.removeprefix(PREFIX)]
    torch.manual_seed(seed)
    model = getattr(diffusers, name.removeprefix(PREFIX))(**sizes).to(dtype)
    perturb_constants(model)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in draw().items()}
    step, args = Step(model.train(), tuple(inputs)), tuple(inputs.values())
    step.draw_targets(*args)
    step(*args).backward()
    model.zero_grad()
    return Small(step, args, "diffusion", model.config)
