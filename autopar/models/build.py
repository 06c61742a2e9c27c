"""Builds plain PyTorch modules from descriptions; their forward returns the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.models.blocks import INIT_STD, Positions, TransformerBlock, dropout, norm
from autopar.models.description import RELATIVE_BUCKETS, Description, EncoderDecoder, Transformer, VisionTransformer

ROTARY_BASE = 10_000.0  # arXiv 2104.09864, equation 15
FARTHEST = 128  # where T5's buckets of relative positions end (arXiv 1910.10683, section 2.1)


def build(description: Description, *, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> nn.Module:
    """The model on the current default device, `torch.device("meta")` included.

    Its forward takes what `example_inputs` gives, and returns the mean cross-entropy.

    Args:
        description: sizes of the model.
        dtype: dtype of all parameters.
        layers: largest number of blocks in every list of layers; None for all blocks.
    """
    if layers is not None:
        description = with_layers(description, layers)
    kinds: dict[type, type[nn.Module]] = {
        Transformer: LanguageModel,
        EncoderDecoder: EncoderDecoderModel,
        VisionTransformer: VisionModel,
    }
    return kinds[type(description)](description).to(dtype)


def with_layers(description: Description, layers: int) -> Description:
    """The same sizes with at most `layers` blocks in every list of layers."""
    if layers < 1:
        raise AutoparError(f"A model needs at least 1 layer, not {layers}.")
    fewer = min(layers, description.layers)
    if isinstance(description, EncoderDecoder):
        encoder_layers = min(layers, description.encoder_layers)
        return replace(description, layers=fewer, encoder_layers=encoder_layers)
    if isinstance(description, Transformer):
        return replace(description, layers=fewer, dense_layers=min(layers, description.dense_layers))
    return replace(description, layers=fewer)


def example_inputs(
    description: Description, batch: int, seq: int | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Inputs of one micro-batch on the meta device.

    Args:
        description: sizes of the model.
        batch: number of sequences or images.
        seq: number of tokens in a sequence; None for the longest, or 512 for an encoder-decoder. Not used for images.
        dtype: dtype of pixels; tokens and labels are int64.

    Raises AutoparError for a batch or sequence below 1, or longer than the model's positions.
    """
    if batch < 1:
        raise AutoparError(f"A batch of {batch} is less than 1.")
    check_sequence(description, seq)
    if isinstance(description, VisionTransformer):
        size = (batch, description.channels, description.image, description.image)
        pixels = torch.empty(size, dtype=dtype, device="meta")
        return pixels, torch.empty(batch, dtype=torch.long, device="meta")
    inputs = 3 if isinstance(description, EncoderDecoder) else 2
    length = longest(description) if seq is None else seq
    return tuple(torch.empty(batch, length, dtype=torch.long, device="meta") for _ in range(inputs))


def longest(description: Description) -> int:
    """The sequence length of the model in tokens: the longest that it supports; for T5, that of its pre-training."""
    if isinstance(description, EncoderDecoder):
        return 512  # T5's pre-training, arXiv 1910.10683 section 3.1.2
    if isinstance(description, VisionTransformer):
        return description.positions
    return description.max_positions


def check_sequence(description: Description, seq: int | None) -> None:
    """Raises AutoparError if the model cannot take a sequence of this length."""
    if seq is None:
        return
    if seq < 1:
        raise AutoparError(f"A sequence of {seq} tokens is less than 1.")
    if isinstance(description, VisionTransformer) and seq != description.positions:
        raise AutoparError(
            f"An image of {description.image} pixels in patches of {description.patch} is a sequence of "
            f"{description.positions}, not {seq}; leave the sequence length out."
        )
    learned = isinstance(description, Transformer) and description.positions == "learned"
    if learned and seq > longest(description):
        raise AutoparError(
            f"A sequence of {seq} tokens is longer than the {longest(description)} positions that the model learns."
        )


