"""The backend "autopar" of `torch.compile`, and `autopar.shard_`."""

from autopar.versions import check_torch

check_torch()  # before what a torch that is too old cannot import

from autopar.backend.backend import autopar  # noqa: E402
