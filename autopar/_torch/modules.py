"""Base classes that torch.nn keeps to itself."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase

__all__ = ["BatchNormBase", "DropoutBase"]
