"""Small models of every architecture of `transformers`, derived from their default configurations.

`shrink` names the sizes that make a model small and leaves all else to the configuration class; `make`
picks a model class, draws inputs by the names of `forward`'s parameters, and takes the first that run.
Nothing is downloaded. Batch 4, sequence 16, two layers, hidden size 64, images of `(3, 32, 32)`.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from zoo_models import BATCH, SEQ, VOCAB, perturb_constants, without_dropout

IMAGE, MEL, FRAMES, SAMPLES, CLASSES = 32, 16, 64, 3200, 2
FIRST_WORD, FIRST_SPECIAL = 10, 64  # ids of words lie between these two, special ones above

# (what a name is, the size it may have at most); the first that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_labels", 2),
    (r".*vocab_size(_per_layer_input)?", VOCAB),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k|topk", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers", 1),
    (r"n_(routed|shared)_experts|(moe_)?num(_local)?_experts", 4),
    (r"num_key_value_heads|.*num_kv_heads|index_n_heads|.*num_key_heads", 2),
    (r".*heads|n_head", 4),
    (r"num_feat_extract_layers", 16),
    (r"num_residual_layers|num_nextn_predict_layers", 1),
    (r".*_layers|layers|n_layers?|depth|num_blocks|num_kv_shared_layers|depths", 2),
    (r"qk_nope_head_dim|v_head_dim|index_head_dim|.*head_dim|d_kv|d_head|dim_head", 16),
    (r"kv_lora_rank|q_lora_rank|codebook_dim|latent_dim", 16),
    (r"qk_rope_head_dim|rotary_dim|index_topk", 8),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|feedforward|linear_units).*", 128),
    (r"d_ff|mlp_dim|d_inner|n_inner|moe_intermediate.*", 128),
    (r".*(hidden_size|hidden_dim|projection_dim|embedding_size|embed_dim|proj_dim)(_.*)?", 64),
    (r"projector_(in|out)put_dim|vision_output_dim|projection_hidden_dim", 64),
    (r".*feature_size|d_model|n_embd|dim|emb_dim|proj.*_size|out_hidden_size|embedding_dim|lru_width|.*latents", 64),
    (r".*(n_positions|position.*embeddings|source_positions|target_positions|max_seq_len)", 128),
    (r"(max_)?2d_position_embeddings|relative_attention_max_distance|max_length|context_length", 64),
    (r"sliding_window|attention_window|local_attention|block_size|chunk_size|attention_chunk_size", 8),
    (r"image_embedding_size", IMAGE // 8),
    (r"image_size|img_size|pretrain_image_size|crop_size", IMAGE),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_projection_input_dim", MEL),
    (r"num_frames|frames_per_clip", 4),
    (r"codebook_size|num_embeddings|num_queries|num_query_tokens|num_filters|.*codevectors.*", 16),
    (r".*(channels|filters)|stem_width|upsample_groups|groups_width", 32),
    (r"num_groups|n_window", 8),
    (r"num_codebooks|n_codebooks|num_quantizers", 2),
    (r"mamba_d_state|.*state_size|mamba_dt_rank|time_step_rank", 8),
    (r"window_size|num_conv_pos_embeddings", 4),
    (r"conv_depthwise_kernel_size|conv_kernel_size", 5),
)  # fmt: skip
WIDTHS = re.compile(r"hidden_sizes|embed_dims?|.*channels|.*hidden_sizes|conv_dim|tdnn_dim|key_dim")
ONES = re.compile(r"depths|stage_numb_of_layers|stage_num_blocks|num_block_repeats|.*_per_stack")
OFF = ("mask_time_prob", "mask_feature_prob", "layerdrop", "apply_spec_augment", "use_cache",
       "output_router_logits", "jitter_noise", "router_jitter_noise", "embd_pdrop", "attn_pdrop",
       "resid_pdrop")  # fmt: skip
SPECIAL = re.compile(r".*(token_id|token_index|_id)s?")

# In place of a backbone that another package would build.
RESNET: Mapping[str, Any] = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip

SHALLOW_SWIN: Mapping[str, Any] = {
    "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4, "out_indices": [2],
}  # fmt: skip

# What the names do not tell.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # a window is no wider than the grid of its stage
    **{key: SHALLOW_SWIN for key in ("swin", "swinv2", "donut-swin")},
    "mobilebert": {"intra_bottleneck_size": 64},
    "xmod": {"default_language": "en_XX"},
    "longt5": {"local_radius": 4, "global_block_size": 4},
}

# Tasks in the order in which a model is wanted; the last has no loss of its own.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION", "SEQUENCE_CLASSIFICATION",
)  # fmt: skip


def shrink(name: str) -> Any:
    """The small configuration of one architecture. Raises what its class does where sizes do not fit."""
    default = CONFIG_MAPPING[name]()
    changes = _smaller(default, {})
    changes.update(OVERRIDES.get(name, {}))
    return without_dropout(type(default)(**changes))


def _smaller(config: PreTrainedConfig, ids: dict[int, int]) -> dict[str, Any]:
    """The entries to change; `ids` maps the special ids met so far to small ones."""
    found = {key: _small(key, value, config, ids) for key, value in config.to_dict().items()}
    return {key: value for key, value in found.items() if value is not None}


def _small_part(part: PreTrainedConfig, ids: dict[int, int]) -> dict[str, Any]:
    if part.model_type == "timm_backbone":
        return {**RESNET, "out_indices": getattr(part, "out_indices", None) or [4]}
    named = {"model_type": part.model_type} if part.model_type else {}
    return {**named, **_smaller(part, ids)}


def _small(key: str, value: Any, config: PreTrainedConfig, ids: dict[int, int]) -> Any:
    """The small value of one entry, None to leave it to the configuration class."""
    part = getattr(config, key, None)
    if isinstance(part, PreTrainedConfig):
        return _small_part(part, ids)
    if key == "rope_parameters" and "rope_theta" in (value or {}):
        return {**value, "mrope_section": _sections(value.get("partial_rotary_factor", 1.0))}
    if key in OFF and value:
        return type(value)(0)
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)) or not value:
        return None
    if key == "out_indices" and hasattr(config, "depths"):
        return list(value)  # stages that the whole takes of a backbone
    if SPECIAL.fullmatch(key):
        return _small_ids(value, ids)
    if isinstance(value, (list, tuple)):
        return _small_list(key, list(value))
    if key == "num_key_value_heads" and hasattr(config, "kv_lora_rank"):
        return 4  # multi-head latent attention has as many as it has heads
    if key == "embed_dim" and isinstance(getattr(config, "depths", None), (list, tuple)):
        return 16  # doubles from stage to stage
    return next((min(value, most) for name, most in SIZES if re.fullmatch(name, key)), None)


def _sections(rotated: float) -> list[int]:
    """Half of the rotated part of a head of 16, shared by time, height and width."""
    half = int(16 * rotated) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _small_ids(value: Any, ids: dict[int, int]) -> Any:
    if isinstance(value, int):
        return ids.setdefault(value, FIRST_SPECIAL + len(ids)) if value >= FIRST_WORD else None
    return [ids.setdefault(i, FIRST_SPECIAL + len(ids)) if i >= FIRST_WORD else i for i in value]


def _small_list(key: str, values: list[Any]) -> list[Any] | None:
    """Widths keep their ratios, in multiples of 8; of layers one is left, of heads two."""
    if not all(isinstance(v, int) for v in values):
        return None
    if WIDTHS.fullmatch(key):
        return [max(8, round(v * 64 / max(values) / 8) * 8) if v > 8 else v for v in values]
    if ONES.fullmatch(key):
        return [1] * len(values)
    if key == "image_size":
        return [min(v, IMAGE) for v in values]
    return [min(v, 2) for v in values] if key.endswith("heads") else None


class Step(nn.Module):
    """A model as a function from positional inputs to a scalar loss.

    The model's own if labels are among the inputs; else the mean squared distance of every floating
    output to a fixed random target, which no symmetry (of a norm, of a softmax) makes constant.
    """

    def __init__(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def outputs(self, *args: Tensor) -> Any:
        return self.model(**dict(zip(self.inputs, args, strict=True)))

    def draw_targets(self, *args: Tensor) -> None:
        """A target for every output, the same for all rows of a batch."""
        for i, value in enumerate(_floating(self.outputs(*args))):
            rows = value.shape[0] if value.ndim else 1
            shape = value.shape[1:] if rows == BATCH else value.shape
            self.register_buffer(f"target{i}", torch.randn(shape, dtype=value.dtype))

    def forward(self, *args: Tensor) -> Tensor:
        output = self.outputs(*args)
        if "labels" in self.inputs:
            return output["loss"]
        values = _floating(output)
        losses = [
            (v - getattr(self, f"target{i}")).square().mean().to(torch.float64)
            for i, v in enumerate(values)
        ]
        return torch.stack(losses).sum()


def _floating(output: Any) -> list[Tensor]:
    """Every floating tensor with a gradient in a nested output, each once."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, (tuple, list)):
        return []
    found = [tensor for item in output for tensor in _floating(item)]
    return list({id(tensor): tensor for tensor in found}.values())


