"""Stages in which single ranks run ops (choices such as `@1`): the ranks of a stage work side by side.

The tables of stages add up the work of all ranks (`autopar.pipeline.stage_costs`), as if they worked in turn. For the
stages of a plan, forward and backward are each a list of calls on the clocks of the ranks
(`autopar.cost_model.steps.owned_step`), and take the fraction of the table's seconds that the last clock is of the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.items import WorkItem
from autopar.cost_model.owners import owners_of_ops
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.cost_model.steps.run import Run
from autopar.cost_model.steps.step import Step
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.simulation import StageCosts


def side_by_side(blocks: PricedBlocks, cuts: Sequence[int], costs: Sequence[StageCosts]) -> tuple[StageCosts, ...]:
    """The costs of stages whose ranks work side by side, given those of ranks that work in turn.

    Args:
        blocks: the plan's items by block.
        cuts: the first block of every stage but the first.
        costs: costs of every stage for one micro-batch.
    """
    owned, order = _owned_step(blocks), blocks.pricer.in_order()
    found, edges = [], itertools.pairwise((0, *cuts, blocks.n))
    for edge, cost in zip(edges, costs, strict=True):
        own = _of_stage(blocks, order, edge)
        forward = _fraction(owned, [i for i in own if i.phase == "forward"])
        backward = _fraction(owned, [i for i in own if i.phase != "forward"])
        found.append(
            replace(
                cost, forward_seconds=forward * cost.forward_seconds, backward_seconds=backward * cost.backward_seconds
            )
        )
    return tuple(found)


def _owned_step(blocks: PricedBlocks) -> OwnedStep:
    """The work of a micro-batch of all stages on every rank of a stage's mesh, without memory."""
    plan = blocks.plan
    step = Step(tuple(blocks.items), (), Run(plan.micro_batches), blocks.hardware, blocks.software)
    ranks = {position: () for position in owners_of_ops(plan)}
    return OwnedStep.of(step, plan.mesh.names, (), ranks)


def _of_stage(blocks: PricedBlocks, order: Sequence[WorkItem], edge: tuple[int, int]) -> list[WorkItem]:
    """The items of a stage, each with the part of its count that is of the stage's blocks."""
    found = []
    for item in order:
        rows, share = blocks.rows_of(item)
        count = sum(edge[0] <= row < edge[1] for row in rows)
        if count:
            found.append(replace(item, count=item.count * share * count))
    return found


def _fraction(owned: OwnedStep, order: Sequence[WorkItem]) -> float:
    """The duration of some calls on ranks that work side by side, as a part of that of ranks in turn."""
    in_turn = owned.in_turn_seconds(order)
    return owned.scheduled(order).makespan_seconds / in_turn if in_turn else 1.0
