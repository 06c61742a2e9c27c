"""Inputs of a model of `transformers`, drawn by the names of its `forward`'s parameters.

Batch 4, sequence 16, images of `(3, 32, 32)`, sound of 64 frames of 16 mel bins. Of a name there may be
several shapes; `input_sets` goes through the combinations, the likeliest first.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.config import CLASSES, FIRST_SPECIAL, FIRST_WORD, IMAGE, MEL
from benchmarks.zoo.models import BATCH, SEQ

FRAMES, SAMPLES, PREDICTED = 64, 3840, 4
GRID = 4  # patches along height and width of an image that comes with its grid
MOST_SETS = 12  # of inputs that are tried for one choice of names

Draw = Callable[[Any], list[Tensor]]  # a configuration -> what may be given, the likeliest first


def setting(config: Any, name: str, default: int) -> int:
    """A size of the configuration, or of the first of its parts that has it."""
    value = vars(config).get(name, getattr(type(config), name, None))
    if not isinstance(value, (int, list, tuple)):
        parts = [v for v in vars(config).values() if hasattr(v, "model_type")]
        found = (setting(part, name, 0) for part in parts)
        value = next((v for v in found if v), default)
    return value[0] if isinstance(value, (list, tuple)) else value


def _words(config: Any) -> list[Tensor]:
    most = min(FIRST_SPECIAL, setting(config, "vocab_size", FIRST_SPECIAL))
    return [torch.randint(min(FIRST_WORD, most - 1), most, (BATCH, SEQ))]


def _pixels(config: Any) -> list[Tensor]:
    """Images of shape `(batch, channels, height, width)`, then videos of shape `(batch, frames, ...)`."""
    channels, size = setting(config, "num_channels", 3), setting(config, "image_size", IMAGE)
    frames = setting(config, "num_frames", 2)
    image = [torch.randn(BATCH, channels, s, s) for s in dict.fromkeys((size, IMAGE, 2 * IMAGE))]
    video = torch.randn(BATCH, frames, channels, size, size)
    return [video, *image] if frames != 2 else [*image, video]


def _wave(config: Any) -> list[Tensor]:
    """Sounds of shape `(batch, samples)`, `(batch, 1, samples)` or `(batch, frames, mel)`."""
    frames, bins = setting(config, "max_length", FRAMES), setting(config, "num_mel_bins", MEL)
    shapes = ((BATCH, SAMPLES), (BATCH, 1, SAMPLES), (BATCH, frames, bins))
    return [torch.randn(shape) for shape in shapes]


def _mel(config: Any) -> list[Tensor]:
    """Spectrograms of shape `(batch, mel, frames)` or `(batch, frames, mel)`."""
    names = (
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_size",
        "input_feat_per_channel",
        "input_dim",
        "n_mels",
        "input_size",
    )
    bins = next((size for key in names if (size := setting(config, key, 0))), MEL)
    frames = 2 * setting(config, "max_source_positions", FRAMES // 2)
    side = setting(config, "spec_size", 0)  # of the picture that a spectrogram is folded into
    folded = [torch.randn(BATCH, 1, side * side // bins, bins)] if side else []
    return [
        *folded,
        torch.randn(BATCH, bins, frames),
        torch.randn(BATCH, FRAMES, bins),
        torch.randn(BATCH, FRAMES, 2 * bins),
    ]


def _boxes(config: Any) -> list[Tensor]:
    corner = torch.randint(0, 20, (BATCH, SEQ, 2))
    return [torch.cat([corner, corner + torch.randint(1, 20, (BATCH, SEQ, 2))], -1)]


def _series(config: Any) -> list[Tensor]:
    """Series of shape `(batch, time, channels)`, preceded by their lags where there are lags."""
    length, channels = (setting(config, "context_length", 32), setting(config, "num_input_channels", 1))
    lags = vars(config).get("lags_sequence")
    if lags:
        return [torch.randn(BATCH, length + max(lags))]
    return [torch.randn(BATCH, length, channels), torch.randn(BATCH, length)]


def _features_of_time(config: Any, *, past: bool) -> list[Tensor]:
    """What is known of each time, of shape `(batch, time, features)`."""
    time = _series(config)[0].shape[1] if past else setting(config, "prediction_length", PREDICTED)
    return [torch.randn(BATCH, time, setting(config, "num_time_features", 0))]


def _hidden(config: Any) -> list[Tensor]:
    """Hidden states of shape `(batch, sequence, width)`, then with channels before the sequence."""
    width = next((w for k in ("hidden_size", "d_model", "dim") if (w := setting(config, k, 0))), 64)
    return [torch.randn(BATCH, SEQ, width), torch.randn(BATCH, width, SEQ)]


def _other_hidden(config: Any) -> list[Tensor]:
    """States of another model, of the width that attention across takes."""
    width = setting(config, "encoder_hidden_size", 0)
    return [torch.randn(BATCH, SEQ, width), *_hidden(config)] if width else _hidden(config)


def _patches(config: Any) -> Tensor:
    """The patches of every image, of shape `(images * grid, channels * frames * height * width)`."""
    frames, side = setting(config, "temporal_patch_size", 1), setting(config, "patch_size", 8)
    channels = setting(config, "in_channels", 0) or setting(config, "num_channels", 3)
    return torch.randn(BATCH * GRID * GRID, channels * frames * side * side)


def _gridded(config: Any) -> list[Tensor]:
    """Patches of all images in a row, then with a dimension for the image."""
    patches = _patches(config)
    return [patches, patches.unflatten(0, (BATCH, GRID * GRID))]


def _grid(config: Any) -> list[Tensor]:
    """Frames, rows and columns of each image, of shape `(images, 3)`."""
    return [torch.tensor([[1, GRID, GRID]] * BATCH)]


def _places(config: Any) -> list[Tensor]:
    """Column and row of each patch, of shape `(batch, patches, 2)`."""
    place = torch.arange(GRID * GRID)
    return [torch.stack([place % GRID, place // GRID], -1).repeat(BATCH, 1, 1)]


def _prompt(config: Any) -> list[Tensor]:
    """Another image, of shape `(batch, channels, height, width)`."""
    return [torch.randn(BATCH, setting(config, "num_channels", 3), IMAGE, IMAGE)]


def _image_places(config: Any) -> list[Tensor]:
    """Which words stand for the image: as many as it has latents, of shape `(batch, sequence)`."""
    return [(torch.arange(SEQ) < setting(config, "latent_query_num", 0)).repeat(BATCH, 1)]


def _task(config: Any) -> list[Tensor]:
    """The ids of the words of a task, as numbers, of shape `(batch, words)`."""
    return [torch.rand(BATCH, setting(config, "task_seq_len", SEQ))]


def _ones(*shape: int, dtype: torch.dtype = torch.long) -> Draw:
    return lambda config: [torch.ones(shape, dtype=dtype)]


DRAWS: Mapping[str, Draw] = {
    "input_ids": _words,
    "decoder_input_ids": _words,
    "qformer_input_ids": _words,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_values": _wave,
    "input_features": _mel,
    "bbox": _boxes,
    "past_values": _series,
    "past_observed_mask": lambda c: [torch.ones_like(x) for x in _series(c)],
    "past_time_features": lambda c: _features_of_time(c, past=True),
    "future_time_features": lambda c: _features_of_time(c, past=False),
    "future_values": lambda c: [torch.randn(BATCH, setting(c, "prediction_length", PREDICTED))],
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "noise_embeds": _hidden,
    "context_hidden_states": _hidden,
    "query_embeds": _hidden,
    "encoder_hidden_states": _other_hidden,
    "attention_mask": _ones(BATCH, SEQ),
    "input_features_mask": _ones(BATCH, FRAMES),
    "feature_attention_mask": _ones(BATCH, FRAMES),
    "audio_mel": lambda c: _mel(c)[1:2],
    "audio_mel_mask": lambda c: [torch.zeros(BATCH, FRAMES, dtype=torch.bool)],
    "visual_feats": lambda c: [torch.randn(BATCH, 4, setting(c, "visual_feat_dim", 64))],
    "visual_pos": lambda c: [torch.rand(BATCH, 4, 4)],
    "grid_thw": _grid,
    "merge_sizes": _ones(BATCH),
    "spatial_shapes": lambda c: [torch.tensor([[GRID, GRID]] * BATCH)],
    "pixel_attention_mask": _ones(BATCH, GRID * GRID),
    "pixel_position_ids": _places,
    "inputs": _words,
    "prompt_pixel_values": _prompt,
    "prompt_masks": _prompt,
    "task_inputs": _task,
    "image_embeds_position_mask": _image_places,
    "image_attention_mask": _ones(BATCH, SEQ, 2),
}
ALWAYS = ("bbox", "visual_feats", "visual_pos")  # given wherever forward takes them
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values")
GRIDS = ("grid_thw", "spatial_shapes", "pixel_position_ids")  # pixels come as patches beside these
LAST = ("inputs_embeds", "attention_mask")  # instead of ids, or what a model makes itself


def input_sets(model_class: Any, config: Any, labelled: bool) -> Iterator[dict[str, Tensor]]:
    """Sets of inputs that may run, the likeliest first; labels as ids and as classes."""
    takes = inspect.signature(model_class.forward).parameters
    for chosen in _choices(model_class, takes):
        draws = [_gridded if _as_patches(n, chosen) else DRAWS[n] for n in chosen]
        values = itertools.product(*(draw(config) for draw in draws))
        for given in itertools.islice(values, MOST_SETS):
            inputs = dict(zip(chosen, given, strict=True))
            if labelled and "labels" in takes:
                yield {**inputs, "labels": _words(config)[0]}
                yield {**inputs, "labels": torch.randint(0, CLASSES, (BATCH,))}
            elif not labelled:
                yield inputs


def _as_patches(name: str, chosen: tuple[str, ...]) -> bool:
    return name in ("hidden_states", "pixel_values") and any(grid in chosen for grid in GRIDS)


def _choices(model_class: Any, takes: Mapping[str, inspect.Parameter]) -> list[tuple[str, ...]]:
    """The names to give: what must be; a decoder's ids too; every modality; an own mask; all there is."""
    various = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [n for n, p in takes.items() if p.default is p.empty and n != "self" and p.kind not in various]
    main = model_class.main_input_name
    names = [main] if isinstance(main, str) else list(main)
    names += [*required, *(n for n in ALWAYS if n in takes)]
    first = [n for n in names if n in DRAWS and n in takes]
    decoder = [*first, *(n for n in ("decoder_input_ids",) if n in takes)]
    own = [n for n in MODALITIES if n in takes]
    every = [n for n in DRAWS if n in takes and n not in LAST]
    masked = [n for n in ("attention_mask",) if n in takes]
    choices = (first, decoder, first + own, first + every, first + masked, decoder + masked)
    return list(dict.fromkeys(tuple(dict.fromkeys(c)) for c in choices))


class NoImage(ValueError):
    """No image that could be drawn is one that the model takes; the message has its first error."""


def image_and_words(model_class: Any, config: Any) -> dict[str, Tensor]:
    """Pixels, and ids that hold as many image tokens as the model makes of them.

    {} of a model that does not say which id stands for an image, or takes none. Raises NoImage.
    """
    marks = (getattr(config, key, None) for key in ("image_token_id", "image_token_index"))
    mark = next((m for m in marks if m is not None), None)
    if mark is None or not hasattr(model_class, "get_image_features"):
        return {}
    model, first = model_class(config), None
    for pixels in _pixels(config):
        try:
            features = model.get_image_features(pixel_values=pixels)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            first = first or error  # told below where no shape is right
            continue
        features = getattr(features, "pooler_output", features)
        tokens = features if isinstance(features, Tensor) else torch.cat(list(features))
        count = tokens.numel() // tokens.shape[-1] // BATCH
        image = torch.full((BATCH, count), mark)
        return {"input_ids": torch.cat([image, *_words(config)], 1), "pixel_values": pixels}
    raise NoImage(f"{type(first).__name__}: {first}")
