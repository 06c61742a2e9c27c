"""The size of buckets, in which parameters are gathered and gradients reduced, as a choice of a searched plan.

The search of layouts prices buckets of the usual size (`autopar.cost_model.buckets`). The plan that it finds for a
setting is priced with few other sizes, and takes the one with the shortest step, if that gains anything worth a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from autopar.cost_model.buckets import SMALLEST_BUCKET_BYTES, sent_bytes, usual_bucket_bytes, whole_bytes
from autopar.ir import Graph, Plan
from autopar.ir.note import Note
from autopar.pipeline.composed import Composed, composed
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_bytes, format_seconds

NUMBERS = (1, 2, 3, 4, 8, 16, 32)  # of buckets that a backward may fill
# Least relative gain for which a plan names its buckets.
_WORTH = 1e-2


def with_buckets(found: Planned, request: Request) -> Planned:
    """The plan with the buckets that make its step shortest, or that the request names, and a note on a choice.

    Sizes that do not fit into memory are not taken, but for one that is asked for.
    """
    asked, graph, plan = request.bucket_bytes, found.graph, found.plan
    if asked is None and not sent_bytes(graph, plan):
        return found
    sized = _sizer(found, request)
    if asked is not None:
        return sized(asked)
    usual_size = usual_bytes(graph, plan)
    ordered = sorted({usual_size, *sizes_of(graph, plan)})
    at = ordered.index(usual_size)
    best = _fastest(map(sized, ordered[at + 1 :]), found, request)
    if best is found:
        best = _fastest(map(sized, ordered[:at][::-1]), found, request)
    if best.price.step_seconds >= (1 - _WORTH) * found.price.step_seconds:
        return found
    return _noted(best, usual_size, found.price.step_seconds)


def _sizer(found: Planned, request: Request) -> Callable[[int | None], Planned]:
    """A function from bytes of a bucket to a plan with them; None stands for the usual size."""
    graph, plan, seconds = found.graph, found.plan, found.price.step_seconds
    # A search of stages adds the time to launch kernels to the price of its plan.
    added_seconds = 0.0 if plan.pipeline is None else seconds - composed(graph, plan, **request.figures).step_seconds

    def sized(size: int | None) -> Planned:
        each = replace(plan, bucket_bytes=size)
        price = composed(graph, each, **request.figures)
        return found.priced(each, Composed(price.step_seconds + added_seconds, price.peak_bytes))

    return sized


def _fastest(plans: Iterable[Planned], best: Planned, request: Request) -> Planned:
    """The fastest plan of sizes, ever further from the usual one, up to the first that gains nothing or is too big.

    A step first falls and then rises with the number of buckets: latencies grow with it, what stays exposed falls.
    Of a plan that need not fit, and does not, the buckets make it no larger.
    """
    most_bytes = max(request.bound_bytes, best.price.peak_bytes)
    for each in plans:
        if each.price.peak_bytes > most_bytes or each.price.step_seconds >= best.price.step_seconds:
            break
        best = each
    return best


def usual_seconds(found: Planned, request: Request) -> float:
    """Seconds of a step of a plan in the usual buckets, by which a search of layouts compares."""
    if found.plan.bucket_bytes is None:
        return found.price.step_seconds
    return _sizer(found, request)(None).price.step_seconds


def usual_bytes(graph: Graph, plan: Plan) -> int:
    """Bytes of a bucket that names none: see `usual_bucket_bytes`."""
    return int(usual_bucket_bytes(whole_bytes(graph), plan.mesh.sizes))


def sizes_of(graph: Graph, plan: Plan) -> Iterator[int]:
    """The sizes to choose among, in bytes: those by which a backward fills one bucket, two and so on."""
    total = int(sent_bytes(graph, plan))
    for number in NUMBERS:
        size = -(-total // number)
        if number == 1 or size >= SMALLEST_BUCKET_BYTES:
            yield size


def _noted(best: Planned, usual: int, before_seconds: float) -> Planned:
    assert best.plan.bucket_bytes is not None, "it was priced with a size"
    note = Note(
        f"parameters and gradients travel in buckets of {format_bytes(best.plan.bucket_bytes)}: a step takes "
        f"{format_seconds(best.price.step_seconds)}, and {format_seconds(before_seconds)} in buckets of "
        f"{format_bytes(usual)} (bucket_bytes={usual} forces that)",
        "buckets",
    )
    return best.noted(note)