class LanguageModel(nn.Module):
    """A decoder, or an encoder alone, from tokens to the loss."""

    def __init__(self, description: Transformer) -> None:
        super().__init__()
        self.description = description
        hidden, vocab = description.hidden, description.vocab
        self.embedding = nn.Embedding(vocab, hidden)
        if description.positions == "learned":
            self.position_embedding = nn.Embedding(description.max_positions, hidden)
        self.dropout = dropout(description)
        self.dense_layers = nn.ModuleList(
            TransformerBlock(description.dense, causal=description.causal) for _ in range(description.dense_layers)
        )
        self.layers = nn.ModuleList(
            TransformerBlock(description, causal=description.causal) for _ in range(description.layers)
        )
        self.norm = norm(description)
        self.head = nn.Linear(hidden, vocab, bias=False)
        _tie(self.embedding, self.head if description.tied else None)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of `labels`, the right token at every position; both of shape (B, S)."""
        description = self.description
        x = self.embedding(tokens)  # BSD
        if description.positions == "learned":
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.position_embedding(places)
        x = self.dropout(x)
        x = self.norm(x) if description.post_norm else x
        positions = positions_of(description, x)
        for layer in (*self.dense_layers, *self.layers):
            x = layer(x, positions)
        x = x if description.post_norm else self.norm(x)
        return cross_entropy(self.head(x), labels)


class EncoderDecoderModel(nn.Module):
    """An encoder-decoder such as T5, from tokens to the loss."""

    def __init__(self, description: EncoderDecoder) -> None:
        super().__init__()
        self.description = description
        hidden, heads = description.hidden, description.heads
        self.embedding = nn.Embedding(description.vocab, hidden)
        self.encoder_positions = nn.Embedding(RELATIVE_BUCKETS, heads)
        self.decoder_positions = nn.Embedding(RELATIVE_BUCKETS, heads)
        self.dropout = dropout(description)
        self.encoder = nn.ModuleList(
            TransformerBlock(description, causal=False) for _ in range(description.encoder_layers)
        )
        self.encoder_norm = norm(description)
        self.decoder = nn.ModuleList(
            TransformerBlock(description, causal=True, looks_back=True) for _ in range(description.layers)
        )
        self.norm = norm(description)
        self.head = nn.Linear(hidden, description.vocab, bias=False)
        _tie(self.embedding, self.head)

    def forward(self, tokens: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of `labels` given `tokens` and the `targets` before; all of shape (B, S)."""
        memory = self.dropout(self.embedding(tokens))
        positions = self._positions(self.encoder_positions, memory, causal=False)
        for layer in self.encoder:
            memory = layer(memory, positions)
        memory = self.encoder_norm(memory)
        x = self.dropout(self.embedding(targets))
        positions = self._positions(self.decoder_positions, x, causal=True)
        for layer in self.decoder:
            x = layer(x, positions, memory)
        return cross_entropy(self.head(self.norm(x)), labels)

    def _positions(self, table: nn.Embedding, x: Tensor, *, causal: bool) -> Positions:
        places = torch.arange(x.shape[1], device=x.device)
        distance = places - places.unsqueeze(-1)  # key less query
        bias = table(relative_bucket(distance, causal=causal)).permute(2, 0, 1).unsqueeze(0)  # 1NSS
        future = distance > 0 if causal else None
        if future is None or not self.description.fused_attention:
            return Positions(bias=bias, future=future)
        return Positions(bias=bias.masked_fill(future, float("-inf")))


class VisionModel(nn.Module):
    """A vision transformer, from pixels to the loss."""

    def __init__(self, description: VisionTransformer) -> None:
        super().__init__()
        self.description = description
        hidden, patch = description.hidden, description.patch
        self.patches = nn.Conv2d(description.channels, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        positions = torch.empty(description.positions, hidden)
        self.position_embedding = nn.Parameter(nn.init.normal_(positions, std=INIT_STD))
        self.dropout = dropout(description)
        self.layers = nn.ModuleList(TransformerBlock(description, causal=False) for _ in range(description.layers))
        self.norm = norm(description)
        self.head = nn.Linear(hidden, description.classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of `labels` of shape (B,) for `pixels` of shape (B, channels, side, side)."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)  # BSD
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.position_embedding)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(_wide(self.head(self.norm(x[:, 0]))), labels)


def _tie(embedding: nn.Embedding, head: nn.Linear | None) -> None:
    """Initialises an embedding with small random numbers, so that logits start small; ties the head to it if given."""
    nn.init.normal_(embedding.weight, std=INIT_STD)
    if head is not None:
        head.weight = embedding.weight


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens, in float32 at least, as trainers do: BSV, BS -> a scalar."""
    return F.cross_entropy(_wide(logits).flatten(0, 1), labels.flatten())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def positions_of(description: Transformer, x: Tensor) -> Positions:
    """The tensors for positions that all blocks of a language model use; `x` of shape (B, S, D) is its input."""
    places = torch.arange(x.shape[1], device=x.device)
    in_parts = not description.fused_attention
    future = places > places.unsqueeze(-1) if in_parts and description.causal else None
    if description.positions == "rotary":
        return Positions(rotary=_angles(description, places, x.dtype), future=future)
    if description.positions != "alibi":
        return Positions(future=future)
    slopes = alibi_slopes(description.heads, x.device)
    if in_parts:
        return Positions(bias=(slopes * places).to(x.dtype).unsqueeze(0), future=future)
    columns = torch.stack([places - places % 256, places % 256], dim=-1)
    slopes = slopes * math.sqrt(description.head_dim)  # the scores are scaled by its inverse
    return Positions(alibi=(slopes.to(x.dtype), columns.to(x.dtype)))


def _angles(description: Transformer, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each of shape (S, H / 2)."""
    half = (description.latent.rotary if description.latent else description.head_dim) // 2
    rates = ROTARY_BASE ** (-torch.arange(half, device=places.device) / half)
    angles = places.unsqueeze(-1) * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """2^(-8 n / N) for head n = 1 .. N (arXiv 2108.12409, section 3), of shape (N, 1, 1)."""
    numbers = torch.arange(1, heads + 1, device=device)
    return torch.exp2(-8 * numbers / heads).view(heads, 1, 1)


def relative_bucket(distance: Tensor, *, causal: bool) -> Tensor:
    """T5's bucket of a distance (key minus query): exact up to 8 or 16, then logarithmic up to `FARTHEST`.

    Half of the buckets are for keys after the query, unless attention is causal.
    """
    buckets = RELATIVE_BUCKETS if causal else RELATIVE_BUCKETS // 2
    later = (distance > 0) * (0 if causal else buckets)
    far = (-distance).clamp(min=0) if causal else distance.abs()
    exact = buckets // 2
    ratio = torch.log(far.clamp(min=1) / exact) / math.log(FARTHEST / exact)
    logarithmic = (exact + ratio * (buckets - exact)).long().clamp(max=buckets - 1)
    return later + torch.where(far < exact, far, logarithmic)
