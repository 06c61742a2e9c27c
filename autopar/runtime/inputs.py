"""A call's arguments: matched with a program, checked, cut into micro-batches and into this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import StepError
from autopar.ir import local_shape
from autopar.program import Program, TensorSpec
from autopar.runtime.simulate import shard
from autopar.runtime.world import World

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flattened.

    Attributes:
        tensors: tensor leaves in pytree order.
        literals: leaf position -> value, for the other leaves.
        spec: the pytree of (args, kwargs); kwargs are ordered by name.
    """

    tensors: tuple[Tensor, ...]
    literals: Mapping[int, Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        leaves, spec = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        literals = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return cls(tensors, literals, spec)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors in place."""
        remaining = iter(tensors)
        count = len(self.tensors) + len(self.literals)
        leaves = [self.literals[i] if i in self.literals else next(remaining) for i in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def fits(self, program: Program) -> bool:
        """Whether the program was captured for arguments of this tree, these literals and dtypes."""
        return (
            self.spec == program.in_spec
            and _typed(self.literals) == _typed(program.literals)
            and [x.dtype for x in self.tensors] == [s.dtype for s in program.inputs]
        )


def _typed(literals: Mapping[int, Any]) -> dict[int, tuple[type, Any]]:
    """Literals with their types: 1, 1.0 and True are equal, and make different graphs."""
    return {i: (type(value), value) for i, value in literals.items()}


def as_whole(arguments: Arguments, program: Program, micro_batches: int) -> Arguments:
    """Arguments that the program accepts, with tensors of the global shapes and without values."""
    tensors = [
        torch.empty(whole_shape(spec, micro_batches), dtype=spec.dtype, device="meta")
        for spec in program.inputs
    ]
    return replace(arguments, tensors=tuple(tensors))


def first_micro_batch(arguments: Arguments, micro_batches: int) -> list[Tensor]:
    """What to capture: of every tensor the first part along dim 0. Raises StepError if it has no such."""
    if micro_batches == 1:
        return list(arguments.tensors)
    for number, x in enumerate(arguments.tensors):
        if x.ndim and x.shape[0] % micro_batches:
            raise StepError(
                f"Tensor {number} of the batch has shape {list(x.shape)}, and {micro_batches} "
                f"micro-batches do not divide its first dim. Use a batch size that is a multiple of "
                f"{micro_batches}, or another micro_batches."
            )
    return [x[: x.shape[0] // micro_batches] if x.ndim else x for x in arguments.tensors]


def whole_shape(spec: TensorSpec, micro_batches: int) -> Shape:
    """The global shape of an input of a whole step."""
    return _times(spec.shape, micro_batches)


def part_shape(spec: TensorSpec, micro_batches: int, world: World) -> Shape:
    """The shape of this rank's part of an input of a whole step."""
    return _times(local_shape(spec.dims, spec.layout, world.mesh), micro_batches)


def _times(shape: Shape, micro_batches: int) -> Shape:
    return (shape[0] * micro_batches, *shape[1:]) if shape else shape


def accepts(program: Program, arguments: Arguments, micro_batches: int, world: World) -> bool:
    """Whether every tensor has the global or the local shape."""
    return all(
        tuple(x.shape) in (whole_shape(spec, micro_batches), part_shape(spec, micro_batches, world))
        for spec, x in zip(program.inputs, arguments.tensors, strict=True)
    )


def cut_inputs(
    program: Program, arguments: Arguments, micro_batches: int, world: World
) -> list[list[Tensor]]:
    """For every micro-batch this rank's inputs.

    Raises StepError for a tensor of another shape, and for one whose gradient would be lost.
    """
    if program.is_step or torch.is_grad_enabled():
        _refuse_gradients(program, arguments)
    columns = [
        _cut_input(spec, x, micro_batches, world)
        for spec, x in zip(program.inputs, arguments.tensors, strict=True)
    ]
    return [[column[i] for column in columns] for i in range(micro_batches)]


def _refuse_gradients(program: Program, arguments: Arguments) -> None:
    for spec, x in zip(program.inputs, arguments.tensors, strict=True):
        if x.requires_grad:
            raise StepError(
                f"Input {spec.name!r} requires a gradient, and gradients flow to parameters only. Give "
                "x.detach(), or make what computes it part of the model that is compiled."
            )


def _cut_input(spec: TensorSpec, x: Tensor, micro_batches: int, world: World) -> list[Tensor]:
    whole, part = (whole_shape(spec, micro_batches), part_shape(spec, micro_batches, world))
    if tuple(x.shape) not in (whole, part):
        raise _wrong_shape(spec, x, whole, part, micro_batches)
    is_whole = tuple(x.shape) == whole
    pieces = x.chunk(micro_batches) if x.ndim else [x] * micro_batches
    if is_whole:
        pieces = [shard(y, spec.dims, spec.layout, world.mesh, world.rank) for y in pieces]
    return [y.detach().to(world.device, non_blocking=True).contiguous() for y in pieces]


def _wrong_shape(
    spec: TensorSpec, x: Tensor, whole: Shape, part: Shape, micro_batches: int
) -> StepError:
    count = f" ({micro_batches} micro-batches)" if micro_batches > 1 else ""
    return StepError(
        f"Input {spec.name!r} has shape {list(x.shape)}; the step was made for the global shape "
        f"{list(whole)} or this rank's part of it, {list(part)}{count}. Give one of these: drop or pad "
        "a last, smaller batch (DataLoader(..., drop_last=True))."
    )
