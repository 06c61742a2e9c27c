"""A model whose function takes a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import LossFunction


def example(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor], LossFunction]:
    """Two layers, with so many samples."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    return model, (torch.ones(batch, 16), torch.zeros(batch, 16)), F.mse_loss
