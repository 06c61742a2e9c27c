"""Sequences over a third axis, `cp`, of a searched mesh: context parallelism, where a micro-batch is one sample.

A rank takes at least one sample at a time along dp, so that activations of long sequences may not fit however the batch
is cut. Along cp several ranks share a sequence. Ops that treat tokens one by one take a part of a sequence like a part
of a sample, so that a setting has the estimate of dp x cp ranks of data parallelism with that part of a sample on each.
What attention sends along cp is left out of the estimate, so that a good setting is seldom passed by.

The search tries these settings after those without cp, and only where the bound on memory is likely to have ruled out a
faster plan, or where the batch has fewer samples than there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir import Graph, Mesh
from autopar.search.candidates.request_filters import allows
from autopar.search.candidates.trials import Explored, Trial, blocks_of, promising
from autopar.search.request.request import Request


def context_trials_of(graph: Graph, request: Request, explored: Explored | None) -> Iterator[Trial]:
    """Settings with an axis cp that fit without recomputation, in the order of their search."""
    if explored is None:
        return iter(())
    node = request.hardware.devices_per_node
    settings = [each for each in explored.space.over_sequences() if allows(request, each, node)]
    priced = explored.space.price_of(settings)
    fit = [each for each in priced if each.memory_bytes <= request.bound_bytes]
    return promising(fit, request, blocks_of(graph))


def without_context(trial: Trial) -> Mesh | None:
    """The mesh of a setting with the ranks of cp along tp; None for a setting without cp."""
    setting = trial.priced.setting if trial.priced else None
    if setting is None or setting.cp == 1:
        return None
    return replace(setting, cp=1, tp=setting.cp * setting.tp).world_mesh
