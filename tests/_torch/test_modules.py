"""Base classes that torch.nn keeps to itself."""

from torch import nn

from autopar import _torch


def test_every_batch_norm_and_dropout_has_the_base():
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(norm, _torch.BatchNormBase)
    for dropout in (nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout):
        assert issubclass(dropout, _torch.DropoutBase)
    assert not issubclass(nn.LayerNorm, (_torch.BatchNormBase, _torch.DropoutBase))
