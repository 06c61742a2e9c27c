"""Arguments of torch.export for captures that leave sizes of inputs open.

The captured graph has symbols where a graph of one batch has numbers; `autopar.passes.close_sizes` puts the numbers
in. `autopar.program.captures` decides which sizes are left open.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import pytree

OpenDims = Sequence[Sequence[int]]  # of every tensor among the inputs, in pytree order


def open_to_export(
    wrapper: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: OpenDims
) -> dict[str, Any]:
    """Additional arguments of `torch.export.export(wrapper, args, kwargs)` that leave dims of inputs open.

    Export (2.13) takes open dims of keyword arguments only where `forward` names them. So the forward of `wrapper`
    gets a signature that does.
    """
    if not any(dims):
        return {}
    remaining = iter(dims)

    def asked(x: Any) -> dict[int, Any] | None:
        if not isinstance(x, Tensor):
            return None
        return dict.fromkeys(next(remaining), torch.export.Dim.AUTO)

    run, kinds = wrapper.forward, inspect.Parameter

    def forward(*batch: Any, **named: Any) -> Any:
        return run(*batch, **named)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kinds("batch", kinds.VAR_POSITIONAL), *(kinds(k, kinds.KEYWORD_ONLY) for k in kwargs)]
    )
    wrapper.__dict__["forward"] = forward
    positional, named = pytree.tree_map(asked, (args, dict(kwargs)))
    return {"dynamic_shapes": ({"batch": positional} if args else {}) | named}
