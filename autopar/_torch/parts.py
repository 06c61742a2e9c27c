"""DTensors of which a rank has a part, and functions of torch that would take the part for the whole.

A tensor knows by its mesh whose it is: parameters, what `detach`, `clone` and `state_dict` make of them, their
gradients and the states of optimizers lie on one mesh. So what is refused here is refused however a script came by the
tensors: in a dict of its own, in a list that it made before, one alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad, convert_parameters

from autopar.errors import StepError

# Whether a model has a DTensor as all ranks have theirs ("model"), as those of one pipeline stage ("stage"), or not.
KindOf = Callable[[DTensor], Literal["", "model", "stage"]]
_FOR_A_FILE = "is_shard_for_a_file"  # an attribute of the DTensors that `for_a_file` makes


def refuse_parts(kind_of: KindOf) -> Callable[[], None]:
    """Makes `torch.save`, and norms and vectors of `torch.nn.utils`, raise StepError where they see a part.

    Whole tensors are pickled as plain ones.

    Args:
        kind_of: function that says whether a DTensor is of a model, and whether of one pipeline stage.

    Returns a function that restores the behaviour of torch.
    """
    _kinds().append(kind_of)
    return lambda: _kinds().remove(kind_of)


@functools.cache
def _kinds() -> list[KindOf]:
    """The registered functions; the first call replaces functions of torch, where other functions of torch look."""
    DTensor.__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]
    clip_grad._get_total_norm = _of_whole(clip_grad._get_total_norm)
    torch.nn.utils.get_total_norm = _of_whole(torch.nn.utils.get_total_norm)
    of_vectors: Any = convert_parameters
    of_vectors._check_param_device = _of_whole(of_vectors._check_param_device)
    return []


def _kind(x: Any) -> str:
    if not isinstance(x, DTensor):
        return ""
    return next((kind for kind_of in _kinds() if (kind := kind_of(x))), "")


def has_shards(x: DTensor) -> bool:
    """Whether other ranks have other parts of a DTensor, or other terms of a sum."""
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return any(not placement.is_replicate() and size > 1 for placement, size in sizes)


def for_a_file(x: Any) -> Any:
    """The same tensor, which is pickled with its part: one file has the part of one rank."""
    if not isinstance(x, DTensor):
        return x
    found = x.detach()
    setattr(found, _FOR_A_FILE, True)
    return found


def _reduced(x: DTensor, protocol: Any) -> Any:
    kind = _kind(x)
    if not kind or getattr(x, _FOR_A_FILE, False):
        return Tensor.__reduce_ex__(x, protocol)
    if kind == "stage" or has_shards(x):
        raise StepError(_not_whole(x, kind))
    local = x._local_tensor
    plain = nn.Parameter(local, x.requires_grad) if isinstance(x, nn.Parameter) else local
    return plain.__reduce_ex__(protocol)


def _not_whole(x: DTensor, kind: str) -> str:
    lies = "is of one pipeline stage" if kind == "stage" else f"lies as {list(x.placements)}"
    return (
        f"A tensor of shape {list(x.shape)} is saved (torch.save) or pickled that {lies}, so that this rank has a part "
        "of its model: such a file is not the model, and ranks that save under one name overwrite each other. Save "
        "with autopar.checkpoint.save_checkpoint(folder, model, optimizer) or model.export(folder) on all ranks "
        "(docs/checkpoints.md; after shard_ docs/backend.md)."
    )


def _of_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of parameters or gradients that raises StepError for those of one pipeline stage."""

    @functools.wraps(function)
    def checked(given: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = given if isinstance(given, Tensor) else list(given)
        if any(_kind(x) == "stage" for x in (given if isinstance(given, list) else [given])):
            raise StepError(
                "A norm or a vector (torch.nn.utils) is made of parameters or gradients of this rank's pipeline "
                "stages, and those of other stages lie on other ranks, so that each rank would have another. "
                "model.clip_grad_norm_(max_norm) has the norm of all gradients; for that of some, and for vectors, "
                "take a recipe without stages, such as autopar.compile(model, recipe='zero3')."
            )
        return function(given, *args, **kwargs)

    return checked
