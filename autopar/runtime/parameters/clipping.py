"""Clipping of gradients by their norm over the whole model.

The norm of a vector is the norm of the norms of its parts. So every rank computes the norm of the gradients that
it alone counts, and the ranks exchange these norms, one mesh axis after another.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import PeerError, StepError
from autopar.ops.collectives import group_name, naming_failures
from autopar.runtime.ranks.world import World


@torch.no_grad()
def clip_grad_norm_(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    world: World,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[str] = (),
) -> Tensor:
    """Scales gradients in place so that their norm over all ranks is at most `max_norm`.

    Args:
        named_parameters: parameters of this rank; each gradient has its parameter's layout.
        world: the mesh on which they lie.
        max_norm: the bound; 1e-6 is added to the norm before it divides, as in torch.nn.utils.
        norm_type: p of the p-norm, above zero, or infinity.
        stages: group of the ranks with the other parameters; None if every rank has a part of each parameter.
        counted_elsewhere: parameters whose gradients another rank of `stages` also has, and counts.

    Returns:
        The norm before clipping, of shape `()`, the same on every rank.

    Raises StepError for a `norm_type` that is not a norm, PeerError if another rank died or hangs.
    """
    if not norm_type > 0:
        raise StepError(f"norm_type is {norm_type}; a p-norm has p above 0, such as 2.0 or inf.")
    named = list(named_parameters)
    try:
        total = gradient_norm(named, world, norm_type, stages=stages, counted_elsewhere=counted_elsewhere)
    except PeerError as error:
        raise world.explain(error, "Clipping gradients") from error
    norm = total.to(_number_format(p.grad for _, p in named))
    torch.nn.utils.clip_grads_with_norm_([p for _, p in named], max_norm, norm)
    return norm


def gradient_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    world: World,
    norm_type: float,
    *,
    stages: dist.ProcessGroup | None,
    counted_elsewhere: Collection[str],
) -> Tensor:
    """The norm of all gradients, in float64 and the same on every rank; see `clip_grad_norm_` for the arguments."""
    counted = [p.grad for name, p in named_parameters if p.grad is not None and name not in counted_elsewhere]
    return _norm_over([*world.covering, stages], _own_norm(counted, norm_type, world), norm_type)


def _number_format(grads: Iterable[Tensor | None]) -> torch.dtype:
    """The dtype in which the norm of these gradients is returned, as in torch.nn.utils."""
    found = {grad.dtype for grad in grads if grad is not None}
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def _own_norm(grads: Iterable[Tensor], norm_type: float, world: World) -> Tensor:
    """The norm of the gradients of this rank that no earlier rank has too."""
    # an infinity norm of no entries is not defined
    own = [local for local in map(_first_copy, grads) if local is not None and local.numel()]
    return torch.nn.utils.get_total_norm(own, norm_type).to(world.device)


def _first_copy(grad: Tensor) -> Tensor | None:
    """The local part of a gradient on the first of the ranks that have the same part, else None."""
    if not isinstance(grad, DTensor):
        return grad
    place = grad.device_mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh of its parameters"
    copies = zip(grad.placements, place, strict=True)
    if any(placement.is_replicate() and position > 0 for placement, position in copies):
        return None
    return grad.to_local()


def _norm_over(groups: Iterable[dist.ProcessGroup | None], norm: Tensor, norm_type: float) -> Tensor:
    """The norm of a whole, given the norms of its parts.

    The norms are gathered rather than summed as powers, so that nothing overflows and a NaN is kept for every p. They
    are sent as float64, because a rank without gradients does not know the dtype of the others.
    """
    total = norm.double().reshape(1)
    for group in groups:
        if group is not None:
            parts = total.new_empty(group.size())
            with naming_failures("all_gather", group_name(group)):
                _torch.start_all_gather(parts, total, group).wait()
            total = torch.linalg.vector_norm(parts, norm_type).reshape(1)
    return total.squeeze(0)
