"""Answers to "what if the cluster were different": the changes that are tried, and the plan chosen under each.

A change is the same request with one figure changed. To search all of it takes as long as the request itself. Two plans
are therefore priced there: the plan in hand, and the plan of the setting that estimates then put first, if it promises
a shorter step. The faster of the two is a bound: the answer to the changed request is at least as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.kinds import each_kind
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import moved_seconds
from autopar.search.request.request import Request


@dataclass(frozen=True)
class Change:
    """The effect of another cluster on the choice.

    Attributes:
        what: the change of the cluster, such as "twice the bandwidth between nodes".
        same_seconds: duration of a step of the chosen plan on that cluster.
        best: the setting of the fastest plan that was priced on that cluster, in words.
        best_seconds: duration of a step of this plan; the whole search finds one that is at least as fast.
    """

    what: str
    same_seconds: float
    best: str
    best_seconds: float


def near(settings: Sequence[PricedCandidate], best: PricedCandidate, count: int = 16) -> list[ClusterSetting]:
    """The settings whose turn it could be on another cluster: the fastest of those that fit as well."""
    fitting = [each for each in settings if each.memory_bytes <= max(best.memory_bytes, 1) * 1.5]
    return list(dict.fromkeys([best.setting, *(each.setting for each in fitting[:count])]))


class Promise(NamedTuple):
    """The setting that estimates put first.

    Attributes:
        priced: its estimate; None where no setting fits, not even with what the host may store.
        seconds: estimated duration of a step, with the seconds that the host adds.
    """

    priced: PricedCandidate | None
    seconds: float


def promised_first(priced: Sequence[PricedCandidate], request: Request) -> Promise:
    """The setting with the least estimate under a request; with `offload` also of those that fit only with the host."""
    promises = [Promise(each, each.seconds + moved_seconds(each, request)) for each in priced]
    best = min(promises, key=lambda each: each.seconds, default=Promise(None, math.inf))
    return best if best.seconds < math.inf else Promise(None, math.inf)


def faster_clusters(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with one figure of its cluster doubled."""

    def doubled(figure: str) -> Request:
        return request.but(hardware=changed_hardware(request.hardware, {figure: 2.0}))

    yield "twice the arithmetic", doubled("flops")
    yield "twice the memory bandwidth", doubled("memory_bandwidth")
    if request.cluster.devices_per_node > 1:
        yield "twice the bandwidth inside a node", doubled("inside_node")
    if request.cluster.nodes > 1:
        yield "twice the bandwidth between nodes", doubled("across_nodes")


_MEMORIES = (24, 40, 80, 141, 192)  # GB of devices one can rent


def larger_memories(request: Request) -> list[tuple[str, Request]]:
    """The request with the next larger bounds on memory: those that a user names, or those of larger devices."""

    def of(size_bytes: int) -> tuple[str, Request]:
        words = f"{size_bytes / 1e9:.0f} GB"
        if request.memory_bytes is not None:
            return f"a bound of {words}", request.but(memory_bytes=size_bytes)
        hardware = each_kind(request.hardware, lambda each: replace(each, memory_bytes=size_bytes))
        return f"{words} of memory", request.but(hardware=hardware)

    found = [of(int(size * 1e9)) for size in _MEMORIES]
    return [each for each in found if each[1].bound_bytes > 1.01 * request.bound_bytes][:2]


# Words for what a person may change, and the symbols that each of them scales.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "link_bandwidth": ("bandwidth_",),
    "link_latency": ("latency_",),
    "flops": ("peak_flops_",),
    "memory_bandwidth": ("memory_bytes_per_second",),
    "host_speed": ("host_seconds",),
}


def scaled(values: Mapping[str, float], group: str, factor: float) -> dict[str, float]:
    """The symbols of a group with their values multiplied by a factor; for `host_speed` divided."""
    if group == "host_speed":
        factor = 1 / factor
    return {name: value * factor for name, value in values.items() if name.startswith(GROUPS[group])}


def changed_hardware(hardware: Hardware, changes: Mapping[str, float]) -> Hardware:
    """The hardware with the factors of `GROUPS`, of the links by name, and `hbm_bytes` applied, to every kind."""
    return each_kind(hardware, lambda each: _changed(each, changes))


def _changed(hardware: Hardware, changes: Mapping[str, float]) -> Hardware:
    factor = {group: changes.get(group, 1.0) for group in GROUPS}

    def link(name: str) -> Link:
        old: Link = getattr(hardware, name)
        return replace(
            old,
            bandwidth_bytes_per_second=old.bandwidth_bytes_per_second
            * factor["link_bandwidth"]
            * changes.get(name, 1.0),
            latency_seconds=old.latency_seconds * factor["link_latency"],
        )

    return replace(
        hardware,
        peak_flops=tuple((size, flops * factor["flops"]) for size, flops in hardware.peak_flops),
        memory_bytes_per_second=hardware.memory_bytes_per_second * factor["memory_bandwidth"],
        host_seconds=hardware.host_seconds / factor["host_speed"],
        memory_bytes=int(changes.get("hbm_bytes", hardware.memory_bytes)),
        inside_node=link("inside_node"),
        across_nodes=link("across_nodes"),
    )
