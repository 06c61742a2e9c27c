"""Attention and feed-forward blocks in plain PyTorch, without any use of autopar's planning.

Letters in shapes: B batch, S sequence, D hidden, N heads, K heads of keys and values, H width of a head,
F inner width, E experts, T experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.models.description import Blocks

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
INIT_STD = 0.02  # standard deviation of weights that no torch module initialises (GPT-2)


@dataclass(frozen=True)
class Positions:
    """Tensors by which attention takes positions into account, computed once for all blocks.

    Attributes:
        rotary: cosines and sines, each of shape (S, H / 2).
        alibi: slopes times sqrt(H), of shape (N, 1, 1), and positions of keys of shape (S, 2), see
            `_with_slopes`.
        bias: tensor that is added to scores, of a shape that broadcasts to (B, N, S, S).
        future: mask of shape (S, S), True where a query must not see a key; None if the attention op masks by itself.
    """

    rotary: tuple[Tensor, Tensor] | None = None
    alibi: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None
    future: Tensor | None = None


NO_POSITIONS = Positions()


def norm(blocks: Blocks) -> nn.Module:
    """A new norm over the residual stream."""
    if blocks.norm == "rms":
        return nn.RMSNorm(blocks.hidden)
    return nn.LayerNorm(blocks.hidden, bias=blocks.bias)


def dropout(blocks: Blocks) -> nn.Module:
    """A new dropout; with probability 0 an identity, which adds no op to the graph."""
    return nn.Dropout(blocks.dropout) if blocks.dropout else nn.Identity()


class Attention(nn.Module):
    """Multi-head attention, whose matrix products can be split along heads.

    Query, key and value have separate weights. If fused, they share one weight whose rows are ordered by key head:
    first the queries of this head, then its key and its value, as in Megatron-LM. The weight can then be split along
    heads, too.
    """

    def __init__(self, blocks: Blocks, *, causal: bool, looks_back: bool = False) -> None:
        super().__init__()
        self.blocks, self.causal = blocks, causal
        self.fused = blocks.fused_projections and not looks_back
        hidden, width = blocks.hidden, blocks.heads * blocks.head_dim
        kv_width = blocks.kv_heads * blocks.head_dim
        if self.fused:
            self.query_key_value = nn.Linear(hidden, width + 2 * kv_width, bias=blocks.bias)
        else:
            self.query = nn.Linear(hidden, width, bias=blocks.bias)
            self.key = nn.Linear(hidden, kv_width, bias=blocks.bias)
            self.value = nn.Linear(hidden, kv_width, bias=blocks.bias)
        self.output = nn.Linear(width, hidden, bias=blocks.bias)
        self.query_norm, self.key_norm = (
            nn.RMSNorm(blocks.head_dim) if blocks.norms_heads else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, positions: Positions = NO_POSITIONS, *, memory: Tensor | None = None) -> Tensor:
        """BSD -> BSD; keys and values are of `memory` where it is given."""
        q, k, v = self._split(x) if self.fused else self._apart(x, x if memory is None else memory)
        q, k = self.query_norm(q), self.key_norm(k)
        if positions.rotary is not None:
            q, k = rotate(q, *positions.rotary), rotate(k, *positions.rotary)
        attend = self._fused if self.blocks.fused_attention else self._in_parts
        return self.output(attend(q, k, v, positions).transpose(1, 2).flatten(2))

    def _apart(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        heads = (self.blocks.heads, self.blocks.kv_heads, self.blocks.kv_heads)
        q, k, v = (y.unflatten(-1, (count, -1)).transpose(1, 2) for y, count in zip((q, k, v), heads, strict=True))
        return q, k, v

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, head_dim = self.blocks.kv_heads, self.blocks.head_dim
        group = self.blocks.heads // heads
        y = self.query_key_value(x).unflatten(-1, (heads, group + 2, head_dim))
        if group == 1:
            q, k, v = (part.transpose(1, 2) for part in y.unbind(-2))
            return q, k, v
        q, k, v = y.split([group, 1, 1], dim=-2)  # BSKgH, BSK1H, BSK1H
        return (q.flatten(2, 3).transpose(1, 2), k.squeeze(3).transpose(1, 2), v.squeeze(3).transpose(1, 2))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        scale = 1 / math.sqrt(self.blocks.head_dim)
        if positions.alibi is not None:
            q, k = _with_slopes(q, k, *positions.alibi)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=positions.bias,
            dropout_p=self._dropout,
            scale=scale,
            is_causal=self.causal and positions.bias is None,
            enable_gqa=self.blocks.kv_heads != self.blocks.heads,
        )

    def _in_parts(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """BNSH, BKSH, BKSH -> BNSH, by single ops, so that autograd saves the attention weights."""
        group = self.blocks.heads // self.blocks.kv_heads
        k, v = (_shared_by_group(x, group) for x in (k, v))
        scores = (q / math.sqrt(self.blocks.head_dim)) @ k.transpose(-1, -2)  # BNSS
        if positions.bias is not None:
            scores = scores + positions.bias
        if positions.future is not None:
            scores = scores.masked_fill(positions.future, float("-inf"))
        weights = scores.softmax(-1)
        if self._dropout:
            weights = F.dropout(weights, self._dropout)
        return weights @ v

    @property
    def _dropout(self) -> float:
        return self.blocks.dropout if self.training else 0.0


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, and keys and values, are made from a narrow vector of each token.

    Of a key `head_dim` numbers are a head's own, and `rotary` others, which turn with the position, are those of all
    heads (arXiv 2405.04434, equations 9 to 19).
    """

    def __init__(self, blocks: Blocks, *, causal: bool) -> None:
        super().__init__()
        assert blocks.latent is not None, "its widths are given"
        self.blocks, self.latent, self.causal = blocks, blocks.latent, causal
        low, width = blocks.latent, blocks.heads * blocks.head_dim
        self.query_down = nn.Linear(blocks.hidden, low.queries, bias=False)
        self.query_norm = nn.RMSNorm(low.queries)
        self.query_up = nn.Linear(low.queries, width + blocks.heads * low.rotary, bias=False)
        self.key_down = nn.Linear(blocks.hidden, low.keys, bias=False)
        self.key_norm = nn.RMSNorm(low.keys)
        self.key_turned = nn.Linear(blocks.hidden, low.rotary, bias=False)
        self.key = nn.Linear(low.keys, width, bias=False)
        self.value = nn.Linear(low.keys, width, bias=False)
        self.output = nn.Linear(width, blocks.hidden, bias=False)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """BSD -> BSD."""
        assert positions.rotary is not None, "latent attention has rotary positions"
        low = self.key_norm(self.key_down(x))
        q = self._heads(self.query_up(self.query_norm(self.query_down(x))))
        k, v = self._heads(self.key(low)), self._heads(self.value(low))
        q, turned = q.split([self.blocks.head_dim, self.latent.rotary], dim=-1)
        q = torch.cat([q, rotate(turned, *positions.rotary)], dim=-1)
        shared = rotate(self.key_turned(x).unsqueeze(1), *positions.rotary)  # B1SR
        k = torch.cat([k, shared.expand(-1, self.blocks.heads, -1, -1)], dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(2))

    def _heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.blocks.heads, -1)).transpose(1, 2)


