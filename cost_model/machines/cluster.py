"""Clusters by their names: `h100` (one node), `h100x4` (4 GPUs of a node), `h100x8x16` (16 nodes), or a TOML file.

Several kinds of machines are several of these, in the order of their ranks: `h100x8x2+a100x8x2`, or the key `kinds` of
a file, see `autopar.cost_model.machines.hardware_toml`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_model.catalogue import HARDWARE, find_hardware
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.hardware_toml import KindsFile, read_cluster_file
from autopar.cost_model.machines.kinds import mixed
from autopar.cost_model.machines.links import Link
from autopar.errors import AutoparError

_KIND = re.compile(r"\+(?!\d)|(?<![xX×])\+")  # between two kinds; the + of h100x+8 is a sign
MOST_RANKS = 131_072  # more than the largest machine that trains one model; a search lists ranks
MOST_KINDS = 4  # `explain` searches a plan for each of the sets of kinds, of which 5 have 31


@dataclass(frozen=True)
class Cluster:
    """A number of equal nodes, or of several kinds, which then count as nodes of as many ranks as divide all of them.

    Attributes:
        hardware: figures of every node, which has `hardware.devices_per_node` ranks; of the slowest of several kinds.
        nodes: number of nodes.
    """

    hardware: Hardware
    nodes: int = 1

    def __post_init__(self) -> None:
        for what, size in (("nodes", self.nodes), ("ranks in a node", self.devices_per_node)):
            if not isinstance(size, int) or size < 1:
                raise AutoparError(f"A cluster has a positive number of {what}, not {size!r}.")
        if self.ranks > MOST_RANKS:
            most = f"{self.hardware.name}x{self.devices_per_node}x{max(MOST_RANKS // self.devices_per_node, 1)}"
            instead = "name fewer nodes of its kinds" if self.hardware.kinds else f"write {most}"
            raise AutoparError(
                f"A cluster of {self.ranks} ranks cannot be planned: the most are {MOST_RANKS}; {instead}."
            )

    @property
    def devices_per_node(self) -> int:
        """Number of ranks in a node."""
        return self.hardware.devices_per_node

    @property
    def ranks(self) -> int:
        """Number of ranks in all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The parts of the cluster that have equal nodes, in the order of their ranks."""
        found = tuple(Cluster(each, nodes) for each, nodes in self.hardware.kinds)
        return found or (self,)

    def __str__(self) -> str:
        if self.hardware.kinds:  # their sizes stand in the name
            return self.hardware.name
        return f"{self.hardware.name}x{self.devices_per_node}x{self.nodes}"


def find_cluster(given: Cluster | Hardware | str | os.PathLike[str]) -> Cluster:
    """The cluster for a name, the path of a TOML file, or a value.

    >>> find_cluster("h100x8x16").ranks
    128
    >>> [str(kind) for kind in find_cluster("h100x8x2+a100x8x2").kinds]
    ['h100x8x2', 'a100x8x2']

    Args:
        given: a name: `h100x8x16` for 16 nodes of 8 GPUs, `h100x4` for 4 GPUs of one node, `h100` for one whole node.
            Or the path of a `.toml` file, which sizes may follow: `my.toml x 4 x 2`. Several of these with a + between
            them are the kinds of a cluster. A `Hardware` means one whole node, and a `Cluster` is returned as it is.

    Raises AutoparError for a size that is not a positive number, an unknown GPU (with the nearest names),
    more ranks than a node has, and a file that is missing or wrong.
    """
    if isinstance(given, Cluster):
        return given
    if isinstance(given, Hardware):
        return Cluster(given)
    text = os.fspath(given)
    names = _KIND.split(text)
    if len(names) > 1 and not _is_file(text):
        for name in names:
            if not name.strip():
                raise AutoparError(
                    f"Cannot read the cluster {text!r}: beside a + stands a kind; write h100x8x2+a100x8x2."
                )
        return cluster_of_kinds(_kinds(names, text))
    return _of_one_name(text)


def cluster_of_kinds(clusters: Sequence[Cluster], name: str = "", between: Link | None = None) -> Cluster:
    """The cluster of several ones, in this order of their ranks; equal neighbours without a link between are one kind.

    Args:
        clusters: the kinds.
        name: its name; by default the names of the kinds with a + between them.
        between: link between two kinds; None for the slower one of their links between nodes.
    """
    kinds = [kind for each in clusters for kind in each.kinds]
    alike = itertools.groupby(kinds, key=lambda each: each.hardware if between is None else id(each))
    groups = [list(group) for _, group in alike]
    counts = tuple((group[0].hardware, sum(each.nodes for each in group)) for group in groups)
    if len(counts) == 1:
        return Cluster(*counts[0])
    hardware = mixed(counts, name, between)
    ranks = sum(each.devices_per_node * nodes for each, nodes in counts)
    return Cluster(hardware, ranks // hardware.devices_per_node)


def _is_file(text: str) -> bool:
    """Whether a text with a + in it names a single file."""
    path, ending, _ = text.rpartition(".toml")
    return bool(ending) and os.path.isfile(os.path.expanduser(path.strip() + ending))


def _of_one_name(text: str, *, beside: str = "", folder: Path = Path()) -> Cluster:
    """The cluster that a text without a + names.

    Args:
        text: the name.
        beside: what names it as one of several kinds; "" where it is the whole cluster.
        folder: the folder where files lie.
    """
    gpu, node, nodes = _split(text)
    if gpu.endswith(".toml"):
        file = read_cluster_file(folder / os.path.expanduser(gpu))
        if isinstance(file, KindsFile) and beside:
            raise AutoparError(
                f"{file.path.name} lists kinds, and is named as one kind of {beside}: name its kinds there instead."
            )
        if isinstance(file, KindsFile):
            return _of_file(file, text, has_sizes=node is not None)
        hardware, count = file.hardware, file.nodes
    else:
        hardware, count = find_hardware(gpu), 1
    if node is not None:
        hardware = _in_node(hardware, _size(node, text, "ranks in a node"), text)
        count = 1
    return Cluster(hardware, count if nodes is None else _size(nodes, text, "nodes"))


def _kinds(names: Sequence[str], where: str, folder: Path = Path()) -> list[Cluster]:
    """The clusters that are named as the kinds of another, whose name is `where`; files lie in the folder."""
    if len(names) > MOST_KINDS:
        raise AutoparError(
            f"A cluster of {len(names)} kinds cannot be planned: the most are {MOST_KINDS}. Write neighbours that are "
            "alike as one kind (h100x8x2 for h100x8+h100x8), and those that are nearly alike as the slower one."
        )
    return [_of_one_name(name, beside=where, folder=folder) for name in names]


def _of_file(file: KindsFile, text: str, *, has_sizes: bool) -> Cluster:
    """The cluster of a file that lists kinds; files among these lie in its folder."""
    if has_sizes:
        raise AutoparError(
            f"The cluster {text!r} has sizes, but {file.path.name} lists kinds, which have their own: leave them out."
        )
    try:
        found = _kinds(file.kinds, file.path.name, file.path.parent)
    except AutoparError as error:
        raise AutoparError(f"{file.path}, line {file.line}: {error}") from None
    return cluster_of_kinds(found, file.name, file.between)


def _split(text: str) -> tuple[str, str | None, str | None]:
    """Splits a name into GPU, size of a node and number of nodes: `h100x8x16` -> h100, 8, 16.

    An x inside the name of a GPU, as in `mi300x` or `rtx4090`, or of a file separates nothing.
    """
    stripped = text.strip()
    if not stripped:
        raise AutoparError("A cluster is named as h100x8x16 (16 nodes of 8), h100x4 or h100.")
    path, ending, rest = stripped.rpartition(".toml")
    head, *sizes = re.split(r"\s*[x×]\s*(?=[-+.\d])", rest, flags=re.IGNORECASE)
    head = path + ending + head
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
