"""A language model whose sizes few ranks divide: a vocabulary and an inner width of 97, 5 heads of 7, 7 tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, WIDTH, INNER, VOCABULARY, LENGTH = 5, 35, 97, 97, 7


class OddWidths(nn.Module):
    """A block of attention and an MLP; the head is tied to the table. Called with targets it returns the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over the targets that count, and one over all logits, whose gradients reach all of the vocabulary."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * logits.square().mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which a few do not count."""
    tokens, targets = torch.randint(0, VOCABULARY, (2, rows, LENGTH), generator=torch.Generator().manual_seed(0))
    targets[0, :3] = -100
    return tokens, targets
