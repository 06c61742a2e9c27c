"""Private base classes of torch.nn."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase

__all__ = ["BatchNormBase", "DropoutBase"]
