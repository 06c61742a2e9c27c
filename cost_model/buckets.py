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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce

from autopar.cost_model.arith import Quantity, larger, power, smaller
from autopar.cost_model.collectives import BUCKET_BYTES
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.hardware import Link
from autopar.cost_model.sizes import Sizes
from autopar.ir import PIPELINE_AXIS, Graph, Layout, Mesh, ParameterPlan, Plan, Tensor

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


def message_bytes(tensor: Tensor, how: ParameterPlan, targets: Iterable[Layout], sizes: Sizes) -> Quantity:
    """Bytes of a parameter's gradient before it shrinks, or of the parameter where it has none; 0 if nothing travels.

    Args:
        tensor: the parameter.
        how: its storage.
        targets: layouts in which ops use it.
        sizes: sizes of local tensors.
    """
    layouts = {how.resident, *targets}
    return 0.0 if how.storage == how.resident and len(layouts) == 1 else largest_bytes(tensor, layouts, sizes)


def largest_bytes(tensor: Tensor, layouts: Iterable[Layout], sizes: Sizes) -> Quantity:
    """Bytes of a parameter's gradient, or of the parameter where it has none, in the layout in which it is largest."""
    scale = tensor.gradient_scale if tensor.needs_grad else 1
    return scale * reduce(larger, (sizes.bytes(tensor, layout) for layout in layouts))


def messages(graph: Graph, plan: Plan, flow: Flow, world: Mesh) -> list[tuple[float, float]]:
    """Bytes of the messages of parameters that a rank of a mean stage takes part in, each with its number.

    The mesh of all ranks, `world`, has the stages, also of a plan that is priced before it is cut into them.
    """
    sizes, targets = Sizes(plan.mesh), flow.targets
    stages = dict(world.axes).get(PIPELINE_AXIS, 1)
    return [
        (
            float(message_bytes(graph.tensors[at], plan.parameters[name], targets.get(at, {}), sizes)),
            graph.layer_count.get(name, 1) / stages,
        )
        for name, at in graph.parameters.items()
    ]


def sent_bytes(graph: Graph, plan: Plan) -> float:
    """Bytes of all messages of parameters that a rank of a mean stage takes part in, each of them once."""
    return sum(size * count for size, count in messages(graph, plan, Flow(graph, plan), plan.world_mesh))


def buckets_hide(graph: Graph, plan: Plan, flow: Flow, world: Mesh | None = None) -> float:
    """The largest part of the messages of a plan's parameters that its buckets, named or usual, let compute hide."""
    size = plan.bucket_bytes or usual_bucket_bytes(whole_bytes(graph), plan.mesh.sizes)
    return float(hidden_by(messages(graph, plan, flow, world or plan.world_mesh), size))


def hidden_by(sent: Iterable[tuple[float, float]], bucket_bytes: Quantity) -> Quantity:
    """The largest part of messages that buckets of a size let hide; one that fills a bucket travels alone.

    Args:
        sent: bytes of messages, each with its number.
        bucket_bytes: size of a bucket.
    """
    numbers: defaultdict[float, float] = defaultdict(float)
    for size, count in sent:
        numbers[size] += count
    return hidden_part(sum(count * smaller(1.0, size / bucket_bytes) for size, count in numbers.items() if size))


def hidden_part(buckets: Quantity) -> Quantity:
    """The largest part of the messages of a number of buckets that a backward can hide."""
    return 1 - 1 / larger(1.0, buckets)
