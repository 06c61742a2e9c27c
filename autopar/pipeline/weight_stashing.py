"""Versions of a stage's parameters, under schedules that update them while micro-batches are in the pipeline.

A step begins with version 0 on every stage, and the n-th update of a stage makes its version n. A micro-batch's
backward on a stage sees the version that its forward saw there. With p stages, s = 0 ... p - 1, and micro-batches
m = 0, 1, ...:

    schedule         an update follows         micro-batch m sees on stage s    at most alive on stage s
    pipedream        every micro-batch         max(0, m - (p - 1 - s))          p - s
    pipedream-sync   every micro-batch         max(0, m - (p - 1))              p
    2bw              every p micro-batches     max(0, m // p - 1)               2

`pipedream` keeps ("stashes") the version that the forward saw: the newest one of the stage at that time (Narayanan et
al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.3). `pipedream-sync` is its
vertical sync: all stages take the version that the first stage took. `2bw` adds up the gradients of p micro-batches,
and takes the version before the newest (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training",
section 3.1). All three run the actions of 1F1B.

The figures of this module are read off the same lists of actions that are simulated and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir import Pipeline
from autopar.pipeline.schedules import Action, actions
from autopar.pipeline.simulation import StageCosts


@dataclass(frozen=True)
class WeightVersions:
    """The versions that micro-batches of a step see.

    Attributes:
        pipeline: the stages, under a schedule of `autopar.ir.VERSIONED`.
        micro_batches: number of micro-batches in a step.

    >>> found = WeightVersions(Pipeline(2, "pipedream", ("linear_1",)), micro_batches=4)
    >>> found.seen
    ((0, 0, 1, 2), (0, 1, 2, 3))
    >>> found.alive, found.delays
    ((2, 1), (1, 0))
    """

    pipeline: Pipeline
    micro_batches: int

    @property
    def updates(self) -> int:
        """Number of updates in a step, on every stage."""
        return self.micro_batches // self.pipeline.update_every

    @cached_property
    def seen(self) -> tuple[tuple[int, ...], ...]:
        """For every stage, the version of its parameters that the forward and backward of each micro-batch use."""
        return _RULES[self.pipeline.schedule](self)

    @cached_property
    def newest(self) -> tuple[tuple[int, ...], ...]:
        """For every stage its newest version at each micro-batch's forward."""
        return tuple(map(_newest_at_forwards, self._actions))

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """For every stage, the largest number of versions that exist at once, including the newest."""
        return tuple(map(_most_alive, self._actions, self.seen))

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """For every stage, the largest age of a gradient: updates since the version that it was computed with."""
        every = self.pipeline.update_every
        return tuple(max(m // every - v for m, v in enumerate(own)) for own in self.seen)

    def is_update(self, micro_batch: int) -> bool:
        """Whether an update follows the backward of a micro-batch."""
        return (micro_batch + 1) % self.pipeline.update_every == 0

    @cached_property
    def _actions(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(actions(self.pipeline, self.micro_batches))  # one stage a rank


def with_versions(costs: Sequence[StageCosts], pipeline: Pipeline, micro_batches: int) -> tuple[StageCosts, ...]:
    """Costs of stages that keep their versions all the time; the same costs under a schedule that has none."""
    if not pipeline.update_every:
        return tuple(costs)
    alive = WeightVersions(pipeline, micro_batches).alive
    return tuple(
        replace(cost, kept_bytes=cost.kept_bytes + (count - 1) * cost.version_bytes)
        for cost, count in zip(costs, alive, strict=True)
    )


def last_uses(seen: Sequence[int]) -> dict[int, int]:
    """Version -> the last micro-batch that sees it.

    >>> last_uses((0, 0, 1, 2))
    {0: 1, 1: 2, 2: 3}
    """
    return {version: number for number, version in enumerate(seen)}


def _stashed(found: WeightVersions) -> tuple[tuple[int, ...], ...]:
    return found.newest


def _synchronous(found: WeightVersions) -> tuple[tuple[int, ...], ...]:
    """The version that the first stage uses, on all stages."""
    return (found.newest[0],) * found.pipeline.stages


def _before_the_newest(found: WeightVersions) -> tuple[tuple[int, ...], ...]:
    every = found.pipeline.update_every
    own = tuple(max(0, m // every - 1) for m in range(found.micro_batches))
    return (own,) * found.pipeline.stages


_RULES: dict[str, Callable[[WeightVersions], tuple[tuple[int, ...], ...]]] = {
    "pipedream": _stashed,
    "pipedream-sync": _synchronous,
    "2bw": _before_the_newest,
}


def _newest_at_forwards(own: Sequence[Action]) -> tuple[int, ...]:
    found, newest = list[int](), 0
    for action in own:
        newest += action.kind == "U"
        if action.kind == "F":
            found.append(newest)
    return tuple(found)


def _most_alive(own: Sequence[Action], seen: Sequence[int]) -> int:
    last, alive, most = last_uses(seen), {0}, 1
    for action in own:
        if action.kind == "U":
            alive = {v for v in alive if last.get(v, -1) > action.micro_batch} | {max(alive) + 1}
            most = max(most, len(alive))
    return most
