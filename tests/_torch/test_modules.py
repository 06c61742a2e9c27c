"""Base classes that torch.nn keeps to itself."""

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from autopar import _torch


def test_every_batch_norm_and_dropout_has_the_base():
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(norm, _torch.BatchNormBase)
    for dropout in (nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout):
        assert issubclass(dropout, _torch.DropoutBase)
    assert not issubclass(nn.LayerNorm, (_torch.BatchNormBase, _torch.DropoutBase))


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[bool] = []

    def ask(self, x: Tensor) -> Tensor:
        self.heard.append(_torch.is_computing())
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.ask, x, use_reentrant=False)


def test_a_forward_computes_in_backward_and_in_frames_of_dynamo_too():
    model, x = _Asking(), torch.ones(2, requires_grad=True)
    model.ask(x)
    model(x).sum().backward()
    torch.compile(model.ask, backend="eager")(x)
    assert model.heard == [False, True, True, True]