def _shared_by_group(x: Tensor, group: int) -> Tensor:
    """BKSH -> BNSH: repeats every key head for the `group` query heads that share it."""
    if group == 1:
        return x
    return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs of the first and second half turn by their angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _with_slopes(q: Tensor, k: Tensor, slopes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """ALiBi without a mask of S x S: two more columns of queries and keys.

    For the softmax of query i, adding slope * (j - i) is the same as adding slope * j: a product of a number of the
    head and a number of the key. The position j has two columns, for its high and low 8 bits, because bfloat16
    represents whole numbers exactly only up to 256.
    """
    q = torch.cat([q, slopes.expand(*q.shape[:-1], 2)], dim=-1)
    return q, torch.cat([k, places.expand(*k.shape[:-1], 2)], dim=-1)


class MLP(nn.Module):
    """A feed-forward layer: two linear maps around an activation, or three if it is gated.

    If fused, gate and up are one weight with a dim of size 2 for the two. The dim ffn stays a dim by itself, so that it
    can be split.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.activation = ACTIVATION[blocks.activation]
        self.gated, self.fused = blocks.gated, blocks.gated and blocks.fused_projections
        if self.fused:
            self.gate_up = _weight(2, blocks.ffn, blocks.hidden)
            self.gate_up_bias = nn.Parameter(torch.zeros(2, blocks.ffn)) if blocks.bias else None
        else:
            if blocks.gated:
                self.gate = nn.Linear(blocks.hidden, blocks.ffn, bias=blocks.bias)
            self.up = nn.Linear(blocks.hidden, blocks.ffn, bias=blocks.bias)
        self.down = nn.Linear(blocks.ffn, blocks.hidden, bias=blocks.bias)

    def forward(self, x: Tensor) -> Tensor:
        """BSD -> BSD."""
        if self.fused:
            gate, up = self._gate_and_up(x)
            return self.down(self.activation(gate) * up)
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, ...]:
        both = torch.einsum("bsd,cfd->bscf", x, self.gate_up)
        return (both if self.gate_up_bias is None else both + self.gate_up_bias).unbind(2)


class ExpertLayer(nn.Module):
    """A mixture of experts that drops no token: rows are sorted by expert and multiplied in groups.

    Every token goes to its T best experts, however many others go there. `autopar.passes.join_experts` makes one op of
    it, as it does of the mixtures of `transformers`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        experts, hidden, ffn = blocks.experts, blocks.hidden, blocks.ffn
        self.experts, self.per_token = experts, blocks.experts_per_token
        self.activation = ACTIVATION[blocks.activation]
        self.router = nn.Linear(hidden, experts, bias=blocks.bias)
        shapes = {"gate": (hidden, ffn)} if blocks.gated else {}
        for name, shape in {**shapes, "up": (hidden, ffn), "down": (ffn, hidden)}.items():
            self.register_parameter(name, _weight(experts, *shape))
            bias = nn.Parameter(torch.zeros(experts, shape[1])) if blocks.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.gated = blocks.gated

    def forward(self, x: Tensor) -> Tensor:
        """BSD -> BSD."""
        shares, chosen = self.router(x).topk(self.per_token, dim=-1)  # BST
        ids, order = chosen.flatten().sort()  # of length B S T
        numbers = torch.arange(self.experts, device=x.device)
        ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)  # of every expert's rows
        y = self._run(x.flatten(0, 1)[order // self.per_token], ids, ends)[order.argsort()]
        return torch.einsum("bstd,bst->bsd", y.view(*chosen.shape, -1), shares.softmax(-1))

    def _run(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """Every row through its expert; rows of shape (B S T, D) and the experts of each, in order."""
        up = self._product("up", rows, ids, ends)
        inner = self.activation(self._product("gate", rows, ids, ends)) * up if self.gated else self.activation(up)
        return self._product("down", inner, ids, ends)

    def _product(self, name: str, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        y, bias = _grouped_product(rows, getattr(self, name), ends), getattr(self, f"{name}_bias")
        return y if bias is None else y + bias[ids]


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows `ends[e - 1]` to `ends[e]` times `weights[e]`.

    PyTorch's own product is captured in bfloat16 alone; in other formats it is the one of `transformers`.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    try:
        import transformers.integrations.moe  # noqa: F401  (it defines the op)
    except ImportError as error:
        raise AutoparError(
            f"Experts in {str(rows.dtype).removeprefix('torch.')} need the grouped product of transformers, as PyTorch "
            "has one for bfloat16: pip install 'autopar[transformers]', or choose bfloat16."
        ) from error
    found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return found


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(*shape), std=INIT_STD))


class TransformerBlock(nn.Module):
    """Attention, then MLP or experts, each with its norm and added to the residual stream.

    With `looks_back`, cross-attention to the encoder's result comes between them.
    """

    def __init__(self, blocks: Blocks, *, causal: bool, looks_back: bool = False) -> None:
        super().__init__()
        self.post_norm = blocks.post_norm
        self.attention_norm = norm(blocks)
        self.attention = (LatentAttention if blocks.latent else Attention)(blocks, causal=causal)
        self.memory_norm = norm(blocks) if looks_back else None
        self.memory_attention = Attention(blocks, causal=False, looks_back=True) if looks_back else None
        self.mlp_norm = norm(blocks)
        self.mlp = ExpertLayer(blocks) if blocks.experts else MLP(blocks)
        shared = replace(blocks, ffn=blocks.shared_experts * blocks.ffn) if blocks.shared_experts else None
        self.shared_mlp = MLP(shared) if shared else None
        self.dropout = dropout(blocks)

    def forward(self, x: Tensor, positions: Positions = NO_POSITIONS, memory: Tensor | None = None) -> Tensor:
        """BSD -> BSD."""
        if self.post_norm:
            x = self.attention_norm(x + self.dropout(self.attention(x, positions)))
            return self.mlp_norm(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        if self.memory_norm is not None and self.memory_attention is not None:
            looked_up = self.memory_attention(self.memory_norm(x), memory=memory)
            x = x + self.dropout(looked_up)
        x_normed = self.mlp_norm(x)
        y = self.mlp(x_normed)
        return x + self.dropout(y if self.shared_mlp is None else y + self.shared_mlp(x_normed))
