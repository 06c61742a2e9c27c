"""AdamW with moments in bfloat16, for parameters in any format; it needs the extra `autopar[torchao]`.

The 8-bit, 4-bit and fp8 optimizers of `torchao.optim` need nothing of this module: a compiled model's
parameters are what they take, see docs/precision.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.optim import AdamW8bit


class AdamWBf16(AdamW8bit):
    """AdamW of torchao with moments in bfloat16, the training state `adamwbf16`.

    A moment of fewer than 4,096 elements on a rank stays in the parameter's own format, as it does in all
    optimizers of torchao. Arithmetic is in float32. Arguments are those of `torchao.optim.AdamW8bit`.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, block_size=1, **options)

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
        """Zeros for a moment of a rank's part of a parameter; torchao calls it for what has its least size."""
        return torch.zeros(p.shape, dtype=torch.bfloat16, device=p.device)
