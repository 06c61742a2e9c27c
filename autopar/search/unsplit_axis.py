"""Settings with an axis that splits nothing: all its ranks do the same work.

Where messages take longer than the work that they share out, as for a tiny model on Gloo, the fastest step is that of
fewer ranks, which the others repeat. Such a plan is legal, and users can name its mesh. Its estimate is that of a
cluster with so many ranks fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir import Graph
from autopar.search.intents import allows, recipes_of_axes
from autopar.search.pipeline_settings import divisors
from autopar.search.request import Request
from autopar.search.settings import ClusterSetting, PricedCandidate
from autopar.search.trials import (
    Explored,
    Trial,
    allowed,
    blocks_of,
    cluster_of,
    depth_of,
    promising,
)


def unsplit_trials_of(
    graph: Graph, request: Request, explored: Explored | None, best_seconds: float
) -> Iterator[Trial]:
    """Settings with an axis that splits nothing, in the order of their search.

    Numbers of ranks that share the work are left out if they take longer than `best_seconds` in any case: k ranks take
    at least a k-th of the seconds of one rank, which sends nothing.
    """
    if explored is None or request.ranks is None:
        return
    one = _estimates(explored, request, 1)
    alone_seconds = min((each.seconds for each in one), default=0.0)
    found = [
        each
        for ranks in divisors(request.ranks)[:-1]
        if alone_seconds < ranks * best_seconds
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


def _estimates(explored: Explored, request: Request, ranks: int) -> list[PricedCandidate]:
    """Estimates of all settings that a request allows, on fewer ranks."""
    space = explored.space.on(cluster_of(request.hardware, ranks))
    return [] if space.is_empty else allowed(space, request)


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
    return {
        "dp": part.data if part.dp > 1 else "auto",
        "tp": part.tensor if part.tp > 1 else "auto",
    }
