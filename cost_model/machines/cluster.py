"""Clusters by their names: `h100` (one node), `h100x4` (4 GPUs of a node), `h100x8x16` (16 nodes), or a TOML file."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_model.catalogue import HARDWARE, find_hardware
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.hardware_toml import read_hardware
from autopar.errors import AutoparError

MOST_RANKS = 131_072  # more than the largest machine that trains one model; a search lists ranks


@dataclass(frozen=True)
class Cluster:
    """A number of equal nodes.

    Attributes:
        hardware: figures of every node, which has `hardware.devices_per_node` ranks.
        nodes: number of nodes.
    """

    hardware: Hardware
    nodes: int = 1

    def __post_init__(self) -> None:
        for what, size in (("nodes", self.nodes), ("ranks in a node", self.devices_per_node)):
            if not isinstance(size, int) or size < 1:
                raise AutoparError(f"A cluster has a positive number of {what}, not {size!r}.")
        if self.ranks > MOST_RANKS:
            most = max(MOST_RANKS // self.devices_per_node, 1)
            raise AutoparError(
                f"A cluster of {self.ranks} ranks cannot be planned: the most are {MOST_RANKS}; write "
                f"{self.hardware.name}x{self.devices_per_node}x{most}."
            )

    @property
    def devices_per_node(self) -> int:
        """Number of ranks in a node."""
        return self.hardware.devices_per_node

    @property
    def ranks(self) -> int:
        """Number of ranks in all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.hardware.name}x{self.devices_per_node}x{self.nodes}"


def find_cluster(given: Cluster | Hardware | str | os.PathLike[str]) -> Cluster:
    """The cluster for a name, the path of a TOML file, or a value.

    >>> find_cluster("h100x8x16").ranks
    128

    Args:
        given: a name: `h100x8x16` for 16 nodes of 8 GPUs, `h100x4` for 4 GPUs of one node, `h100` for one whole node.
            Or the path of a `.toml` file, which sizes may follow: `my.toml x 4 x 2`. A `Hardware` means one whole node,
            and a `Cluster` is returned as it is.

    Raises AutoparError for a size that is not a positive number, an unknown GPU (with the nearest names),
    more ranks than a node has, and a file that is missing or wrong.
    """
    if isinstance(given, Cluster):
        return given
    if isinstance(given, Hardware):
        return Cluster(given)
    text = os.fspath(given)
    gpu, node, nodes = _split(text)
    if gpu.endswith(".toml"):
        file = read_hardware(Path(gpu).expanduser())
        hardware, count = file.hardware, file.nodes
    else:
        hardware, count = find_hardware(gpu), 1
    if node is not None:
        hardware = _in_node(hardware, _size(node, text, "ranks in a node"), text)
        count = 1
    return Cluster(hardware, count if nodes is None else _size(nodes, text, "nodes"))


def _split(text: str) -> tuple[str, str | None, str | None]:
    """Splits a name into GPU, size of a node and number of nodes: `h100x8x16` -> h100, 8, 16.

    An x inside the name of a GPU, as in `mi300x` or `rtx4090`, separates nothing.
    """
    stripped = text.strip()
    if not stripped:
        raise AutoparError("A cluster is named as h100x8x16 (16 nodes of 8), h100x4 or h100.")
    head, *sizes = re.split(r"\s*[x×]\s*(?=[-+.\d])", stripped, flags=re.IGNORECASE)
    if head.lower() in ("rt", "") and sizes:  # rtx4090x8 and x100x8 split at their own x first
        head, *sizes = f"{head}x{sizes[0]}", *sizes[1:]
    gpu, _, word = head.rpartition("x")
    if not sizes and gpu.lower() in HARDWARE:  # h100xeight
        return gpu, word, None
    if len(sizes) > 2:
        raise AutoparError(f"Cannot read the cluster {text!r}: write GPU x ranks in a node x nodes, as h100x8x16.")
    node, nodes = (*sizes, None, None)[:2]
    return head, node, nodes


def _size(word: str, text: str, what: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,20}", word.strip()):
        raise AutoparError(f"Cannot read the cluster {text!r}: {word!r} is not a number of {what}; write h100x8x16.")
    size = int(word)
    if size < 1:
        raise AutoparError(f"The cluster {text!r} has {size} {what}; it needs at least 1.")
    return size


def _in_node(hardware: Hardware, size: int, text: str) -> Hardware:
    most = hardware.devices_per_node
    if size > most:
        raise AutoparError(
            f"The cluster {text!r} has {size} ranks in a node, but a node of {hardware.name} has "
            f"{most}; write {hardware.name}x{most}x{-(-size // most)} for {size} ranks."
        )
    return dataclasses.replace(hardware, devices_per_node=size)
