"""`torch.ops.autopar.keep_mask`: the mask of a dropout, drawn from a key. See [Note: keys of random ops]."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_mask(x: Tensor, key: Tensor, p: float) -> Tensor:
    """A bool mask of the shape of `x`, False with probability `p`; a function of key and shape alone."""
    generator = torch.Generator(device=x.device).manual_seed(int(key.item()))
    return torch.rand(x.shape, generator=generator, device=x.device) >= p


def register() -> torch.library.Library:
    """Defines the op; it lives as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    library.define("keep_mask(Tensor x, Tensor key, float p) -> Tensor")
    library.impl("keep_mask", keep_mask, "CompositeExplicitAutograd")
    library.impl("keep_mask", lambda x, key, p: x.new_empty(x.shape, dtype=torch.bool), "Meta")
    return library


LIBRARY = register()
