"""The settings that an outer search tries: several kinds of them, each in the order of its search.

*Settings with two axes* of several ranks, and stages, are estimated all at once, and come first: `first`, `refined`.

*Sequences over an axis cp* (`over_sequences`): context parallelism, where a micro-batch is one sample. A rank takes at
least one sample at a time along dp, so that activations of long sequences may not fit however the batch is cut. Along
cp several ranks share a sequence. Ops that treat tokens one by one take a part of a sequence like a part of a sample,
so that a setting has the estimate of dp x cp ranks of data parallelism with that part of a sample on each. What
attention sends along cp is left out of the estimate, so that a good setting is seldom passed by. The search tries these
settings after those without cp, and only where the bound on memory is likely to have ruled out a faster plan, or where
the batch has fewer samples than there are ranks.

*Data parallelism over two axes* (`cut`), `dp` and inside of it `dp_inner`, of all sizes, with tensor parallelism inside
of both. Neighbours share out what they store. Along dp, parameters are whole (hybrid sharding, Zhao et al. 2023,
section 3.2.2: no gather leaves the group) or in shards, too; then a collective over both axes has fewer rounds than one
over all ranks. The search tries these settings last, where their estimates are lower than with one axis and than the
best step: without stages and with as many as the best plan has, and with layers that run again where that makes them
fit. *Experts over an axis ep* (`experts`): the same with the experts of a mixture split along the inner axis, which may
have all ranks.

*Ranks that repeat work*, where messages take longer than the work that they share out. For a tiny model on Gloo the
fastest step is that of fewer ranks, which the others repeat, or one that splits the largest ops and repeats all others:

    an axis that splits nothing     has the estimate of a cluster with this many ranks fewer                `unsplit`
    single ops that are split       no recipe asks for them, so that no estimate is a bound of their
                                    plans: every mesh is searched without a recipe                        `unnamed`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Graph, Mesh, with_pipeline
from autopar.search.candidates.refined import refine
from autopar.search.candidates.request_filters import allows, recipes_of_axes, stays_inside
from autopar.search.candidates.settings import INSIDE, OF_EXPERTS, ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import (
    Explored,
    Trial,
    allowed,
    beside_host,
    blocks_of,
    cluster_of,
    depth_of,
    depths_of,
    moved_seconds,
    promising,
)
from autopar.search.exact.search import meshes_of
from autopar.search.request.recipe_rows import is_expert
from autopar.search.request.recipes import is_open, recipe_axes
from autopar.search.request.request import Request
from autopar.search.stages.pipeline_settings import divisors

_WORTH = 1e-3  # least relative gain of an estimate for which data parallelism is cut


@dataclass(frozen=True)
class Proposals:
    """The settings to try for a request.

    Attributes:
        graph: the captured model.
        request: what the user asks for.
        explored: all settings with their estimates; None where there are no estimates.
    """

    graph: Graph
    request: Request
    explored: Explored | None

    @property
    def settings(self) -> tuple[PricedCandidate, ...]:
        """All settings with their estimates, fastest first; none where there are no estimates."""
        return self.explored.settings if self.explored else ()

    def promising(self, priced: Iterable[PricedCandidate]) -> Iterator[Trial]:
        """These settings in the order of their search."""
        return promising([*priced], self.request, blocks_of(self.graph))

    def first(self) -> tuple[list[Trial], list[Trial]]:
        """Two lists of settings; the second is for the case that the first has no plan."""
        depths = depths_of(self.graph, self.request)
        if self.explored is None:
            trials = [each for among in depths for each in self._every_mesh(among)]
        else:
            trials = list(self.promising(each for each in self.settings if each.setting.inner == 1))
            # The estimate of a step without stages is nearly exact: its plan comes first, and bounds the others.
            flat = next((each for each in trials if depth_of(each.mesh) == 1), None)
            trials.sort(key=lambda each: each is not flat)
        first, if_none_fits = ([each for each in trials if depth_of(each.mesh) in among] for among in depths)
        return first, if_none_fits

    def refined(self) -> Iterator[Trial]:
        """Settings with two axes of tensor parallelism in place of one."""
        return self.promising(each for each in self.settings if each.setting.inner > 1)

    def overfull(self) -> Iterator[Trial]:
        """Settings that fit only if the host stores something."""
        found = self.settings
        if self.explored is not None:
            found = (*found, *beside_host(self.explored.space, found, self.request))
        return self.promising(each for each in found if 0 < moved_seconds(each, self.request) < math.inf)

    def _every_mesh(self, depths: Sequence[int]) -> Iterator[Trial]:
        """Every mesh with these numbers of pipeline ranks and no axis that is refused, those of one axis first."""
        request = self.request
        assert request.ranks is not None, "a searched mesh needs a number of ranks"
        named = recipe_axes(request.inside) or ("tp",) * ("dp" in request.without)
        is_staged = bool(request.chosen_schedule or request.chunks)
        for depth in depths:
            for mesh in sorted(meshes_of(request.ranks // depth, named), key=lambda each: len(each.axes)):
                is_refused = any(size > 1 and name in request.without for name, size in mesh.axes)
                if is_refused or not stays_inside(request, mesh, request.hardware.devices_per_node):
                    continue
                world = with_pipeline(mesh, depth, 0) if depth > 1 or is_staged else mesh
                yield Trial(world, request.chosen_micro_batches, request.inside)

    # --- a third axis

    def over_sequences(self) -> Iterator[Trial]:
        """Settings with an axis cp that fit without recomputation."""
        return self._fitting(self._allowed(self.explored.space.over_sequences() if self.explored else ()))

    def cut(self, depth: int = 1) -> Iterator[Trial]:
        """Settings with two axes of data parallelism that fit.

        They have no stages, or `depth` of them, and run no, some or all layers again. Left out are those whose estimate
        is no faster than the best one that fits with the same ranks, stages and micro-batches along dp alone, and all
        of them in a single node, where there is one kind of links.
        """
        if self.explored is None or self.explored.space.cluster.nodes == 1:
            return
        for trial in self._cut(depth, INSIDE):
            # Without recipes three axes have too many combinations.
            has_two = trial.priced is not None and trial.priced.setting.tp == 1
            yield trial._replace(recipe=self.request.inside) if has_two else trial

    def experts(self, depth: int = 1) -> Iterator[Trial]:
        """Settings of a mixture with an axis for its experts, of which the same is left out.

        There are some in a single node, too: an exchange of rows is another collective than a gather of all experts.
        """
        has_experts = any(is_expert(factor.roles) for factor in self.graph.factors.values())
        return self._cut(depth, OF_EXPERTS) if has_experts else iter(())

    def _cut(self, depth: int, inside: str) -> Iterator[Trial]:
        """Settings with this recipe along an inner axis of data parallelism, where that promises a gain."""
        if self.explored is None or not self.request.leaves_axes_open:
            return iter(())
        space, bound_bytes = self.explored.space, self.request.bound_bytes
        alone: dict[tuple[int, ...], float] = {}
        for each in self.settings:
            if each.memory_bytes <= bound_bytes:
                alone.setdefault(_without_cut(each.setting), each.seconds)
        settings = itertools.product(space.over_two_data_axes(sorted({1, depth}), inside), space.recomputes)
        priced = self._allowed(replace(each, recompute=again) for each, again in settings)
        if len(space.recomputes) > 1:
            priced += space.with_fewest_blocks(priced, bound_bytes)
        known = ((each, alone.get(_without_cut(each.setting), math.inf)) for each in priced)
        return self._fitting(each for each, seconds in known if each.seconds < (1 - _WORTH) * seconds)

    def _allowed(self, settings: Iterable[ClusterSetting]) -> list[PricedCandidate]:
        """The estimates of the settings among these that the request allows."""
        found = [each for each in settings if allows(self.request, each, self._node)]
        return self.explored.space.price_of(found) if self.explored else []

    def _fitting(self, priced: Iterable[PricedCandidate]) -> Iterator[Trial]:
        """The settings among these that fit."""
        return self.promising(each for each in priced if each.memory_bytes <= self.request.bound_bytes)

    @property
    def _node(self) -> int:
        return self.request.hardware.devices_per_node

    # --- ranks that repeat work

    def unsplit(self, worth_seconds: float) -> Iterator[Trial]:
        """Settings with an axis that splits nothing.

        Numbers of ranks that share the work are left out if they take longer than `worth_seconds` in any case: k ranks
        take at least a k-th of the seconds of one rank, which sends nothing.
        """
        found = [
            each
            for ranks in divisors(self.request.ranks or 1)[:-1]
            if _least_seconds(self._on_fewer(1)) < ranks * worth_seconds
            for each in self._on_fewer(ranks)
            if each.setting.inner == 1 and self._on_all_ranks(each.setting) is not None
        ]
        # Estimates with stages promise too much, so that they come last.
        for trial in sorted(self.promising(found), key=lambda each: depth_of(each.mesh) > 1):
            assert trial.priced is not None, "it has an estimate"
            part = trial.priced.setting
            setting = self._on_all_ranks(part)
            assert setting is not None, "others are left out"
            # The search leaves the axis that the setting does not use unsplit, or finds a use for it.
            recipe = {"dp": part.data if part.dp > 1 else "auto", "tp": part.tensor if part.tp > 1 else "auto"}
            yield trial._replace(mesh=setting.world_mesh, recipe=recipe)

    def unnamed(self, best_seconds: float) -> list[Trial]:
        """Every mesh without stages and without a recipe, where messages take longer than the work.

        That is where half of the ranks could take less than `best_seconds`, if they shared the seconds of one rank
        evenly and sent nothing. Elsewhere ranks that repeat work hardly gain, and the list is empty.
        """
        one = self._on_fewer(1) if is_open(self.request.inside) else []
        if not one or 2 * _least_seconds(one) >= (self.request.ranks or 1) * best_seconds:
            return []
        flat = [depth for depth in depths_of(self.graph, self.request)[0] if depth == 1]
        return [each._replace(micro_batches=one[0].setting.micro_batches) for each in self._every_mesh(flat)]

    def _on_fewer(self, ranks: int) -> list[PricedCandidate]:
        """Estimates of all settings that the request allows, on fewer ranks."""
        if self.explored is None:
            return []
        known = self.explored.on_fewer
        if ranks not in known:
            space = self.explored.space.on(cluster_of(self.request.hardware, ranks))
            known[ranks] = [] if space.is_empty else allowed(space, self.request)
        return known[ranks]

    def _on_all_ranks(self, part: ClusterSetting) -> ClusterSetting | None:
        """A setting of fewer ranks, with the others along an axis that it does not use; None if it uses both.

        None also if the request names a recipe for that axis, or rules it out.
        """
        spare = (self.request.ranks or 1) // (part.dp * part.tp * part.stages)
        free = [axis for axis, recipe in recipes_of_axes(self.request).items() if recipe == "auto"]
        wholes = [replace(part, dp=spare)] * (part.dp == 1 and "dp" in free)
        wholes += [replace(part, tp=spare)] * (part.tp == 1 and "tp" in free)
        return next((each for each in wholes if allows(self.request, each, self._node)), None)


def with_axis_as_two(trial: Trial) -> list[Trial]:
    """The setting on a mesh that has two axes in place of one, for each of two axes that can be taken apart."""
    if sum(size > 1 for size in trial.mesh.sizes) != 2:
        return []
    return [
        trial._replace(mesh=refine(trial.mesh, axis, least))
        for axis, size in trial.mesh.axes
        for least in divisors(size)[1:-1][:1]
    ]


def without_context(trial: Trial) -> Mesh | None:
    """The mesh of a setting with the ranks of cp along tp; None for a setting without cp."""
    setting = trial.priced.setting if trial.priced else None
    if setting is None or setting.cp == 1:
        return None
    return replace(setting, cp=1, tp=setting.cp * setting.tp).world_mesh


def _least_seconds(estimates: list[PricedCandidate]) -> float:
    """Seconds of the fastest estimate; 0 without one, which every bound allows."""
    return min((each.seconds for each in estimates), default=0.0)


def _without_cut(setting: ClusterSetting) -> tuple[int, ...]:
    return setting.dp, setting.tp, setting.stages, setting.micro_batches
