"""Outputs of a forward as they are asked for, whole or as DTensors, and DTensors as inputs of one.

[Note: a loss outside] A loss that is computed of `model(...)` sends a gradient back to every output. What that gradient
means follows from the layout in which the output was handed out, axis by axis:

    R       every rank has the same output and computes the same loss of it: the gradients are equal, and one counts
    S(d)    ranks have parts and each computes a loss of its part: the loss of a step is their mean, as under DDP

So the gradient of an output in S is divided by the number of parts, and one in R is compared between the ranks: where
ranks compute different losses of one output, there is no loss of which the gradients would be.

The gradient of an input is that of the loss of a step. That of a part that a rank gave, where outputs are parts, is
multiplied by their number, which makes it that of the rank's own loss: outputs of one model may be inputs of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import StepError
from autopar.ir import Layout, Mesh, R, cuts_chunks, uneven_axes
from autopar.ops.collectives import group_name, naming_failures
from autopar.program.program import TensorSpec
from autopar.runtime.collectives.transfer import converted
from autopar.runtime.execute.settings import Batch, Outputs
from autopar.runtime.failures.failures import blame_parts
from autopar.runtime.parameters.parameters import placements
from autopar.runtime.ranks.world import World


def as_asked(x: Tensor, spec: TensorSpec, world: World, outputs: Outputs, written: Callable[[], str]) -> Tensor:
    """A local output as it is, whole on every rank, or as a DTensor; see [Note: a loss outside] for its backward.

    `written` names a parameter of this rank that was written since the forward, "" where there is none.
    """
    if outputs == "dtensor":
        return as_dtensor(x, spec, world)
    target = (R,) * len(spec.layout) if outputs == "whole" else spec.layout
    x = converted(x, spec.dims, spec.layout, target, world)
    if x.requires_grad and world.ranks > 1:
        x.register_hook(_GradientOfOutput(spec, target, world, written))
    return x


class _GradientOfOutput:
    """A hook that makes the gradient of an output that of the loss of a step, see [Note: a loss outside].

    Args:
        spec: spec of the output.
        layout: layout in which the output was handed out.
        world: the ranks.
        written: as in `as_asked`.
    """

    def __init__(self, spec: TensorSpec, layout: Layout, world: World, written: Callable[[], str]) -> None:
        self._output, self._layout, self._world, self._written = spec, layout, world, written

    def __call__(self, gradient: Tensor) -> Tensor:
        self._refuse_differences(gradient.detach())
        if uneven_axes(self._output.dims, self._layout, self._world.mesh):
            raise StepError(
                f"A gradient came back to a result of model(...) of shape {list(self._output.shape)}, of which ranks "
                "have parts of different sizes: the mean of their losses is not the loss of the batch. Take "
                'autopar.compile(..., outputs="whole") and compute the loss of the whole batch, or give a batch that '
                "the ranks divide."
            )
        states = zip(self._layout, self._world.mesh.sizes, strict=True)
        parts = math.prod(size for state, size in states if state.kind == "S")
        return gradient if parts == 1 else gradient / parts

    def _refuse_differences(self, gradient: Tensor) -> None:
        """Raises StepError on all ranks if some that have the same output have different gradients of it.

        And if a parameter was written on one: torch sees that of plain tensors, and not of the shards of a DTensor.
        """
        found, name = _digest(gradient), self._written()
        extremes = torch.cat([found, -found, found.new_tensor([float(bool(name))])])
        groups = self._groups()
        for group in groups:
            with naming_failures("all_reduce", group_name(group)):
                dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if extremes[4].item():
            raise StepError(
                "One of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name or 'a parameter of another rank'} was written between model(...) and the backward of its "
                "result, which would take the new values. Write it after loss.backward()."
            )
        apart = extremes[:4].view(2, 2).sum(0).max().item()
        norm = max(extremes[1].item(), 0.0)  # -1 where no rank has a finite one
        if apart > math.sqrt(torch.finfo(gradient.dtype).eps) * norm:
            raise _different(self._output, gradient)

    def _groups(self) -> list[dist.ProcessGroup]:
        """The groups that join, one after the other, the ranks to which the same output was handed out."""
        world = self._world
        states = zip(self._layout, world.groups, strict=True)
        alike = [group for state, group in states if state.kind != "S"]
        if world.lines:  # every output is whole where places are vacant
            alike = [*world.covering]
        stages = None if world.pipe is None else world.pipe.group
        return [group for group in (*alike, stages) if group is not None]


def _digest(gradient: Tensor) -> Tensor:
    """Two numbers: the sum of all values with weights by position, and the norm; [0, -1] if one is not finite.

    The weights are products of a random number for every place of every dim. So the sums of gradients that differ
    anywhere differ, but for a chance of zero, and those of ranks that round differently are close.
    """
    x = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # sums of halves may be infinite
    generator = torch.Generator().manual_seed(0)
    while x.ndim:
        x = x @ torch.randn(x.shape[-1], generator=generator).to(x)
    found = torch.stack([x.double(), norm])
    return found.where(found.isfinite().all(), found.new_tensor([0, -1]))


def _different(spec: TensorSpec, gradient: Tensor) -> StepError:
    """The error for ranks that compute different losses of one output."""
    norm = torch.linalg.vector_norm(gradient).item()
    return StepError(
        f"The ranks have different gradients of a result of model(...) of shape {list(spec.shape)}; its norm on this "
        f"rank is {norm:.6g}. Every rank has the same values of it, and must compute the same loss of them: give the "
        "loss the targets of the whole batch on every rank, and seed its random draws alike. For a loss of only this "
        'rank\'s rows use autopar.compile(..., outputs="local"), where gradients are those of the mean over ranks '
        "(docs/training.md)."
    )


def words_of_split(outputs: Sequence[Tensor], specs: Sequence[TensorSpec], world: World, batch: Batch) -> str | None:
    """A warning about outputs of which this rank has only a part; None where it has all that its caller expects.

    A rank that gives rows of its own expects the results of these rows.
    """
    for x, spec in zip(outputs, specs, strict=True):
        split = {
            state.dim: name
            for state, (name, size) in zip(spec.layout, world.mesh.axes, strict=True)
            if state.kind == "S" and size > 1
        }
        if split.keys() - ({0} if batch == "local" else set()):
            along = " and ".join(f"dim {dim} ({axis})" for dim, axis in sorted(split.items()))
            words = (
                f"model(...) returns each rank's part of its results: of one of shape {list(spec.shape)}, split along "
                f'{along}, this rank has {list(x.shape)}, as outputs="local" asks. A loss of it takes the targets of '
                "these rows, and counts as a part of the loss, which is the mean over the ranks. With "
                'autopar.compile(..., outputs="whole") every rank gets all of them, and computes the loss of all.'
            )
            for dim in split:
                blame_parts(x.shape[dim], spec.shape[dim], words)
            return words
    return None


def as_dtensor(x: Tensor, spec: TensorSpec, world: World) -> Tensor:
    """A local output as a DTensor; a single rank returns it as it is.

    DTensor cannot express splits of minor factors, so along such axes the output is first gathered.
    """
    if world.device_mesh is None:
        return x
    target = _nameable(spec, world.mesh)
    x = converted(x, spec.dims, spec.layout, target, world)
    mesh, at = world.device_mesh, placements(target, world.mesh)
    if world.pipe is not None:  # all stages have it, unlike their parameters
        mesh, along = world.pipe.device_mesh, dict(zip(world.mesh.names, at, strict=True))
        at = tuple(along.get(name, Replicate()) for name in mesh.mesh_dim_names or ())
    return DTensor.from_local(
        x,
        mesh,
        at,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=torch.empty(spec.shape, device="meta").stride(),
    )


def local_part(x: DTensor, spec: TensorSpec, world: World) -> Tensor:
    """This rank's part of an input that came as a DTensor on the same mesh, differentiably, in the program's layout.

    Nothing is communicated if the DTensor already has this layout.
    """
    target = _nameable(spec, world.mesh)
    local = x.redistribute(placements=placements(target, world.mesh)).to_local()
    return converted(local, spec.dims, target, spec.layout, world)


def _nameable(spec: TensorSpec, mesh: Mesh) -> Layout:
    """The layout without the splits whose parts are no shards of DTensor."""
    uneven = uneven_axes(spec.dims, spec.layout, mesh)
    states = enumerate(spec.layout)
    return tuple(
        s if s.kind == "S" and (cuts_chunks(spec.dims, s) or (s.factor == 0 and axis not in uneven)) else R
        for axis, s in states
    )
