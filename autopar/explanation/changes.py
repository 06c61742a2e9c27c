"""Changes of a machine in words for people, as changes of symbols and of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.kinds import each_kind

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
    """The hardware with the factors of `GROUPS` and `hbm_bytes` applied, to every kind of several."""
    return each_kind(hardware, lambda each: _changed(each, changes))


def _changed(hardware: Hardware, changes: Mapping[str, float]) -> Hardware:
    factor = {group: changes.get(group, 1.0) for group in GROUPS}

    def link(old: Link) -> Link:
        return replace(
            old,
            bandwidth_bytes_per_second=old.bandwidth_bytes_per_second * factor["link_bandwidth"],
            latency_seconds=old.latency_seconds * factor["link_latency"],
        )

    return replace(
        hardware,
        peak_flops=tuple((size, flops * factor["flops"]) for size, flops in hardware.peak_flops),
        memory_bytes_per_second=hardware.memory_bytes_per_second * factor["memory_bandwidth"],
        host_seconds=hardware.host_seconds / factor["host_speed"],
        memory_bytes=int(changes.get("hbm_bytes", hardware.memory_bytes)),
        inside_node=link(hardware.inside_node),
        across_nodes=link(hardware.across_nodes),
    )
