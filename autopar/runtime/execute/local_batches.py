"""Batches that ranks give in parts: each rank gives its own rows, as a DistributedSampler deals them out.

    rank 0 gives [a b], rank 1 gives [c d]        the step is that of the batch [a b c d]

Where the plan cuts the batch over all ranks alike, each has what it computes with. Elsewhere, as under tensor
parallelism, a rank computes with rows of others too, and the parts are gathered.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.capture.rows import have_rows
from autopar.program.program import Program
from autopar.runtime.execute.inputs import Arguments, Shape, part_shapes
from autopar.runtime.ranks.all_ranks import AllRanks
from autopar.runtime.ranks.world import World


def are_parts(arguments: Arguments) -> list[bool]:
    """For every tensor, whether it has a row for every sample: as many as the first tensor with dims has.

    What came as a DTensor is whole.
    """
    shapes = [() if i in arguments.whole else x for i, x in enumerate(arguments.shapes)]
    return have_rows(shapes)


def shapes_of_whole(arguments: Arguments, ranks: int) -> tuple[Shape, ...]:
    """The shapes of the batch that the parts of all ranks make."""
    return tuple(
        (shape[0] * ranks, *shape[1:]) if is_part else shape
        for shape, is_part in zip(arguments.shapes, are_parts(arguments), strict=True)
    )


def whole_or_own(program: Program, arguments: Arguments, micro_batches: int, world: World) -> Arguments:
    """The arguments as the program can cut them: as they are, or gathered from all ranks.

    Raises PeerError if another rank does not take part.
    """
    if world.ranks == 1 or _is_cut_alike(program, arguments, micro_batches):
        return arguments
    parts = zip(arguments.tensors, are_parts(arguments), strict=True)
    with AllRanks("Gathering the batch").naming_failures():
        tensors = tuple(_gathered(x, world) if is_part else x for x, is_part in parts)
    return replace(arguments, tensors=tensors)


def _is_cut_alike(program: Program, arguments: Arguments, micro_batches: int) -> bool:
    """Whether each rank computes with as many rows as it gives, the same ones of every tensor."""
    taken = part_shapes(program, micro_batches)
    parts = zip(program.inputs, taken, arguments.shapes, are_parts(arguments), strict=True)
    cut = [(spec, part == shape) for spec, part, shape, is_part in parts if is_part]
    fits = all(is_fitting for _, is_fitting in cut)
    return fits and len({tuple(map(str, spec.layout)) for spec, _ in cut}) <= 1


def _gathered(x: Tensor, world: World) -> Tensor:
    """The rows of all ranks, in the order of the ranks; differentiable in this rank's own."""
    given = x.to(world.device)
    own = given.detach().contiguous()
    as_bytes = own.view(torch.uint8) if own.dtype == torch.bool else own  # Gloo has no bool
    parts = [torch.empty_like(as_bytes) for _ in range(world.ranks)]
    dist.all_gather(parts, as_bytes, group=world.everyone)
    if x.requires_grad:
        parts[dist.get_rank(world.everyone)] = given
    return torch.cat(parts).view(own.dtype)
