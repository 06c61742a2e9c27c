"""The models that parts train, from the project's own descriptions, and a U-Net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.models import build, example_inputs, find_preset
from autopar.models.description import LLAMA, Description, Transformer, VisionTransformer
from benchmarks.accelerator.parts import Context

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A model whose forward returns the loss, with one batch.

    Attributes:
        name: what figures call it.
        description: its sizes; None for the U-Net.
        batch: sequences or images.
        sequence: tokens of a sequence; None for images.
    """

    name: str
    description: Description | None
    batch: int
    sequence: int | None = None

    def shallow(self, layers: int) -> Subject:
        """The subject with so many layers; the U-Net as it is."""
        if self.description is None:
            return self
        return replace(self, description=replace(self.description, layers=layers))

    def model(self, context: Context, dtype: torch.dtype) -> nn.Module:
        """The model with the same values at each call."""
        torch.manual_seed(0)
        with context.device:
            if self.description is None:
                return UNet(context.size(8, 64)).to(dtype)
            return build(self.description, dtype=dtype)

    def inputs(self, context: Context, dtype: torch.dtype) -> Batch:
        """A batch with the same values at each call."""
        draw = torch.Generator().manual_seed(1)
        if self.description is None:
            size = (self.batch, 3, *[context.size(16, 64)] * 2)
            drawn: Batch = tuple(torch.randn(size, generator=draw).to(dtype) for _ in range(2))
        else:
            shapes = example_inputs(self.description, self.batch, self.sequence, dtype=dtype)
            drawn = tuple(_drawn(x, self.description, draw) for x in shapes)
        return tuple(x.to(context.device) for x in drawn)


def _drawn(like: Tensor, description: Description, draw: torch.Generator) -> Tensor:
    """Numbers for an input on the meta device: pixels, tokens or labels."""
    if like.is_floating_point():
        return torch.randn(like.shape, generator=draw).to(like.dtype)
    is_image = isinstance(description, VisionTransformer)
    kinds = description.classes if is_image else description.vocab
    return torch.randint(kinds, like.shape, generator=draw)


class UNet(nn.Module):
    """Two levels down and up again, joined by skip connections; the loss is the mean square of what is left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = _convolutions(3, width)
        self.down = _convolutions(width, 2 * width)
        self.bottom = _convolutions(2 * width, 4 * width)
        self.up = _convolutions(6 * width, 2 * width)
        self.leave = _convolutions(3 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        """The loss of images of shape (B, 3, H, W) against others; 4 divides H and W."""
        first = self.enter(pixels)
        second = self.down(F.max_pool2d(first, 2))
        lowest = self.bottom(F.max_pool2d(second, 2))
        x = self.up(torch.cat([second, _doubled(lowest)], dim=1))
        x = self.leave(torch.cat([first, _doubled(x)], dim=1))
        return F.mse_loss(self.last(x).float(), target.float())


def _convolutions(channels: int, width: int) -> nn.Sequential:
    layers = [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.SiLU())


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


def _language(**sizes: int) -> Transformer:
    return Transformer(**(LLAMA | sizes))  # type: ignore[arg-type]


_SMALL = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 512, "max_positions": 64}
_GPT2 = Transformer(**_SMALL, ffn=256)
_VIT = VisionTransformer(hidden=64, layers=2, heads=4, ffn=256, image=32, patch=8, classes=16)
# Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B, config.json
_LLAMA_1B = {
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab": 128256,
    "max_positions": 8192,
}
_EXPERTS = {
    "hidden": 1024,
    "layers": 8,
    "heads": 16,
    "ffn": 2048,
    "vocab": 32000,
    "max_positions": 2048,
    "experts": 8,
    "experts_per_token": 2,
}


def subjects(context: Context) -> Sequence[Subject]:
    """GPT-2, a Llama, a vision transformer, a mixture of experts and a U-Net, in sizes for the device."""
    if not context.on_accelerator:
        small = _language(**_SMALL, ffn=128, kv_heads=2)
        experts = _language(**_SMALL, ffn=64, experts=4, experts_per_token=2)
        return (
            Subject("gpt2", _GPT2, 4, 64),
            Subject("llama", small, 4, 64),
            Subject("vit", _VIT, 4),
            Subject("experts", experts, 4, 64),
            Subject("unet", None, 2),
        )
    return (
        Subject("gpt2", find_preset("gpt2").description, 8, 1024),
        Subject("llama", _language(**_LLAMA_1B), 4, 2048),
        Subject("vit", find_preset("vit-h").description, 32),
        Subject("experts", _language(**_EXPERTS), 4, 1024),
        Subject("unet", None, 16),
    )


def varied(context: Context) -> Sequence[Subject]:
    """Every subject; on a processor, whose time is short, every second: GPT-2, the vision transformer, the U-Net."""
    return subjects(context)[:: context.size(2, 1)]
