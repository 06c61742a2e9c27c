"""What the machines can do: explicit, frozen values, each with its source beside it.

Kinds of source: *datasheet* (the vendor's figure), *measured* (by whom, where), *fitted* (to what),
and *guess*. Bandwidths count in tens (1 GB is 1e9 bytes), per rank and per direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import AutoparError
from autopar.ir import Mesh


@dataclass(frozen=True)
class Link:
    """What carries the messages of one rank.

    Attributes:
        bandwidth_bytes_per_second: that a rank can send while it receives as much.
        latency_seconds: of one hop of a ring.
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Hardware:
    """One kind of cluster: equal devices in equal nodes.

    Attributes:
        name: in the catalogue.
        peak_flops: pairs (itemsize in bytes, FLOP/s) of dense matrix products, itemsize rising.
        memory_bytes_per_second: bandwidth of the device's own memory.
        memory_bytes: capacity of the device's own memory.
        launch_seconds: to start one kernel.
        devices_per_node: ranks that reach each other over `inside_node`.
        inside_node: the link between two ranks of a node.
        across_nodes: the link of one rank to other nodes.
        matmul_efficiency: fraction of the peak that large matrix products reach.
        matmul_half_size: extent of a product at which it reaches half of that; 0 for no loss.
        memory_efficiency: fraction of the memory bandwidth that element-wise kernels reach.
        host_seconds: for the CPU to issue one kernel.
        reserved_bytes: of the device's memory, for its context and for library buffers.
    """

    name: str
    peak_flops: tuple[tuple[int, float], ...]
    memory_bytes_per_second: float
    memory_bytes: int
    launch_seconds: float
    devices_per_node: int
    inside_node: Link
    across_nodes: Link
    matmul_efficiency: float = 1.0
    matmul_half_size: float = 0.0
    memory_efficiency: float = 1.0
    host_seconds: float = 0.0
    reserved_bytes: int = 0

    def flops_per_second(self, itemsize_bytes: int) -> float:
        """Peak of the narrowest listed number format that holds elements of this size."""
        fitting = [flops for size, flops in self.peak_flops if size >= itemsize_bytes]
        return fitting[0] if fitting else self.peak_flops[-1][1]

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The link that collectives along one axis of the mesh run at.

        Ranks are numbered row-major, so the last axes lie inside a node. An axis that leaves the
        node has there as many ranks, and so as many links to other nodes, as fit beside the later
        axes.
        """
        stride = math.prod(mesh.sizes[axis + 1 :])
        if stride * mesh.sizes[axis] <= self.devices_per_node:
            return self.inside_node
        ranks_in_node = max(1, self.devices_per_node // stride)
        outward = self.across_nodes.bandwidth_bytes_per_second * ranks_in_node
        bandwidth = min(outward, self.inside_node.bandwidth_bytes_per_second)
        return Link(bandwidth, self.across_nodes.latency_seconds)


H100 = Hardware(
    name="h100",
    peak_flops=(
        (2, 989.4e12),  # datasheet: NVIDIA H100 SXM, bfloat16 tensor core, dense
        (4, 67e12),  # datasheet: float32 outside tensor cores (PyTorch's default for matmul)
        (8, 67e12),  # datasheet: float64 tensor core
    ),
    memory_bytes_per_second=3.35e12,  # datasheet: HBM3
    memory_bytes=80_000_000_000,  # datasheet
    launch_seconds=4e-6,  # guess: a small kernel with its launch hidden in part
    devices_per_node=8,  # datasheet: HGX H100
    inside_node=Link(
        # measured: nccl-tests all-gather of 17 GB on 8 H100, stas00 ml-engineering (datasheet: 450)
        360e9,
        1.2e-6,  # fitted: 16.9 us of a 1 KB all-reduce on 8 H100 (same source) over its 14 hops
    ),
    across_nodes=Link(
        46e9,  # measured: nccl-tests, one pair of H100 on 400 Gb/s InfiniBand (50 in datasheet)
        # fitted: 69 us of a 1 KB all-reduce on 2 nodes of 8 H100, less 26 hops inside nodes, over 4
        1e-5,
    ),
)

A100 = Hardware(
    name="a100",
    peak_flops=(
        (2, 312e12),  # datasheet: NVIDIA A100 80GB SXM, bfloat16 tensor core, dense
        (4, 19.5e12),  # datasheet: float32 outside tensor cores
        (8, 19.5e12),  # datasheet: float64 tensor core
    ),
    memory_bytes_per_second=2.039e12,  # datasheet: HBM2e
    memory_bytes=80_000_000_000,  # datasheet
    launch_seconds=4e-6,  # guess, as for h100
    devices_per_node=8,  # datasheet: HGX A100
    inside_node=Link(
        # measured: nccl-tests all-reduce of 17 GB on 8 A100, stas00 ml-engineering (datasheet: 300)
        235e9,
        3.1e-6,  # fitted: 43.8 us of a 32 KB all-reduce on 8 A100 (same source) over its 14 hops
    ),
    across_nodes=Link(
        25e9,  # datasheet: HDR InfiniBand, 200 Gb/s for each GPU
        1e-5,  # guess, as for h100
    ),
)

CPU_GLOO = Hardware(
    name="cpu-gloo",
    peak_flops=(
        (2, 220e9),  # measured: torch 2.13, 1024^3 bfloat16 matmul, one core of a cloud AMD EPYC
        (4, 110e9),  # measured: the same in float32
        (8, 45e9),  # measured: the same in float64
    ),
    memory_bytes_per_second=20e9,  # guess: half of 43e9 measured for one busy core
    memory_bytes=8_000_000_000,  # guess
    launch_seconds=2e-6,  # measured: x + 1 on 8 elements, torch 2.13
    devices_per_node=64,  # all ranks on one machine
    inside_node=Link(
        # fitted: all-reduce of 32 MB in 0.19 s, 4 Gloo processes on 2 cores; all-gather is slower
        250e6,
        1e-4,  # guess: wake-up of a process on a shared core
    ),
    across_nodes=Link(125e6, 2e-4),  # guess: 1 Gb/s Ethernet
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({h.name: h for h in (H100, A100, CPU_GLOO)})


def find_hardware(name: str) -> Hardware:
    """The hardware of the catalogue called `name`. Raises AutoparError listing what there is."""
    if name not in HARDWARE:
        raise AutoparError(f"There is no hardware {name!r}; choose one of {', '.join(HARDWARE)}.")
    return HARDWARE[name]
