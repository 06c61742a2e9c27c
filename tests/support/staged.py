"""Plans with pipeline stages for tests, without a search for them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.cost_model import find_hardware
from autopar.ir import SCHEDULES, Graph, Pipeline, Plan
from autopar.pipeline.parts import block_starts
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.search import RecipeLike
from autopar.search.request import Request


def block_cuts(graph: Graph, stages: int) -> tuple[str, ...]:
    """Cuts between blocks, into stages of about equally many."""
    starts = block_starts(graph)
    assert len(starts) >= stages, f"{len(starts)} blocks for {stages} stages"
    return tuple(starts[i * len(starts) // stages] for i in range(1, stages))


def pipeline_of(graph: Graph, schedule: str, ranks: int) -> Pipeline:
    """The schedule with two stages a rank where it takes several, cut between blocks."""
    chunks = 1 if SCHEDULES[schedule] == "one" else 2
    return Pipeline(ranks, schedule, block_cuts(graph, chunks * ranks))


def with_stages(
    prepared: Prepared,
    pipeline: Pipeline,
    micro_batches: int,
    mesh: Mapping[str, int] | None = None,
    recipe: RecipeLike = "auto",
) -> Plan:
    """A plan for the mesh of one stage, with a pipeline added."""
    plan = make_plan(
        prepared,
        Request(
            find_hardware("cpu-gloo"),
            mesh=mesh or {"dp": 1},
            recipe=recipe,
            micro_batches=micro_batches,
        ),
    )
    return replace(plan, pipeline=pipeline)


@dataclass(frozen=True)
class _Step:
    """A step to capture; two are equal whose captures are."""

    key: Hashable
    model: nn.Module = field(compare=False)
    batch: Sequence[Any] = field(compare=False)
    loss_fn: Any = field(compare=False)


@functools.cache
def _prepared(step: _Step) -> Prepared:
    # A copy: a capture leaves weak references on what it saw.
    return prepare_step(copy.deepcopy(step.model), step.batch, loss_fn=step.loss_fn)


def prepared_once(model: nn.Module, batch: Sequence[Any], loss_fn: Any) -> Prepared:
    """The analyzed step, captured once in a process for all models of this text, parameters and shapes.

    For plans alone: were two models wrongly taken for one, `compile` would refuse the plan by its fingerprint.
    """
    named = [*model.named_parameters(), *model.named_buffers(), *enumerate(batch)]
    kinds = tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in named)
    key = (type(model), repr(model), model.training, loss_fn, kinds)
    return _prepared(_Step(key, model, batch, loss_fn))


def plan_for(
    model: nn.Module,
    batch: Sequence[Any],
    loss_fn: Any,
    schedule: str,
    ranks: int,
    micro_batches: int,
    mesh: Mapping[str, int] | None = None,
    recipe: RecipeLike = "auto",
) -> Plan:
    """A plan for a global batch, cut between blocks."""
    part = tuple(x[: len(x) // micro_batches] for x in batch)
    prepared = prepared_once(model, part, loss_fn)
    pipeline = pipeline_of(prepared.analysis.graph, schedule, ranks)
    return with_stages(prepared, pipeline, micro_batches, mesh, recipe)
