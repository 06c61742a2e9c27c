"""The `torch.compile` door."""

from autopar.backend.backend import autopar

__all__ = ["autopar"]
