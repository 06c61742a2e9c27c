"""Models whose layers are frozen in 4 bits, with trained adapters of low rank beside them, to be planned and priced.

    y = x W^T + (x A^T) B^T,    W = (code - 7.5) scale

QLoRA (arXiv 2305.14314): W has a code of 4 bits for each number and a scale of 16 bits for each block of 64 along a
row, 0.53 bytes a number; only A of shape (rank, in) and B of shape (out, rank) are trained. Its NormalFloat codes mean
other numbers than these even steps, in as many bytes. Embeddings, norms and the head stay in 16 bits, and frozen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError

SUFFIX = "+qlora"  # of a model's name
RANK = 16
_BLOCK = 64


class AdaptedLinear(nn.Module):
    """A linear layer in 4 bits, with an adapter.

    Args:
        plain: layer whose sizes, bias and device it takes; its input is a multiple of 64.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        inputs, outputs = plain.in_features, plain.out_features
        device, dtype = plain.weight.device, plain.weight.dtype
        self.codes = nn.Parameter(
            torch.zeros(outputs, inputs // 2, dtype=torch.uint8, device=device), requires_grad=False
        )
        self.scales = nn.Parameter(torch.ones(outputs, inputs // _BLOCK, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.zeros(RANK, inputs, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.zeros(outputs, RANK, dtype=dtype, device=device))
        self.bias = plain.bias

    def weight(self) -> Tensor:
        """The numbers of the frozen weight, of shape (out, in)."""
        codes = torch.stack([self.codes // 16, self.codes % 16], -1).flatten(-2)
        blocks = (codes.to(self.scales.dtype) - 7.5).unflatten(-1, (-1, _BLOCK))
        return (blocks * self.scales.unsqueeze(-1)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias) + F.linear(F.linear(x, self.down), self.up)


def adapted(model: nn.Module, stacks: tuple[str, ...]) -> nn.Module:
    """The model with adapters in its layers, which alone are trained.

    Args:
        model: model that is changed.
        stacks: paths of its lists of layers.
    """
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        inside = any(path.startswith(f"{stack}.") for stack in stacks)
        if inside and type(module) is nn.Linear and module.in_features % _BLOCK == 0:
            made = AdaptedLinear(module)
            made.scales.requires_grad_(False)
            model.set_submodule(path, made)
    if not any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise AutoparError("No layer of the model has linear modules that adapters can be put beside.")
    return model
