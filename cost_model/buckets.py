"""Buckets: how many bytes of parameters or gradients one collective carries, and how much of their messages can hide.

Larger buckets pay the latency of fewer collectives. But a bucket leaves when it is full, and the last one of a backward
leaves when backward ends. Let N equal buckets take s seconds in all beside a backward of c seconds. The first leaves
after c / N, so that the last one arrives after

    max(c + s / N, c / N + s)

and (1 - 1 / N) min(s, c) of the messages hide. A machine hides the part `hides` of min(s, c) at most, whatever the
buckets (its links and memory are shared with what computes), so that the part is min(hides, 1 - 1 / N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

from autopar.cost_model.arith import Quantity, larger, power, smaller
from autopar.cost_model.collectives import BUCKET_BYTES
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.software import Software
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Mesh, Plan

FEWEST_BUCKETS = 4
SMALLEST_BUCKET_BYTES = 2**20  # as the first bucket of torch's DistributedDataParallel

# 1M parameters in bfloat16: Megatron-Core fills buckets with 1M parameters for each data-parallel rank
# (`distributed_data_parallel.py`), so that the messages of a ring keep their size on any number of ranks.
BUCKET_BYTES_PER_RANK = 2_000_000


def usual_bucket_bytes(total_bytes: int, axes: Iterable[Quantity]) -> Quantity:
    """Bytes of a bucket where a plan names none: more on more ranks, as a ring cuts a message into as many parts.

    A small total is cut into several buckets, but not into too small ones.

    Args:
        total_bytes: bytes of all parameters, whole.
        axes: sizes of the axes of the mesh.

    >>> [usual_bucket_bytes(10**12, (ranks, 8)) for ranks in (8, 64, 512)], usual_bucket_bytes(40_000_000, (8,))
    ([26214400, 128000000, 1024000000], 10000000)
    """
    by_ranks = reduce(larger, (BUCKET_BYTES_PER_RANK * size for size in axes), BUCKET_BYTES)
    return smaller(by_ranks, max(total_bytes // FEWEST_BUCKETS, SMALLEST_BUCKET_BYTES))


def likely_bucket_bytes(total_bytes: int, axes: Sequence[tuple[Quantity, Link]]) -> Quantity:
    """About the size that a search chooses for a plan, no less than the usual one.

    N buckets of T bytes in all take N times the latency of a ring, and leave 1 / N of T / bandwidth exposed at the end
    of a backward. The sum of both is least for buckets of the square root of T * latency * bandwidth.

    Args:
        total_bytes: bytes of all parameters, whole.
        axes: sizes of the axes of the mesh, with their links.
    """
    latencies = (size * link.latency_seconds * link.bandwidth_bytes_per_second for size, link in axes)
    sizes = (power(total_bytes * each, 0.5) for each in latencies)
    usual = usual_bucket_bytes(total_bytes, (size for size, _ in axes))
    return smaller(total_bytes, reduce(larger, sizes, usual))


def whole_bytes(graph: Graph) -> int:
    """Bytes of all parameters of the model, whole; at least 1."""
    held = (
        graph.layer_count.get(name, 1) * math.prod(graph.tensors[at].shape) * graph.tensors[at].itemsize_bytes
        for name, at in graph.parameters.items()
    )
    return max(1, sum(held))


def messages(graph: Graph, plan: Plan) -> dict[str, tuple[float, float]]:
    """Gradients that a rank of a mean stage reduces after the backward of a step, by the parameter.

    They are those of the parameters whose values or gradients travel at all: for each its bytes before it shrinks, and
    the number of parameters of such layers on the stage.
    """
    sizes, targets = Sizes(plan.mesh), Flow(graph, plan).targets
    stages = plan.pipeline.ranks if plan.pipeline else 1
    found = {}
    for name, at in graph.parameters.items():
        tensor, how = graph.tensors[at], plan.parameters[name]
        layouts = {how.resident, *targets.get(at, {})}
        if tensor.needs_grad and (how.storage != how.resident or len(layouts) > 1):
            whole = tensor.gradient_scale * max(float(sizes.bytes(tensor, layout)) for layout in layouts)
            found[name] = whole, graph.layer_count.get(name, 1) / stages
    return found


def sent_bytes(graph: Graph, plan: Plan) -> float:
    """Bytes of the gradients that a rank of a mean stage reduces after the backward of a step."""
    return sum(size * count for size, count in messages(graph, plan).values())


def usual_machine(graph: Graph, mesh: Mesh, hardware: Hardware, software: Software, stages: int = 1) -> Hardware:
    """The machine under a runtime, which hides no more of a stage's messages than buckets of the usual size let hide.

    Args:
        graph: the model.
        mesh: the mesh of a stage.
        hardware, software: the machine and the runtime.
        stages: number of pipeline ranks.
    """
    total_bytes = whole_bytes(graph)
    return _hiding(software.on(hardware), total_bytes / stages / usual_bucket_bytes(total_bytes, mesh.sizes))


def machine_of(graph: Graph, plan: Plan, hardware: Hardware, software: Software) -> Hardware:
    """The machine under a runtime, which hides no more of a plan's messages than its buckets let hide."""
    stages = plan.pipeline.ranks if plan.pipeline else 1
    if plan.bucket_bytes is None or not hardware.hides:
        return usual_machine(graph, plan.mesh, hardware, software, stages)
    # A gradient that fills a bucket travels alone.
    filled = (count * min(1.0, size / plan.bucket_bytes) for size, count in messages(graph, plan).values())
    return _hiding(software.on(hardware), sum(filled))


def _hiding(machine: Hardware, buckets: float) -> Hardware:
    return replace(machine, hides=min(machine.hides, hidden_part(buckets)))


def hidden_part(buckets: Quantity) -> Quantity:
    """The largest part of the messages of a number of buckets that a backward can hide."""
    return 1 - 1 / larger(1.0, buckets)