@dataclass(frozen=True)
class Small:
    """A model that runs, and how.

    Attributes:
        step: the model with its loss.
        args: its positional inputs.
        kind: text, vision, audio or several of them, by its inputs.
        config: the model's configuration.
    """

    step: Step
    args: tuple[Tensor, ...]
    kind: str
    config: Any

    @property
    def description(self) -> str:
        """`BertForMaskedLM(input_ids, labels)`."""
        return f"{type(self.step.model).__name__}({', '.join(self.step.inputs)})"

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.step.model.parameters())


def make(name: str, *, seed: int = 0) -> Small:
    """A small model of an architecture, in float64 and training mode where it runs so.

    Raises ValueError with the first error where no choice of class and inputs gives a loss with gradients.
    """
    config = shrink(name)
    first: Exception | None = None
    torch.manual_seed(seed)
    for model_class, labelled in _classes(config):
        for inputs, dtype in itertools.product(
            _inputs(model_class, config, labelled), (torch.float64, torch.float32)
        ):
            try:
                return _try(model_class, config, inputs, dtype, seed)
            except Exception as error:
                first = first or error
    raise ValueError(f"no inputs run: {type(first).__name__}: {first}") from first


def _classes(config: Any) -> Iterator[tuple[type, bool]]:
    """The model classes of a configuration, one with a loss of its own first."""
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        half = task == "IMAGE_CLASSIFICATION" and hasattr(config, "text_config")
        if type(config) in mapping and not half:
            yield _one(mapping[type(config)]), True
            break
    if type(config) in modeling_auto.MODEL_MAPPING:
        yield _one(modeling_auto.MODEL_MAPPING[type(config)]), False


