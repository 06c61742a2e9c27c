"""LoRA (arXiv 2106.09685): a frozen model with trained products of low rank beside those of attention.

    y = x W^T + (x A^T) B^T

NeMo puts them beside the products into and out of attention (`LoRA.target_modules` at 02a0e6a: linear_qkv and
linear_proj), and so does MLPerf's benchmark of Llama 2 70B, with rank 16 (mlcommons/training_results_v4.0, NVIDIA's
llama2_70b_lora: `target_modules` and `adapter_dim` of conf/megatron_gpt_peft_tuning_config.yaml). Its dropout is left
out.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

RANK = 16


class LowRank(nn.Module):
    """A frozen linear layer with an adapter.

    Args:
        plain: the layer.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain
        self.down = nn.Parameter(plain.weight.new_zeros(RANK, plain.in_features))
        self.up = nn.Parameter(plain.weight.new_zeros(plain.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + F.linear(F.linear(x, self.down), self.up)


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with adapters beside the products of attention, which alone are trained."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".attention." in path:
            model.set_submodule(path, LowRank(module))
    return model
