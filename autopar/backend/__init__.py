"""The backend "autopar" of `torch.compile`, and `autopar.shard_`."""

from autopar.backend.backend import autopar

__all__ = ["autopar"]
