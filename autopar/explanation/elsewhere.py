"""What other figures of a cluster would lead to: the changes that are asked, and what each would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.hardware import Hardware
from autopar.search.comparison import best_that_fits
from autopar.search.settings import ClusterSetting, PricedCandidate


@dataclass(frozen=True)
class Change:
    """What another cluster would do.

    Attributes:
        what: such as "twice the bandwidth between nodes".
        same_seconds: a step of the chosen setting then; None if it cannot run.
        best: the setting that would be chosen then, in words.
        best_seconds: a step of that.
    """

    what: str
    same_seconds: float | None
    best: str
    best_seconds: float


def near(
    settings: Sequence[PricedCandidate], best: PricedCandidate, count: int = 24
) -> list[ClusterSetting]:
    """The settings whose turn it could be on another cluster: the fastest of those that fit as well."""
    fitting = [each for each in settings if each.memory_bytes <= max(best.memory_bytes, 1) * 1.5]
    return list(dict.fromkeys([best.setting, *(each.setting for each in fitting[:count])]))


def variants(cluster: Cluster) -> list[tuple[str, Hardware]]:
    """The cluster with one figure doubled."""
    hardware = cluster.hardware

    def faster(name: str) -> Hardware:
        link = getattr(hardware, name)
        doubled = replace(link, bandwidth_bytes_per_second=2 * link.bandwidth_bytes_per_second)
        return replace(hardware, **{name: doubled})

    peaks = tuple((size, 2 * flops) for size, flops in hardware.peak_flops)
    memory = 2 * hardware.memory_bytes_per_second
    found = [
        ("twice the arithmetic", replace(hardware, peak_flops=peaks)),
        ("twice the memory bandwidth", replace(hardware, memory_bytes_per_second=memory)),
    ]
    if cluster.devices_per_node > 1:
        found.append(("twice the bandwidth inside a node", faster("inside_node")))
    if cluster.nodes > 1:
        found.append(("twice the bandwidth between nodes", faster("across_nodes")))
    return found


_MEMORIES = (24, 40, 80, 141, 192)  # GB of devices one can rent


def memories(bound_bytes: int) -> list[int]:
    """The next larger memories."""
    return [int(size * 1e9) for size in _MEMORIES if size * 1e9 > 1.01 * bound_bytes][:2]


def change_of(
    what: str, priced: Sequence[PricedCandidate], best: PricedCandidate, bound_bytes: float,
    scale: float,
) -> Change | None:  # fmt: skip
    then = best_that_fits(priced, bound_bytes)
    if then is None:
        return None
    same = next((scale * p.seconds for p in priced if p.setting == best.setting), None)
    return Change(what, same, then.setting.name, scale * then.seconds)
