"""Clusters of several kinds of machines, such as 16 H100 beside 16 A100.

Ranks wait for each other, so that what machines reach together follows from who waits for whom:

    slowest    ranks with equal shares of the work, which meet in every collective: the smallest of all rates and
               memories, and the longest of all durations
    together   the stages of a pipeline, whose shares differ: the means of all rates, and the shortest durations

`Hardware.kinds` lists the kinds in the order of their ranks; the other figures of such a hardware are the slowest
ones, so that a plan of equal shares is priced as one on any hardware. `stage_machines` says which machine each stage of
a pipeline has. A stage whose ranks are of one kind has that machine, and the others have the slowest of their kinds.

No cuts into stages are faster than equal stages on what the machines reach `together`: p machines with the rates r_i
do work of size w in at least w / sum(r_i) = (w / p) / mean(r_i) seconds. This holds for the smaller of two rates and
for work of two kinds in turn, too, because both are concave in the rates (Jensen). It is a bound, up to layers that
differ in what binds them: a price of stages uses the machines themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from autopar.cost_model.machines.hardware import Disk, Hardware, Host, Source
from autopar.cost_model.machines.links import Link
from autopar.ir import PIPELINE_AXIS, Mesh

Kinds = tuple[tuple[Hardware, int], ...]
_Numbers = Sequence[float]
_Memory = TypeVar("_Memory", Host, Disk)


class _OfSeveral(NamedTuple):
    """Functions that make one figure of those of several machines.

    Attributes:
        rate: function for bandwidths and FLOP/s.
        duration: function for times, and for sizes below which a machine is slow.
        part: function for fractions that help, such as that of messages that hide.
    """

    rate: Callable[[_Numbers], float]
    duration: Callable[[_Numbers], float]
    part: Callable[[_Numbers], float]


_SLOWEST, _TOGETHER = _OfSeveral(min, max, min), _OfSeveral(fmean, min, max)


def mixed(kinds: Kinds, name: str = "", between: Link | None = None) -> Hardware:
    """The hardware of a cluster of several kinds: what the slowest of its ranks reaches.

    Args:
        kinds: pairs of a machine and its number of nodes, in the order of their ranks.
        name: name of the cluster; by default those of its kinds, such as `h100x8x2+a100x8x2`.
        between: link between two kinds; None for the slower one of their links between nodes.
    """
    found = slowest([hardware for hardware, _ in kinds])
    across = found.across_nodes if between is None else _link(_SLOWEST, [found.across_nodes, between])
    name = name or "+".join(f"{each.name}x{each.devices_per_node}x{nodes}" for each, nodes in kinds)
    return dataclasses.replace(found, name=name, across_nodes=across, kinds=kinds, between=between)


def each_kind(hardware: Hardware, change: Callable[[Hardware], Hardware]) -> Hardware:
    """The hardware with a change of figures, which every kind of several undergoes."""
    if not hardware.kinds:
        return change(hardware)
    kinds = tuple((change(each), nodes) for each, nodes in hardware.kinds)
    between = hardware.between
    if between is not None:
        between = change(dataclasses.replace(hardware.kinds[0][0], across_nodes=between)).across_nodes
    found = mixed(kinds, hardware.name, between)
    return dataclasses.replace(found, devices_per_node=hardware.devices_per_node)


def without_kinds(hardware: Hardware, left_out: Sequence[int]) -> Hardware | None:
    """The hardware without the kinds at these places of `kinds`; None if none is left."""
    kept = tuple(each for place, each in enumerate(hardware.kinds) if place not in left_out)
    if len(kept) > 1:
        return mixed(kept, between=hardware.between)
    return kept[0][0] if kept else None


def ranks_of_kinds(hardware: Hardware) -> tuple[range, ...]:
    """The ranks of every kind."""
    found, first = list[range](), 0
    for each, nodes in hardware.kinds:
        last = first + each.devices_per_node * nodes
        found.append(range(first, last))
        first = last
    return tuple(found)


def stage_machines(hardware: Hardware, world: Mesh) -> tuple[Hardware, ...]:
    """The machine of every pipeline rank: that of the kind of its ranks, or the slowest of their kinds.

    Args:
        hardware: the machine of all ranks.
        world: the mesh of all ranks. Where it has others than those of the kinds, nobody knows their kinds, and all
            are taken as the slowest.
    """
    stages = dict(world.axes).get(PIPELINE_AXIS, 1)
    ranks = ranks_of_kinds(hardware)
    if stages == 1 or not ranks or world.ranks != ranks[-1].stop:
        return (hardware,) * stages
    return _machines_of_kinds(hardware, world)


@functools.lru_cache(maxsize=256)
def _machines_of_kinds(hardware: Hardware, world: Mesh) -> tuple[Hardware, ...]:
    """See `stage_machines`; of several kinds."""
    again = each_kind(hardware, lambda each: each)
    assert again == hardware, "a change of the figures of several kinds is one of each kind: use each_kind"
    axis, found = world.index(PIPELINE_AXIS), [set[int]() for _ in range(dict(world.axes)[PIPELINE_AXIS])]
    for kind, own in enumerate(ranks_of_kinds(hardware)):
        for rank in own:
            found[world.coordinates(rank)[axis]].add(kind)
    return tuple(_of_kinds(hardware, kinds) for kinds in found)


def _of_kinds(hardware: Hardware, places: set[int]) -> Hardware:
    """The machine of ranks of these kinds."""
    if len(places) == len(hardware.kinds):
        return hardware
    found = without_kinds(hardware, [place for place in range(len(hardware.kinds)) if place not in places])
    assert found is not None, "every rank has a kind"
    # Nodes of different sizes begin at multiples of their common divisor.
    return dataclasses.replace(found, devices_per_node=hardware.devices_per_node, kinds=(), between=None)


def slowest(machines: Sequence[Hardware]) -> Hardware:
    """What ranks with equal shares reach that wait for each other."""
    return _combined(_SLOWEST, machines)


def together(machines: Sequence[Hardware]) -> Hardware:
    """The machine of which as many as these, with equal shares, are at least as fast as these with the best shares."""
    return _combined(_TOGETHER, machines)


def _combined(way: _OfSeveral, machines: Sequence[Hardware]) -> Hardware:
    if all(each is machines[0] for each in machines) or len({*machines}) == 1:
        return machines[0]
    first = machines[0]
    figures: dict[str, Any] = _products(way, machines)
    for figure in ("launch_seconds", "host_seconds", "update_seconds", "step_seconds", "matmul_half_size"):
        figures[figure] = way.duration([getattr(each, figure) for each in machines])
    for figure in ("wired_ranks", "reduce_gain_ranks"):
        figures[figure] = int(way.duration([getattr(each, figure) for each in machines]))
    moved = [each.memory_bytes_per_second for each in machines]
    reached = [each.memory_bytes_per_second * each.memory_efficiency for each in machines]
    return dataclasses.replace(
        first,
        name="+".join(dict.fromkeys(each.name for each in machines)),
        memory_bytes_per_second=way.rate(moved),
        memory_efficiency=way.rate(reached) / way.rate(moved),
        memory_bytes=min(each.memory_bytes for each in machines),
        reserved_bytes=max(each.reserved_bytes for each in machines),
        devices_per_node=math.gcd(*(each.devices_per_node for each in machines)),
        hides=way.part([each.hides for each in machines]),
        inside_node=_link(way, [each.inside_node for each in machines]),
        across_nodes=_link(way, [each.across_nodes for each in machines]),
        host=_memory(way, [each.host for each in machines]),
        nvme=_memory(way, [each.nvme for each in machines]),
        sources=tuple(_sources(machines)),
        kinds=(),
        between=None,
        **figures,
    )


def _products(way: _OfSeveral, machines: Sequence[Hardware]) -> dict[str, Any]:
    """The figures of products: peaks, and the fractions of them that are reached."""
    peaks = [each.flops_per_second(2) for each in machines]
    efficiency = way.rate([each.flops_per_second(2) * each.matmul_efficiency for each in machines]) / way.rate(peaks)
    sizes = sorted({size for each in machines for size, _ in each.peak_flops})

    def rate(flops: Callable[[Hardware], float]) -> float:
        return way.rate([flops(each) * each.matmul_efficiency for each in machines]) / efficiency

    found = {size: rate(lambda each, size=size: each.flops_per_second(size)) for size in sizes}  # type: ignore[misc]
    names = [name for name, _ in machines[0].dtype_flops if all(name in dict(each.dtype_flops) for each in machines)]
    attention = [
        way.rate([each.flops_per_second(size) * each.attention_efficiency for each in machines]) / found[size]
        for size in sizes
    ]
    return {
        "peak_flops": tuple(found.items()),
        "dtype_flops": tuple((n, rate(lambda each, n=n: dict(each.dtype_flops)[n])) for n in names),  # type: ignore[misc]
        "matmul_efficiency": efficiency,
        "attention_efficiency": min(1.0, way.part(attention)),
    }


def _link(way: _OfSeveral, links: Sequence[Link]) -> Link:
    """The link of ranks with these links."""
    bandwidth = way.rate([float(each.bandwidth_bytes_per_second) for each in links])

    def gain(name: str) -> float:
        reached = way.rate([float(each.bandwidth_bytes_per_second * getattr(each, name)) for each in links])
        return reached / bandwidth

    def duration(name: str) -> float:
        return way.duration([float(getattr(each, name)) for each in links])

    return Link(
        bandwidth,
        duration("latency_seconds"),
        duration("start_seconds"),
        duration("fill_seconds"),
        min(2.0, max(1.0, gain("reduce_gain"))),
        duration("reduce_rounds"),
        gain("exchange_gain"),
        gain("send_gain"),
    )


def _memory(way: _OfSeveral, memories: Sequence[_Memory | None]) -> _Memory | None:
    """The memory of a tier, where every machine has one."""
    known = [each for each in memories if each is not None]
    if len(known) < len(memories):
        return None
    figures: dict[str, Any] = {}
    for field in dataclasses.fields(known[0]):
        values = [getattr(each, field.name) for each in known]
        is_time = field.name.endswith("_seconds")
        figures[field.name] = (
            min(values) if field.name == "memory_bytes" else (way.duration if is_time else way.rate)(values)
        )
    return dataclasses.replace(known[0], **figures)


def _sources(machines: Sequence[Hardware]) -> Iterator[tuple[str, Source]]:
    """The source of every figure: that of a machine for which it is a guess, or of the first machine that has one."""
    found: dict[str, Source] = {}
    for each in machines:
        for figure, source in each.sources:
            if figure not in found or (source.kind == "guess" and found[figure].kind != "guess"):
                found[figure] = source
    yield from found.items()
