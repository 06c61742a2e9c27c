"""The efficiency that one training framework reaches on one kind of device, as a few fitted figures."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from autopar.cost_model.machines.cluster import Cluster, find_cluster
from autopar.cost_model.machines.hardware import Hardware, Source
from autopar.cost_model.machines.kinds import each_kind


@dataclass(frozen=True)
class Software:
    """Figures of one runtime (training framework) on one kind of device; None keeps the hardware's own figure.

    Attributes:
        name: name of the runtime.
        matmul_efficiency: fraction of the peak that its large matrix products reach.
        matmul_half_size: extent of a product at which it reaches half of that; 0 if it was fitted without shapes.
        memory_efficiency: fraction of the memory bandwidth that its element-wise kernels reach.
        attention_efficiency: fraction of the peak that fused attention reaches; masked scores count as work.
        host_seconds: time of the CPU to issue one op, Python included.
        network_efficiency: fraction of the bandwidth between nodes that collectives reach.
        hides: fraction, 0 to 1, of the communication of parameters and gradients that overlaps with compute, up to the
            duration of the compute.
        hides_activations: the same fraction for activations, which some runtimes send piece by piece while they
            compute.
        skew_seconds: time that a collective of activations waits for its slowest rank, for each rank beyond the first.
        stall_seconds: time that a collective of activations waits, per rank, where messages between pipeline stages
            cross nodes; it grows with the square root of the number of nodes that the group spans.
        hop_seconds: duration of a step of a ring between nodes; None for the network's own latency.
        send_seconds: time of a message between stages in different nodes, on top of its transfer.
        runs_ahead: whether the host issues kernels well ahead of the device, so that a region takes the larger of the
            two sums; otherwise every op waits for its own launch.
        step_seconds: fixed time per step: logging, the data loader, the optimizer's launches.
        source: source of the figures.
    """

    name: str = "autopar"
    matmul_efficiency: float | None = None
    matmul_half_size: float | None = None
    memory_efficiency: float | None = None
    attention_efficiency: float | None = None
    host_seconds: float | None = None
    network_efficiency: float = 1.0
    hides: float | None = None
    hides_activations: float = 0.0
    skew_seconds: float = 0.0
    stall_seconds: float = 0.0
    hop_seconds: float | None = None
    send_seconds: float = 0.0
    runs_ahead: bool = False
    step_seconds: float = 0.0
    source: str = "guess"

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware with this runtime's figures in place of its own."""
        return each_kind(hardware, self._on)

    def _on(self, hardware: Hardware) -> Hardware:
        own = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
        nic = hardware.across_nodes.bandwidth_bytes_per_second * self.network_efficiency
        return dataclasses.replace(hardware, **own).with_network(nic, self.hop_seconds)


# Figures of a device that a runtime may have of its own.
_OWN = ("matmul_efficiency", "matmul_half_size", "memory_efficiency", "attention_efficiency", "host_seconds", "hides")

AUTOPAR = Software()

# Guesses for eager PyTorch on a GPU without measurements: about the middle of the runtimes in
# benchmarks/accuracy/runtimes.py. On Gloo with a slow link, 82 to 87 % of autopar's communication overlaps with compute
# (benchmarks/results/benchmarks.md); NCCL was never measured.
_EAGER = {"memory_efficiency": 0.55, "attention_efficiency": 0.5, "host_seconds": 45e-6, "hides": 0.8}
_EAGER_SOURCE = Source("guess", "as eager runtimes fitted to published runs")


def as_eager_runs(hardware: Hardware) -> Hardware:
    """The hardware with guesses of eager PyTorch's efficiency where its file does not give it.

    A file that `autopar calibrate` wrote has measured figures, which stay as they are.
    """
    return each_kind(hardware, _as_eager_runs)


def _as_eager_runs(hardware: Hardware) -> Hardware:
    stated = {figure for figure, _ in hardware.sources}
    missing: dict[str, Any] = {n: value for n, value in _EAGER.items() if n not in stated}
    sources = tuple((name, _EAGER_SOURCE) for name in missing)
    return dataclasses.replace(hardware, sources=(*hardware.sources, *sources), **missing)


def named_hardware(hardware: Hardware | str | os.PathLike[str]) -> Hardware:
    """The hardware that a person names for autopar's own runtime: that of a file with the guesses of `as_eager_runs`.

    Args:
        hardware: a name in the catalogue or of a cluster, the path of a TOML file, or the hardware itself, which is
            taken as it is.
    """
    return hardware if isinstance(hardware, Hardware) else as_eager_runs(find_cluster(hardware).hardware)


def with_eager_runs(cluster: Cluster) -> Cluster:
    """The cluster with the guesses of `as_eager_runs` for its hardware."""
    return dataclasses.replace(cluster, hardware=as_eager_runs(cluster.hardware))
