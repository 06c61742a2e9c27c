"""Settings whose ranks repeat work, where messages take longer than the work that they share out.

For a tiny model on Gloo the fastest step is that of fewer ranks, which the others repeat, or one that splits the
largest ops and repeats all others. Such plans are legal, and users can name their meshes:

    an axis that splits nothing     has the estimate of a cluster with this many ranks fewer         `unsplit_trials_of`
    single ops that are split       no recipe asks for them, so that no estimate is a bound of
                                    their plans: every mesh is searched without a recipe           `open_trials_of`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir import Graph
from autopar.search.candidates.refined import refine
from autopar.search.candidates.request_filters import allows, recipes_of_axes
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import (
    Explored,
    Trial,
    allowed,
    blocks_of,
    cluster_of,
    depth_of,
    depths_of,
    every_mesh,
    promising,
)
from autopar.search.request.recipes import is_open
from autopar.search.request.request import Request
from autopar.search.stages.pipeline_settings import divisors


def unsplit_trials_of(
    graph: Graph, request: Request, explored: Explored | None, worth_seconds: float
) -> Iterator[Trial]:
    """Settings with an axis that splits nothing, in the order of their search.

    Numbers of ranks that share the work are left out if they take longer than `worth_seconds` in any case: k ranks take
    at least a k-th of the seconds of one rank, which sends nothing.
    """
    if explored is None or request.ranks is None:
        return
    one = _estimates(explored, request, 1)
    alone_seconds = _least_seconds(one)
    found = [
        each
        for ranks in divisors(request.ranks)[:-1]
        if alone_seconds < ranks * worth_seconds
        for each in (one if ranks == 1 else _estimates(explored, request, ranks))
        if each.setting.inner == 1 and _on_all_ranks(each.setting, request) is not None
    ]
    trials = promising(found, request, blocks_of(graph))
    # Estimates with stages promise too much, so that they come last.
    for trial in sorted(trials, key=lambda each: depth_of(each.mesh) > 1):
        assert trial.priced is not None, "it has an estimate"
        setting = _on_all_ranks(trial.priced.setting, request)
        assert setting is not None, "others are left out"
        yield trial._replace(mesh=setting.world_mesh, recipe=_recipe(trial.priced.setting))


def open_trials_of(graph: Graph, request: Request, explored: Explored | None, best_seconds: float) -> list[Trial]:
    """Every mesh without stages and without a recipe, where messages take longer than the work.

    That is where half of the ranks could take less than `best_seconds`, if they shared the seconds of one rank evenly
    and sent nothing. Elsewhere ranks that repeat work hardly gain, and the list is empty.
    """
    if explored is None or request.ranks is None or not is_open(request.inside):
        return []
    one = _estimates(explored, request, 1)
    if not one or 2 * _least_seconds(one) >= request.ranks * best_seconds:
        return []
    flat = [depth for depth in depths_of(graph, request)[0] if depth == 1]
    return [each._replace(micro_batches=one[0].setting.micro_batches) for each in every_mesh(request, flat)]


def with_axis_as_two(trial: Trial) -> list[Trial]:
    """The setting on a mesh that has two axes in place of one, for each of two axes that can be taken apart."""
    if sum(size > 1 for size in trial.mesh.sizes) != 2:
        return []
    return [
        trial._replace(mesh=refine(trial.mesh, axis, least))
        for axis, size in trial.mesh.axes
        for least in divisors(size)[1:-1][:1]
    ]


def _least_seconds(estimates: list[PricedCandidate]) -> float:
    """Seconds of the fastest estimate; 0 without one, which every bound allows."""
    return min((each.seconds for each in estimates), default=0.0)


def _estimates(explored: Explored, request: Request, ranks: int) -> list[PricedCandidate]:
    """Estimates of all settings that a request allows, on fewer ranks."""
    if ranks not in explored.on_fewer:
        space = explored.space.on(cluster_of(request.hardware, ranks))
        explored.on_fewer[ranks] = [] if space.is_empty else allowed(space, request)
    return explored.on_fewer[ranks]


def _on_all_ranks(part: ClusterSetting, request: Request) -> ClusterSetting | None:
    """A setting of fewer ranks, with the others along an axis that it does not use; None if it uses both.

    None also if the request names a recipe for that axis, or rules it out.
    """
    assert request.ranks is not None, "a searched mesh needs a number of ranks"
    spare = request.ranks // (part.dp * part.tp * part.stages)
    free = [axis for axis, recipe in recipes_of_axes(request).items() if recipe == "auto"]
    wholes = [replace(part, dp=spare)] * (part.dp == 1 and "dp" in free)
    wholes += [replace(part, tp=spare)] * (part.tp == 1 and "tp" in free)
    node = request.hardware.devices_per_node
    return next((each for each in wholes if allows(request, each, node)), None)


def _recipe(part: ClusterSetting) -> dict[str, str]:
    """The recipe of a setting for the axes that it uses; the search leaves the other one unsplit, or finds a use."""
    return {"dp": part.data if part.dp > 1 else "auto", "tp": part.tensor if part.tp > 1 else "auto"}
