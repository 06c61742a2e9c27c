"""The share of each micro-batch's results in those of a step, see `autopar.analysis.objective`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.analysis.objective import MicroBatch, Objective
from autopar.errors import StepError
from autopar.ops.collectives import group_name, naming_failures
from autopar.program.program import Program
from autopar.runtime.execute.results import gathered
from autopar.runtime.ranks.world import World


class StepShares(NamedTuple):
    """The weights of micro-batches in the results of a step.

    Attributes:
        results: for every result the shares of its micro-batches, the loss last; none for results in rows.
        terms: for every micro-batch the shares of the terms of the loss, which its program takes after the inputs.
        empties_terms: whether a micro-batch has a share of 0 in one of these.
    """

    results: list[list[float]]
    terms: list[list[Tensor]]
    empties_terms: bool = False


def step_shares(program: Program, parts: Sequence[list[Tensor]], model: nn.Module, world: World) -> StepShares:
    """The shares of the micro-batches of a step, the same on every rank.

    Args:
        program: the program of a step of the whole model.
        parts: this rank's inputs of every micro-batch. Those of a denominator (labels, masks) are gathered.
        model: the model with its buffers.
        world: the mesh of the ranks.

    Raises StepError for a micro-batch in which no element counts, under a schedule that updates parameters after it,
    and for one in which none does in a term of the loss that is no quotient and no mean over targets.
    """
    if len(parts) == 1:  # reading the inputs would have the host wait for the device
        return StepShares([[] if each.objective is None else [1.0] for each in program.extras] + [[1.0]], [[]])
    pipeline = program.plan.pipeline
    skips_empty = pipeline is None or not pipeline.update_every

    def weighed(of: Callable[[Program], Objective | None]) -> list[MicroBatch]:
        return _weighed(of, program, parts, model, world)

    def shares(of: Callable[[Program], Objective | None]) -> list[float]:
        objective = of(program)
        return [] if objective is None else objective.shares(weighed(of), skips_empty=skips_empty)

    extras = [shares(partial(_objective_of_extra, number)) for number in range(len(program.extras))]
    results = [*extras, shares(_objective)]
    if not program.shares:
        return StepShares(results, [[] for _ in parts])
    found = program.term_shares(weighed(_objective))
    terms = [[x.to(world.device) for x in own.values()] for own in found]
    return StepShares(results, terms, not all(x.item() for own in found for x in own.values()))


def _objective(program: Program) -> Objective:
    return program.objective


def _objective_of_extra(number: int, program: Program) -> Objective | None:
    return program.extras[number].objective


@torch.no_grad()
def _weighed(
    of: Callable[[Program], Objective | None],
    program: Program,
    parts: Sequence[list[Tensor]],
    model: nn.Module,
    world: World,
) -> list[MicroBatch]:
    """The micro-batches with the whole tensors that an objective depends on; the host waits once for all of these.

    Args:
        of: function from the program of a micro-batch to the objective.
        program, parts, model, world: see `step_shares`.
    """
    objectives = [of(program.of(i)) for i in range(len(parts))]
    read = {name for objective in objectives if objective is not None for name in objective.reads}
    buffers = {
        f"buffers.{spec.name}": model.get_buffer(spec.name)
        for spec in program.buffers
        if f"buffers.{spec.name}" in read
    }

    def whole(number: int) -> dict[str, Tensor]:
        specs = zip(program.of(number).inputs, parts[number], strict=True)
        return {spec.name: gathered(x, spec, world) for spec, x in specs if spec.name in read}

    first, *found = _torch.host_copies([buffers, *map(whole, range(len(parts)))])
    return [
        MicroBatch(first | each, rows_of(program.of(i)), objective)
        for i, (each, objective) in enumerate(zip(found, objectives, strict=True))
        if objective is not None
    ]


def rows_of(program: Program) -> int:
    """The rows of a program's micro-batch, as the first input with dims has them."""
    return next((spec.shape[0] for spec in program.inputs if spec.shape), 1)


@torch.no_grad()
def refuse_divided_by_none(
    pieces: Sequence[Sequence[Tensor]],
    shares: Sequence[Sequence[float]],
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
) -> None:
    """Raises StepError on all ranks if a result of a micro-batch without a share is infinite on any.

    Its denominator is 0. The result is 0 / 0 where the numerator counts nothing either, and says nothing. But where all
    boxes are added up and divided by the number of those with an object, the numerator belongs to that of the batch,
    and cannot be had from its quotient by 0.

    Args:
        pieces: for every micro-batch this rank's part of each result; empty where another stage has the results.
        shares: for every result the share of each micro-batch; empty for one without shares.
        groups: groups along which a sum, one after the other, is over all ranks.
        device: device of the ranks' collectives.
    """
    if all(share for own in shares for share in own):
        return
    found = [
        x.isinf().any()
        for column, own in zip(zip(*pieces, strict=True), shares, strict=False)
        for x, share in zip(column, own, strict=False)
        if share == 0
    ]
    count = torch.stack(found).any().float() if found else torch.zeros((), device=device)
    for group in filter(None, groups):
        with naming_failures("all_reduce", group_name(group)):
            dist.all_reduce(count, group=group)
    if count.item():
        raise _lost(len(shares[-1]))


def refuse_lost_terms(loss: Tensor, shares: StepShares) -> None:
    """Raises StepError if the loss is no number where a micro-batch has no share in one of its terms.

    Its numerator is then not 0, as in `refuse_divided_by_none`. The loss is the same on all ranks.
    """
    if shares.empties_terms and not loss.isfinite():
        raise _lost(len(shares.terms))


def _lost(count: int) -> StepError:
    return StepError(
        f"One of {count} micro-batches has a denominator of 0 and a numerator that is not 0, so its part "
        "of the loss is lost (as with a sum over all elements, divided by the number of some of them). Take fewer "
        "micro-batches (micro_batches=1), or divide by a number that is never 0, such as number.clamp(min=1)."
    )
