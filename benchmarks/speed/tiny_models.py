"""Twelve tiny and small models as people write them, each with a batch: inputs and labels, or inputs alone.

A model of inputs alone returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, CLASSES = 32, 10

Example = tuple[nn.Module, tuple[Tensor, ...]]


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


def encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def mlp() -> Example:
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, CLASSES))
    return nn.Sequential(*layers), (torch.randn(ROWS, 64), labels(ROWS))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(1000, 64),
            nn.LSTM(64, 64, batch_first=True),
            nn.Linear(64, 10),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


def lstm() -> Example:
    return LSTM(), (torch.randint(1000, (ROWS, 32)), labels(ROWS))


def cnn() -> Example:
    layers = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, CLASSES)), (torch.randn(ROWS, 1, 28, 28), labels(ROWS))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 784))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        again = self.decoder(mean + torch.randn_like(spread) * (0.5 * spread).exp())
        lost = F.binary_cross_entropy_with_logits(again, x, reduction="sum")
        return lost - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()


def vae() -> Example:
    return VAE(), (torch.rand(64, 784),)


class GPT(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = nn.Embedding(256, width), nn.Embedding(64, width), encoder(width, 2)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = self.tokens(tokens[:, :-1]) + self.places.weight[: length - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(length - 1)
        found = self.head(self.norm(self.blocks(h, mask=mask, is_causal=True)))
        return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> Example:
    return GPT(), (torch.randint(256, (16, 65)),)


class ViT(nn.Module):
    """After vit-pytorch's simple_vit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Linear(192, width), encoder(width, 4)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))
        self.register_buffer("places", torch.randn(16, width))

    def forward(self, x: Tensor) -> Tensor:
        cut = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.patches(cut) + self.places).mean(1))


def vit() -> Example:
    return ViT(), (torch.randn(ROWS, 3, 32, 32), labels(ROWS))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 16), (16, 32), (32, 32)))
        self.up2, self.up1, self.out = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((64, 16), (32, 16), (16, 1)))

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(F.max_pool2d(a, 2)))
        c = F.silu(self.middle(F.max_pool2d(b, 2)))
        d = F.silu(self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1)))
        return F.mse_loss(self.out(self.up1(torch.cat([F.interpolate(d, scale_factor=2.0), a], 1))), x)


def unet() -> Example:
    return UNet(), (torch.randn(8, 1, 32, 32),)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, 16) for _ in range(8))
        self.top = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.top(torch.cat([t(numbers[:, i]) for i, t in enumerate(self.tables)], 1))


def tables() -> Example:
    return Tables(), (torch.randint(2000, (128, 8)), labels(128))


class GNN(nn.Module):
    edges: Tensor
    classes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, CLASSES)
        self.register_buffer("edges", torch.randint(512, (2, 4096)))
        self.register_buffer("classes", labels(512))

    def forward(self, nodes: Tensor) -> Tensor:
        here, there = self.edges
        h = F.relu(torch.zeros_like(nodes).index_add(0, there, self.first(nodes)[here]))
        found = torch.zeros(512, CLASSES).index_add(0, there, self.second(h)[here])
        return F.cross_entropy(found, self.classes)


def gnn() -> Example:
    return GNN(), (torch.randn(512, 64),)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(64, 4), nn.Linear(64, CLASSES)
        self.up, self.down = (nn.Parameter(torch.randn(4, *s) / 8) for s in ((64, 128), (128, 64)))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)  # NE
        h = F.gelu(torch.einsum("ni,eih->neh", x, self.up))
        return self.head(x + torch.einsum("ne,neh,eho->no", weights, h, self.down))


def experts() -> Example:
    return Experts(), (torch.randn(256, 64), labels(256))


def autoencoder() -> Example:
    return Autoencoder(), (torch.randn(16, 3, 32, 32),)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        down = (nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        up = (nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2))
        self.layers = nn.Sequential(*down, *up)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


class Classifier(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(1000, width), encoder(width, 3), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens)).mean(1))


def transformer() -> Example:
    return Classifier(), (torch.randint(1000, (16, 64)), labels(16))


TINY: dict[str, Callable[[], Example]] = {
    each.__name__: each
    for each in (mlp, lstm, cnn, vae, gpt, vit, unet, tables, gnn, experts, autoencoder, transformer)
}
