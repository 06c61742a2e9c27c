"""Settings of a searched mesh with a third axis, which the search tries where they may gain.

*Sequences over an axis cp*: context parallelism, where a micro-batch is one sample. A rank takes at least one sample at
a time along dp, so that activations of long sequences may not fit however the batch is cut. Along cp several ranks
share a sequence. Ops that treat tokens one by one take a part of a sequence like a part of a sample, so that a setting
has the estimate of dp x cp ranks of data parallelism with that part of a sample on each. What attention sends along cp
is left out of the estimate, so that a good setting is seldom passed by.

The search tries these settings after those without cp, and only where the bound on memory is likely to have ruled out a
faster plan, or where the batch has fewer samples than there are ranks.

*Data parallelism over two axes*, `dp` and inside of it `dp_inner`, of all sizes, with tensor parallelism inside of
both. Neighbours share out what they store. Along dp, parameters are whole (hybrid sharding, Zhao et al. 2023, section
3.2.2: no gather leaves the group) or in shards, too; then a collective over both axes has fewer rounds than one over
all ranks. The search tries these settings last, where their estimates are lower than with one axis and than the best
step: without stages and with as many as the best plan has, and with layers that run again where that makes them fit.

*Experts over an axis ep*: the same with the experts of a mixture split along the inner axis, which may have all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.ir import Graph, Mesh
from autopar.search.candidates.candidates import SettingEstimator
from autopar.search.candidates.request_filters import allows
from autopar.search.candidates.settings import INSIDE, OF_EXPERTS, ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import Explored, Trial, blocks_of, promising
from autopar.search.request.recipe_rows import is_expert
from autopar.search.request.request import Request

_WORTH = 1e-3  # least relative gain of an estimate for which data parallelism is cut


def context_trials_of(graph: Graph, request: Request, explored: Explored | None) -> Iterator[Trial]:
    """Settings with an axis cp that fit without recomputation, in the order of their search."""
    if explored is None:
        return iter(())
    space = explored.space
    return _fitting(graph, request, _allowed(request, space, space.over_sequences()))


def cut_trials_of(graph: Graph, request: Request, explored: Explored | None, depth: int = 1) -> Iterator[Trial]:
    """Settings with two axes of data parallelism that fit, in the order of their search.

    They have no stages, or `depth` of them, and run no, some or all layers again. Left out are those whose estimate is
    no faster than the best one that fits with the same ranks, stages and micro-batches along dp alone, and all of them
    in a single node, where there is one kind of links.
    """
    if explored is None or explored.space.cluster.nodes == 1:
        return
    for trial in _cut(graph, request, explored, depth, INSIDE):
        # Without recipes three axes have too many combinations.
        yield trial._replace(recipe=request.inside) if trial.priced and trial.priced.setting.tp == 1 else trial


def expert_trials_of(graph: Graph, request: Request, explored: Explored | None, depth: int = 1) -> Iterator[Trial]:
    """Settings of a mixture with an axis for its experts, of which the same is left out, in the order of their search.

    There are some in a single node, too: an exchange of rows is another collective than a gather of all experts.
    """
    has_experts = any(is_expert(factor.roles) for factor in graph.factors.values())
    if explored is None or not has_experts:
        return iter(())
    return _cut(graph, request, explored, depth, OF_EXPERTS)


def _cut(graph: Graph, request: Request, explored: Explored, depth: int, inside: str) -> Iterator[Trial]:
    """Settings with this recipe along an inner axis of data parallelism, where that promises a gain."""
    if not request.leaves_axes_open:
        return iter(())
    space = explored.space
    alone: dict[tuple[int, ...], float] = {}
    for each in explored.settings:
        if each.memory_bytes <= request.bound_bytes:
            alone.setdefault(_without_cut(each.setting), each.seconds)
    settings = itertools.product(space.over_two_data_axes(sorted({1, depth}), inside), space.recomputes)
    priced = _allowed(request, space, (replace(each, recompute=again) for each, again in settings))
    if len(space.recomputes) > 1:
        priced += space.with_fewest_blocks(priced, request.bound_bytes)
    faster = [each for each in priced if each.seconds < (1 - _WORTH) * alone.get(_without_cut(each.setting), math.inf)]
    return _fitting(graph, request, faster)


def _without_cut(setting: ClusterSetting) -> tuple[int, ...]:
    return setting.dp, setting.tp, setting.stages, setting.micro_batches


def _allowed(request: Request, space: SettingEstimator, settings: Iterable[ClusterSetting]) -> list[PricedCandidate]:
    """The estimates of the settings among these that a request allows."""
    node = request.hardware.devices_per_node
    return space.price_of(each for each in settings if allows(request, each, node))


def _fitting(graph: Graph, request: Request, priced: Iterable[PricedCandidate]) -> Iterator[Trial]:
    """The settings among these that fit, in the order of their search."""
    fit = [each for each in priced if each.memory_bytes <= request.bound_bytes]
    return promising(fit, request, blocks_of(graph))


def without_context(trial: Trial) -> Mesh | None:
    """The mesh of a setting with the ranks of cp along tp; None for a setting without cp."""
    setting = trial.priced.setting if trial.priced else None
    if setting is None or setting.cp == 1:
        return None
    return replace(setting, cp=1, tp=setting.cp * setting.tp).world_mesh
