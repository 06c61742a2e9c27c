"""Plays training steps of small models on ranks of a world: what `autopar.compile` makes of them asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.nccl.recording import Played, Syncs
from tests.support.nccl.traces import Mark, Traces

WIDTH, HEADS, WORDS = 16, 4, 32


class Block(nn.Module):
    """Attention and a map of two layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.output(y))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Words to words, by so many blocks."""

    def __init__(self, blocks: int = 1, dropout: float = 0.0, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(not frozen)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(words)))


def loss_fn(y: Tensor, words: Tensor) -> Tensor:
    """Cross entropy, without words below zero."""
    return F.cross_entropy(y.flatten(0, 1), words.flatten(), ignore_index=-100)


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (rows, 8))
    return x, x.roll(1, 1)


@dataclass
class Program:
    """A training of two steps with an optimizer.

    Attributes:
        mesh: axes and sizes.
        recipe: recipe of every axis.
        model: makes the model.
        batch: makes the batch.
        loss_fn: loss of the model's results.
        options: further arguments of `autopar.compile`; a plan stands for mesh and recipe.
    """

    mesh: Mapping[str, int]
    recipe: str | Mapping[str, str]
    model: Callable[[], nn.Module] = Model
    batch: Callable[[], tuple[Tensor, ...]] = lambda: _batch(8)
    loss_fn: Callable[..., Tensor] = loss_fn
    options: Mapping[str, Any] = field(default_factory=dict)

    def play(self, ranks: Iterable[int] | None = None) -> Traces:
        """The traces of these ranks, by default all; each step lies between marks, "begin 1" and "end 1"."""
        world = Played(prod(self.mesh.values()))
        for rank in range(world.size) if ranks is None else ranks:
            self._play(world, rank)
        return world.traces

    def _play(self, world: Played, rank: int) -> None:
        with world.rank(rank) as recorder:
            torch.manual_seed(0)
            batch = self.batch()
            options: dict[str, Any] = {"mesh": dict(self.mesh), "recipe": self.recipe}
            if "plan" in self.options:
                options = {}
            model = autopar.compile(self.model(), example_inputs=batch, loss_fn=self.loss_fn, **options, **self.options)
            # A stage may have no parameters.
            optimizer = torch.optim.SGD([*model.parameters()] or [torch.zeros(())], lr=0.01)
            if model.plan.pipeline is not None and model.plan.pipeline.update_every:
                model.attach_optimizer(optimizer)
            with Syncs(recorder):
                for step in range(1, 4):
                    recorder.trace.append(Mark(f"begin {step}"))
                    model.step(*batch)
                    optimizer.step()
                    optimizer.zero_grad()
                    recorder.trace.append(Mark(f"end {step}"))