def _one(found: Any) -> type:
    return found[0] if isinstance(found, (tuple, list)) else found


def _try(
    model_class: type, config: Any, inputs: Mapping[str, Tensor], dtype: torch.dtype, seed: int
) -> Small:
    """Builds and runs it; in eval mode if training draws random numbers."""
    torch.manual_seed(seed)
    model = model_class(config).to(dtype)
    perturb_constants(model)
    step = Step(model.train(), tuple(inputs))
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs.values())
    if "labels" not in inputs:
        step.draw_targets(*args)
    if not torch.equal(step(*args), step(*args)):
        step.eval()
        if not torch.equal(step(*args), step(*args)):
            raise ValueError(
                "it draws random numbers in evaluation too: there is nothing to compare"
            )
    loss = step(*args)
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}")
    loss.backward()
    model.zero_grad()
    return Small(step, args, _kind(inputs), config)


def _kind(inputs: Mapping[str, Tensor]) -> str:
    kinds = {
        "text": {"input_ids"},
        "vision": {"pixel_values", "pixel_values_videos"},
        "audio": {"input_values", "input_features"},
    }
    found = [kind for kind, names in kinds.items() if names & set(inputs)]
    return " + ".join(found) or "other"


Draw = Callable[[Any], list[Tensor]]  # a configuration -> what may be given, the likeliest first


def _setting(config: Any, name: str, default: int) -> int:
    """A size of the configuration, or of the first of its parts that has it."""
    value = getattr(config, name, None)
    if value is None:
        parts = [v for v in vars(config).values() if hasattr(v, "model_type")]
        found = (_setting(part, name, 0) for part in parts)
        value = next((v for v in found if v), default)
    return value[0] if isinstance(value, (list, tuple)) else value


def _words(config: Any) -> list[Tensor]:
    most = min(FIRST_SPECIAL, _setting(config, "vocab_size", FIRST_SPECIAL))
    return [torch.randint(min(FIRST_WORD, most - 1), most, (BATCH, SEQ))]


def _pixels(config: Any) -> list[Tensor]:
    """Of shape `(batch, channels, height, width)`, then of videos `(batch, frames, ...)`."""
    channels, size = _setting(config, "num_channels", 3), _setting(config, "image_size", IMAGE)
    frames = _setting(config, "num_frames", 2)
    image = [torch.randn(BATCH, channels, s, s) for s in dict.fromkeys((size, IMAGE, 2 * IMAGE))]
    video = torch.randn(BATCH, frames, channels, size, size)
    return [video, *image] if frames != 2 else [*image, video]


def _wave(config: Any) -> list[Tensor]:
    """Of shape `(batch, samples)`, `(batch, 1, samples)` or `(batch, frames, mel)`."""
    frames, bins = _setting(config, "max_length", FRAMES), _setting(config, "num_mel_bins", MEL)
    shapes = ((BATCH, SAMPLES), (BATCH, 1, SAMPLES), (BATCH, frames, bins))
    return [torch.randn(shape) for shape in shapes]


