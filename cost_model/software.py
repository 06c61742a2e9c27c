"""What a runtime makes of a machine: at most six figures for one runtime on one kind of device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.cost_model.hardware import Hardware


@dataclass(frozen=True)
class Software:
    """Figures of one runtime on one kind of device; None leaves the hardware's own.

    Attributes:
        name: of the runtime.
        matmul_efficiency: fraction of the peak that its large matrix products reach.
        memory_efficiency: fraction of the memory bandwidth that its element-wise kernels reach.
        attention_efficiency: the same for fused attention, all scores counted.
        host_seconds: that it takes the CPU to issue one op, Python included.
        network_efficiency: fraction of the bandwidth between nodes that is left to a collective.
        hides: fraction of the compute of a phase that parameters and gradients hide behind on the way.
        step_seconds: fixed per step: logging, the data loader, the optimizer's launches.
        source: of the figures.
    """

    name: str = "autopar"
    matmul_efficiency: float | None = None
    memory_efficiency: float | None = None
    attention_efficiency: float | None = None
    host_seconds: float | None = None
    network_efficiency: float = 1.0
    hides: float = 0.0
    step_seconds: float = 0.0
    source: str = "guess"

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware as this runtime sees it."""
        names = ("matmul_efficiency", "memory_efficiency", "attention_efficiency", "host_seconds")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        nic = hardware.across_nodes.bandwidth_bytes_per_second * self.network_efficiency
        return dataclasses.replace(hardware, **own).with_network(nic)


AUTOPAR = Software()

SOFTWARE: Mapping[tuple[str, str], Software] = MappingProxyType({})
