"""The results of a step, put together from those of its micro-batches (`autopar.analysis.extras`).

A micro-batch leaves a rank with a part of each result, in the layout of the plan. Rows of further micro-batches come
behind those of the first, so that the batch is a dim of two factors, of which the plan splits the second:

    (rows of a micro-batch,)  split by S(0)      ->      (micro-batches, rows of one)  split by S(0.1)

Micro-batches of different sizes make up no such dim: their results are gathered one by one, and put together whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.analysis.extras import Rows
from autopar.ir import Mesh, R, State, local_factors
from autopar.program.program import Program, TensorSpec
from autopar.runtime.collectives.transfer import converted
from autopar.runtime.execute.outputs import as_dtensor
from autopar.runtime.ranks.world import World


@dataclass(frozen=True)
class StepResults:
    """The results of a step on this rank.

    Attributes:
        loss: loss of the batch, the same on every rank.
        extras: this rank's part of each extra result, over all micro-batches.
    """

    loss: Tensor
    extras: Sequence[Tensor] = ()


def joined(
    program: Program, pieces: Sequence[Sequence[Tensor]], shares: Sequence[Sequence[float]], world: World
) -> list[Tensor]:
    """Each extra result in the layout of its `spec_of_batch`, of its pieces from every micro-batch.

    Args:
        program: the program of a step of the whole model.
        pieces: for every micro-batch the local extra results; what follows them is not read.
        shares: for every extra result the share of each micro-batch.
        world: the mesh of the ranks.
    """
    if program.smaller is not None:
        pieces = [_whole(program.of(i), own, world) for i, own in enumerate(pieces)]
    columns = zip(program.extras, zip(*pieces, strict=True), shares, strict=False)
    return [_joined(program, i, column, own) for i, (_, column, own) in enumerate(columns)]


def _whole(program: Program, results: Sequence[Tensor], world: World) -> list[Tensor]:
    """The extra results of a micro-batch, gathered on every rank."""
    specs = zip(results, program.outputs, program.extras, strict=False)
    return [gathered(x, spec, world) for x, spec, _ in specs]


def gathered(x: Tensor, spec: TensorSpec, world: World) -> Tensor:
    """The whole of a tensor of which this rank has the part that a spec says."""
    return converted(x, spec.dims, spec.layout, (R,) * len(spec.layout), world)


def _joined(program: Program, number: int, pieces: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    extra, mesh = program.extras[number], program.plan.mesh
    if len(pieces) == 1 or (extra.rows is None and extra.objective is None):
        return pieces[-1]
    if extra.rows is not None:
        spec = program.outputs[number]
        if program.smaller is not None:
            spec = replace(spec, layout=(R,) * len(spec.layout))
        return _concatenated(pieces, spec, extra.rows, mesh)
    # The share of a micro-batch in which nothing counts is 0, and its result 0 / 0.
    counted = [x if share == 1 else x * share for x, share in zip(pieces, shares, strict=True) if share]
    return torch.stack(counted or list(pieces)).sum(0, dtype=pieces[0].dtype)


def _concatenated(pieces: Sequence[Tensor], spec: TensorSpec, rows: Rows, mesh: Mesh) -> Tensor:
    """Rows of one micro-batch after those of another, wherever the batch is among the factors of a dim."""
    factors = [*local_factors(spec.dims, spec.layout, mesh)[rows.dim]]
    factors[rows.factor] = -1  # ranks may have rows of different numbers
    cut = [x.unflatten(rows.dim, factors) for x in pieces]
    whole = torch.cat(cut, dim=rows.dim + rows.factor)
    return whole.flatten(rows.dim, rows.dim + len(factors) - 1)


# --- as the user gets them


def delivered(
    program: Program, results: StepResults, world: World, *, micro_batches: int, as_dtensors: bool, input_parts: int
) -> list[Tensor]:
    """The results over the whole batch, the loss last: whole on every rank, or as DTensors.

    Args:
        program: the program of a step of the whole model.
        results: this rank's loss, and its part of each extra result.
        micro_batches: number of micro-batches.
        as_dtensors: whether a tensor that is split is delivered as a DTensor.
        input_parts: number of parts in which ranks gave the batch, each its own; 1 where they gave it whole.
    """
    extras = [
        _delivered(
            x,
            spec_of_batch(program, number, micro_batches),
            program.extras[number].rows,
            world,
            as_dtensors=as_dtensors,
            parts=input_parts if micro_batches > 1 else 1,
        )
        for number, x in enumerate(results.extras)
    ]
    return [*extras, results.loss]


def _delivered(
    x: Tensor, spec: TensorSpec, rows: Rows | None, world: World, *, as_dtensors: bool, parts: int
) -> Tensor:
    replicated = (R,) * len(spec.layout)
    is_out_of_order = rows is not None and parts > 1
    if as_dtensors and not is_out_of_order and x.ndim:
        return as_dtensor(x, spec, world)
    x = gathered(x, spec, world)
    if rows is not None and is_out_of_order:
        x = _in_order_of_ranks(x, spec, rows, parts)
    if as_dtensors and x.ndim:
        return as_dtensor(x, replace(spec, layout=replicated), world)
    return x


def spec_of_batch(program: Program, number: int, micro_batches: int) -> TensorSpec:
    """The spec of an extra result over all micro-batches: their number and their rows are two factors of the batch.

    Where some are smaller, the batch is one factor of a tensor that every rank has whole.
    """
    spec, rows = program.outputs[number], program.extras[number].rows
    if program.smaller is not None:
        return _spec_of_whole(program, number, micro_batches)
    if rows is None or micro_batches == 1:
        return spec
    dims, shape = list(spec.dims), list(spec.shape)
    factors = dims[rows.dim]
    dims[rows.dim] = (*factors[: rows.factor], micro_batches, *factors[rows.factor :])
    shape[rows.dim] *= micro_batches

    def moved(state: State) -> State:
        is_behind = state.kind == "S" and state.dim == rows.dim and state.factor >= rows.factor
        return state._replace(factor=state.factor + 1) if is_behind else state

    return replace(spec, dims=tuple(dims), shape=tuple(shape), layout=tuple(map(moved, spec.layout)))


def _spec_of_whole(program: Program, number: int, micro_batches: int) -> TensorSpec:
    spec, rows = program.outputs[number], program.extras[number].rows
    dims, shape = list(spec.dims), list(spec.shape)
    if rows is not None:
        shape[rows.dim] = sum(program.of(i).outputs[number].shape[rows.dim] for i in range(micro_batches))
        before, after = dims[rows.dim][: rows.factor], dims[rows.dim][rows.factor + 1 :]
        dims[rows.dim] = (*before, shape[rows.dim] // math.prod((*before, *after)), *after)
    return replace(spec, dims=tuple(dims), shape=tuple(shape), layout=(R,) * len(spec.layout))


def _in_order_of_ranks(x: Tensor, spec: TensorSpec, rows: Rows, parts: int) -> Tensor:
    """The rows of each rank together, where every micro-batch had rows of all ranks."""
    factors = list(spec.dims[rows.dim])
    place = rows.factor + 1  # that of the rows of a micro-batch
    cut = [*factors[:place], parts, factors[place] // parts, *factors[place + 1 :]]
    x = x.unflatten(rows.dim, cut).transpose(rows.dim + place - 1, rows.dim + place)
    return x.flatten(rows.dim, rows.dim + len(cut) - 1).contiguous()
