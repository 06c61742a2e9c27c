"""Where the figures of a machine come from, in three words: measured, published or scaled.

measured     by `autopar calibrate` on this machine
published    in a datasheet, or in somebody's measurements of such a machine
scaled       a guess that leans on other machines
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.cost_model.machines.gpu_names import catalogue_names
from autopar.cost_model.machines.hardware import Hardware

ORIGINS = ("measured", "published", "scaled")
# What people know a figure as -> the figures of a file that it stands for.
_FIGURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "products": ("peak_flops.", "matmul_efficiency"),
        "memory": ("memory_bytes_per_second", "memory_efficiency"),
        "attention": ("attention_efficiency",),
        "launches": ("launch_seconds", "host_seconds"),
        "links in a node": ("inside_node.bandwidth_bytes_per_second", "inside_node.latency_seconds"),
        "links between nodes": ("across_nodes.bandwidth_bytes_per_second", "across_nodes.latency_seconds"),
        "overlap": ("hides",),
    }
)


def origins_of(hardware: Hardware) -> Mapping[str, str]:
    """Figure -> "measured", "published" or "scaled": the last of these that any of its parts is."""
    is_own = hardware.name not in catalogue_names()
    return {figure: _origin(hardware, starts, is_own=is_own) for figure, starts in _FIGURES.items()}


def _origin(hardware: Hardware, starts: tuple[str, ...], *, is_own: bool) -> str:
    kinds = [source.kind for name, source in hardware.sources if name.startswith(starts)]
    if not kinds or "guess" in kinds:
        return "scaled"
    return "measured" if is_own and "datasheet" not in kinds else "published"
