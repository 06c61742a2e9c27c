"""Machines that are faster or slower than another in every op."""

from __future__ import annotations

import dataclasses

from autopar.cost_model import Hardware


def times(hardware: Hardware, factor: float) -> Hardware:
    """A machine of one rank in a node that is so many times as fast in every op; its name is `x` and the factor."""
    return dataclasses.replace(
        hardware,
        name=f"x{factor:g}",
        devices_per_node=1,
        peak_flops=tuple((size, factor * flops) for size, flops in hardware.peak_flops),
        memory_bytes_per_second=factor * hardware.memory_bytes_per_second,
        launch_seconds=hardware.launch_seconds / factor,
    )