def _mel(config: Any) -> list[Tensor]:
    """Of shape `(batch, mel, frames)` or `(batch, frames, mel)`."""
    bins = next(
        (
            size
            for key in ("num_mel_bins", "feature_projection_input_dim", "input_dim", "n_mels")
            if (size := _setting(config, key, 0))
        ),
        MEL,
    )
    frames = 2 * _setting(config, "max_source_positions", FRAMES // 2)
    return [
        torch.randn(BATCH, bins, frames),
        torch.randn(BATCH, FRAMES, bins),
        torch.randn(BATCH, FRAMES, 2 * bins),
    ]


def _boxes(config: Any) -> list[Tensor]:
    corner = torch.randint(0, 20, (BATCH, SEQ, 2))
    return [torch.cat([corner, corner + torch.randint(1, 20, (BATCH, SEQ, 2))], -1)]


def _series(config: Any) -> list[Tensor]:
    """Of shape `(batch, time, channels)`."""
    length = _setting(config, "context_length", 32)
    return [torch.randn(BATCH, length, _setting(config, "num_input_channels", 1))]


def _hidden(config: Any) -> list[Tensor]:
    return [torch.randn(BATCH, SEQ, _setting(config, "hidden_size", 64))]


DRAWS: Mapping[str, Draw] = {
    "input_ids": _words,
    "decoder_input_ids": _words,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_values": _wave,
    "input_features": _mel,
    "bbox": _boxes,
    "past_values": _series,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "query_embeds": _hidden,
    "encoder_hidden_states": _hidden,
    "attention_mask": lambda c: [torch.ones(BATCH, SEQ, dtype=torch.long)],
    "input_features_mask": lambda c: [torch.ones(BATCH, FRAMES, dtype=torch.long)],
    "audio_mel": lambda c: _mel(c)[1:2],
    "audio_mel_mask": lambda c: [torch.zeros(BATCH, FRAMES, dtype=torch.bool)],
    "visual_feats": lambda c: [torch.randn(BATCH, 4, _setting(c, "visual_feat_dim", 64))],
    "visual_pos": lambda c: [torch.rand(BATCH, 4, 4)],
}
ALWAYS = ("bbox", "visual_feats", "visual_pos")  # given wherever forward takes them


def _image_and_words(model_class: Any, config: Any) -> dict[str, Tensor]:
    """Pixels, and ids that hold as many image tokens as the model makes of them; {} if it does not say."""
    marks = (getattr(config, key, None) for key in ("image_token_id", "image_token_index"))
    mark = next((m for m in marks if m is not None), None)
    if mark is None or not hasattr(model_class, "get_image_features"):
        return {}
    for pixels in _pixels(config):
        try:
            features = model_class(config).get_image_features(pixel_values=pixels)
        except Exception:  # this shape is none of its own; the next may be
            continue
        features = getattr(features, "pooler_output", features)
        tokens = features if isinstance(features, Tensor) else torch.cat(list(features))
        count = tokens.numel() // tokens.shape[-1] // BATCH
        image = torch.full((BATCH, count), mark)
        return {"input_ids": torch.cat([image, *_words(config)], 1), "pixel_values": pixels}
    return {}


def _inputs(model_class: Any, config: Any, labelled: bool) -> Iterator[dict[str, Tensor]]:
    """Sets of inputs that may run, the likeliest first; labels as ids and as classes."""
    takes = inspect.signature(model_class.forward).parameters
    required = [
        n
        for n, p in takes.items()
        if p.default is p.empty and n != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    pictured = _image_and_words(model_class, config) if labelled and "labels" in takes else {}
    if pictured:
        yield {**pictured, "labels": pictured["input_ids"].clone()}
    main = model_class.main_input_name
    names = [
        *([main] if isinstance(main, str) else main),
        *required,
        *(n for n in ALWAYS if n in takes),
    ]
    first = [n for n in dict.fromkeys(names) if n in DRAWS]
    both = [
        n for n in ("input_ids", "pixel_values", "input_features", "input_values") if n in takes
    ]
    decoder = [*first, *(n for n in ("decoder_input_ids",) if n in takes)]
    for chosen in dict.fromkeys((tuple(first), tuple(decoder), tuple(dict.fromkeys(first + both)))):
        for values in itertools.product(*(DRAWS[n](config) for n in chosen)):
            given = dict(zip(chosen, values, strict=True))
            if labelled and "labels" in takes:
                yield {**given, "labels": _words(config)[0]}
                yield {**given, "labels": torch.randint(0, CLASSES, (BATCH,))}
            elif not labelled:
                yield given
