"""Figures of machines: peak FLOP/s, bandwidths, latencies, sizes of memory, each with its source.

Bandwidths are per rank and per direction, and 1 GB is 1e9 bytes. `autopar.cost_model.catalogue` has the machines with
names such as `h100`; `hardware_toml` reads them from files, and `hardware_writing` writes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.arith import Quantity
from autopar.cost_model.machines.links import Link, axis_link
from autopar.errors import AutoparError
from autopar.ir import Mesh, Tier
from autopar.ir.tier import TO_HOST, Move

__all__ = ["DTYPE_BYTES", "KINDS", "Disk", "Hardware", "Host", "Kind", "Link", "Source"]

Kind = Literal["datasheet", "measured", "fitted", "guess"]
KINDS: tuple[Kind, ...] = ("datasheet", "measured", "fitted", "guess")

# Number formats of matrix products and the bytes of their elements. `tf32` reads float32.
DTYPE_BYTES = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4, "float64": 8}


@dataclass(frozen=True)
class Source:
    """Where a figure comes from.

    Attributes:
        kind: "datasheet" (of the vendor), "measured", "fitted" or "guess".
        text: the datasheet, who measured it and how, or the data that it was fitted to.
    """

    kind: Kind
    text: str


UNSTATED = Source("guess", "not stated")


@dataclass(frozen=True)
class Host:
    """One rank's share of the machine around its device.

    Attributes:
        memory_bytes: memory of the host that a rank may use: 1/n of it in a node of n devices; 0 where the device is
            the CPU, whose memory is `Hardware.memory_bytes`.
        bandwidth_bytes_per_second: bandwidth between host and device, in one direction.
        latency_seconds: duration of a copy of no bytes.
        update_bytes_per_second: bytes per second that the CPU reads and writes in an optimizer's update.
    """

    memory_bytes: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    update_bytes_per_second: float


@dataclass(frozen=True)
class Disk:
    """One rank's share of the disks of its machine.

    Attributes:
        memory_bytes: space for the files of a rank: 1/n of the node's disks in a node of n devices.
        read_bytes_per_second: bandwidth from the disk to the host's memory.
        write_bytes_per_second: bandwidth from the host's memory to the disk.
        latency_seconds: duration of a read of no bytes.
    """

    memory_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    latency_seconds: float

    @property
    def update_bytes_per_second(self) -> float:
        """Bytes per second that an optimizer reads and writes in files, if it writes as many bytes as it reads."""
        return 2 / (1 / self.read_bytes_per_second + 1 / self.write_bytes_per_second)


@dataclass(frozen=True)
class Hardware:
    """The devices of a cluster: equal ones in equal nodes, or the slowest of several kinds.

    Attributes:
        name: name in the catalogue.
        peak_flops: pairs (itemsize in bytes, FLOP/s) of dense matrix products, itemsize rising.
        memory_bytes_per_second: bandwidth of the device's own memory.
        memory_bytes: capacity of the device's own memory.
        launch_seconds: duration of a kernel without work, from launch to end.
        devices_per_node: ranks that reach each other over `inside_node`.
        inside_node: the link between two ranks of a node.
        across_nodes: the link of one rank to other nodes: its NIC, or its share of the node's.
        matmul_efficiency: fraction of `peak_flops` that large matrix products reach.
        matmul_half_size: extent of rows, columns or inner dim at which a matrix product reaches half of
            `matmul_efficiency`; 0 if products of any size reach all of it.
        memory_efficiency: fraction of `memory_bytes_per_second` that element-wise kernels reach.
        attention_efficiency: fraction of `peak_flops` that fused attention reaches; masked scores count as work.
        host_seconds: time of the CPU to issue one op; the device waits if this is longer than its work.
        update_seconds: time of one op of an optimizer's update of one parameter, where the host issues each of them and
            is the device; 0 where the update counts as memory traffic alone, as with fused updates.
        step_seconds: time of a step that no op and no parameter accounts for: the runtime's own.
        hides: fraction, 0 to 1, of the communication of parameters and gradients that overlaps with compute.
        reserved_bytes: device memory that tensors cannot use: CUDA context, buffers of NCCL.
        dtype_flops: pairs (name of a dtype in `DTYPE_BYTES`, FLOP/s).
        wired_ranks: number of devices that are connected by a wire for every pair, where `inside_node` is the sum of a
            device's wires; 0 where a switch gives every group the whole bandwidth.
        reduce_gain_ranks: size of the smallest group for which `inside_node.reduce_gain` holds.
        host: memory of the machine around the device; None if it is not known, so that nothing can be stored there.
        nvme: disks of that machine; None if they are not known, so that nothing can be stored there.
        sources: pairs (name of a figure such as `inside_node.latency_seconds`, its source).
        kinds: pairs of a machine and its number of nodes in a cluster of several kinds, in the order of their ranks,
            whose slowest figures are then those above (`autopar.cost_model.machines.kinds`); () for one kind.
        between: link between two kinds, if it is not the slower one of their links between nodes.
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
    attention_efficiency: float = 1.0
    host_seconds: float = 0.0
    update_seconds: float = 0.0
    step_seconds: float = 0.0
    hides: float = 0.0
    reserved_bytes: int = 0
    dtype_flops: tuple[tuple[str, float], ...] = ()
    wired_ranks: int = 0
    reduce_gain_ranks: int = 2
    host: Host | None = None
    nvme: Disk | None = None
    sources: tuple[tuple[str, Source], ...] = ()
    kinds: tuple[tuple[Hardware, int], ...] = ()
    between: Link | None = None

    def flops_per_second(self, itemsize_bytes: int) -> float:
        """Peak FLOP/s for elements of this size: that of the narrowest listed size that holds them."""
        fitting = [flops for size, flops in self.peak_flops if size >= itemsize_bytes]
        return fitting[0] if fitting else self.peak_flops[-1][1]

    def dtype_flops_per_second(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype of `DTYPE_BYTES`. Raises AutoparError if the device has no figure for it."""
        known = dict(self.dtype_flops) or {_DTYPES[size]: flops for size, flops in self.peak_flops if size in _DTYPES}
        if dtype not in known:
            raise AutoparError(f"{self.name} has no figure for products of {dtype}; it has {', '.join(known)}.")
        return known[dtype]

    def with_network(self, bandwidth_bytes_per_second: float, latency_seconds: float | None = None) -> Hardware:
        """This hardware with another bandwidth (per rank) and latency between nodes."""
        latency = self.across_nodes.latency_seconds if latency_seconds is None else latency_seconds
        link = dataclasses.replace(
            self.across_nodes, bandwidth_bytes_per_second=bandwidth_bytes_per_second, latency_seconds=latency
        )
        return dataclasses.replace(self, across_nodes=link)

    def source(self, figure: str) -> Source:
        """The source of a figure; a guess if `sources` has none."""
        return dict(self.sources).get(figure, UNSTATED)

    def updates_per_second(self, tier: Tier) -> Quantity:
        """Bytes per second that an optimizer's update reads and writes in a tier."""
        if tier == "device":
            return self.memory_bytes_per_second * self.memory_efficiency
        return self.storing(tier).update_bytes_per_second

    def storing(self, tier: Tier) -> Host | Disk:
        """The memory of the tier host or nvme. Raises AutoparError if the machine has no figures for it."""
        tiers: dict[str, Host | Disk | None] = {"host": self.host, "nvme": self.nvme}
        if found := tiers.get(tier):
            return found
        there = ["device", *(name for name, memory in tiers.items() if memory is not None)]
        raise AutoparError(
            f"{self.name} has no figures of the tier {tier}: give its hardware file a table [{tier}], or store the "
            f"parameters in one of its tiers: {', '.join(there)}."
        )

    def move_seconds(self, move: Move, size_bytes: Quantity) -> Quantity:
        """Duration of a move between two tiers."""
        memory = self.storing(move.tier)
        if isinstance(memory, Disk):
            reads = move.name == TO_HOST
            rate = memory.read_bytes_per_second if reads else memory.write_bytes_per_second
        else:
            rate = memory.bandwidth_bytes_per_second
        return memory.latency_seconds + size_bytes / rate

    def link(self, mesh: Mesh, axis: int) -> Link:
        """The link of collectives along one axis of the mesh, see `links.axis_link`.

        The groups of the axes that are placed last lie closest together.
        """
        return self.axis_link(mesh.strides[axis], mesh.sizes[axis], mesh.size)

    def axis_link(self, stride: Quantity, size: Quantity, ranks: Quantity | None = None) -> Link:
        """The link of groups of `size` ranks whose numbers differ by `stride`; both may be arrays."""
        return axis_link(self, stride, size, ranks)


_DTYPES = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
