"""A model of packed documents, by flex_attention with four masks, under plans of every kind against one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autopar

WIDTH, VOCAB = 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, mask):
        h = self.norm(x)
        q, k, v = (own(h).unflatten(-1, (-1, 4)).transpose(1, 2) for own in (self.q, self.k, self.v))
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embed = kind, nn.Embedding(VOCAB, WIDTH)
        self.layers, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, targets):
        begins = tokens == 0
        documents, prefixes = begins.cumsum(1), begins.int().argmax(1)
        masks = {
            "documents": lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
            "causal": lambda b, h, q, k: q >= k,
            "window": lambda b, h, q, k: (q >= k) & (q - k < 4),
            "prefix": lambda b, h, q, k: (k < prefixes[b]) | (q >= k),
        }
        mask = create_block_mask(masks[self.kind], len(tokens), None, *2 * tokens.shape[1:], device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


PLANS = {
    "random 1": ({"dp": 2, "tp": 2}, {"plan": "random", "seed": 1}),
    "random 2": ({"dp": 2, "tp": 2}, {"plan": "random", "seed": 2}),
    "tp+sp": ({"dp": 2, "tp": 2}, {"recipe": "dp:zero3,tp:tp+sp"}),
    "pp": ({"pp": 2, "dp": 2}, {"recipe": "pp:1f1b,dp:zero1"}),
    "cp": ({"cp": 2}, {"recipe": "cp:cp"}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["documents", "causal", "window", "prefix"])
def test_a_plan_gives_the_loss_and_gradients_of_one_device(kind, plan):
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, most, (4, 16), generator=generator) for most in (4, VOCAB))
    mesh, how = PLANS[plan]
    assert autopar.verify(Packed(kind).double(), (tokens, targets), mesh=mesh, **how).passed
