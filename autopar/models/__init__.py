"""The project's own models: their sizes as data, and plain PyTorch modules built from these."""

from autopar.models.build import build, check_sequence, example_inputs, longest, with_layers
from autopar.models.description import (
    FAMILIES,
    EncoderDecoder,
    Transformer,
    VisionTransformer,
    padded,
    parameter_count,
    repeated_layers,
)
from autopar.models.presets import PRESETS, Preset, find_preset
