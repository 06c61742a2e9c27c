"""The model of the recorded command lines that prove a plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One linear layer, and a batch."""
    return nn.Linear(8, 8), (torch.ones(8, 8),)
