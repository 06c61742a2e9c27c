"""A byte-level GPT in plain PyTorch: single-device code that knows nothing of autopar.

Letters in shapes: B batch, S sequence, D width, N heads, H = D / N width of a head, and 256 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256  # the vocabulary: every value of a byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        seq_len: the longest sequence, in bytes.
        layers: number of blocks.
        heads: attention heads of a block; they divide the width.
        width: width of the residual stream.
    """

    seq_len: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}.")


class Attention(nn.Module):
    """Causal self-attention; query, key and value are apart, so that each splits along heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # BSD -> BSD
        q, k, v = (self._heads(f(x)) for f in (self.query, self.key, self.value))  # BNSH
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # BNSH
        return self.output(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # BSD -> BNSH


class MLP(nn.Module):
    """Two linear maps around a GELU, four times as wide as the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # BSD -> BSD
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:  # BSD -> BSD
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts at every position of a text the byte that follows.

    Args:
        config: the sizes.
        seed: seed of the initial weights; the same seed gives the same weights in every process.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(BYTES, config.width)
        self.position_embedding = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self._init_weights(config, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, of shape `(B, S, 256)`, for `tokens` of shape `(B, S)`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # BSD
        return self.head(self.norm(self.blocks(x)))

    def _init_weights(self, config: GPTConfig, seed: int) -> None:
        """Draws weights as GPT-2 does: normal of 0.02, and less for the 2 products per layer that add to the stream."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                adds = name.endswith(("output.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if adds else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte: `(B, S, 256)` and `(B, S)` -> a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def example() -> tuple[GPT, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """A GPT in the sizes of GPT-2 small, without weights: a target for `autopar explain`."""
    with torch.device("meta"):
        model = GPT(GPTConfig(seq_len=1024, layers=12, heads=12, width=768))
        tokens = torch.empty(64, 1024, dtype=torch.long)
    return model, (tokens, tokens), loss_fn


def tiny_example() -> tuple[GPT, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """A GPT small enough to simulate many ranks of, in float64: a target for `autopar verify`."""
    model = GPT(GPTConfig(seq_len=16, layers=2, heads=4, width=32)).double()
    tokens = torch.arange(8 * 16).reshape(8, 16) * 7 % BYTES
    return model, (tokens, tokens.roll(-1, dims=1)), loss_fn
