"""The size of buckets, in which parameters are gathered and gradients reduced, as a choice of a searched plan.

The search prices buckets of the usual size (`autopar.cost_model.buckets`). The plan that it finds is priced with few
other sizes, and takes the one with the shortest step, if that gains anything worth a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.cost_model.buckets import SMALLEST_BUCKET_BYTES, sent_bytes, usual_bucket_bytes, whole_bytes
from autopar.ir import Graph, Plan
from autopar.ir.note import Note, kind_of
from autopar.pipeline.composed import Composed, composed
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_bytes, format_seconds

NUMBERS = (1, 2, 3, 4, 8, 16, 32)  # of buckets that a backward may fill
_WORTH = 5e-3  # least relative gain for which a plan names its buckets: prices of plans are no nearer to the truth


def with_buckets(found: Planned, request: Request) -> Planned:
    """The plan with the buckets that make its step shortest, or that the request names, and a note on them.

    Raises nothing: sizes that do not fit into memory are not taken, but for the one that is asked for.
    """
    if request.bucket_bytes is not None:
        return _priced(found, request.bucket_bytes, request)
    usual = usual_bytes(found.graph, found.plan)
    if not sent_bytes(found.graph, found.plan):
        return found
    sizes = {usual: _priced(found, usual, request)}
    for size in sizes_of(found.graph, found.plan):
        sizes.setdefault(size, _priced(found, size, request))
    bound = request.search_bound_bytes
    fitting = [each for each in sizes.values() if bound is None or each.price.peak_bytes <= bound]
    best = min(fitting, key=lambda each: each.price.step_seconds, default=sizes[usual])
    before = sizes[usual].price.step_seconds
    if best.price.step_seconds >= (1 - _WORTH) * before:
        return found
    return _noted(best, usual, before)


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


def _priced(found: Planned, size: int, request: Request) -> Planned:
    """The plan with buckets of this size, and its price."""
    plan = replace(found.plan, bucket_bytes=size)
    before = composed(found.graph, found.plan, **request.figures)
    price = composed(found.graph, plan, **request.figures)
    # A search of stages adds a time to launch kernels, so that its own price is not the one to compare with.
    seconds = found.price.step_seconds + price.step_seconds - before.step_seconds
    return found._replace(plan=plan, price=Composed(seconds, price.peak_bytes))


def _noted(best: Planned, usual: int, before_seconds: float) -> Planned:
    assert best.plan.bucket_bytes is not None, "it was priced with a size"
    note = Note(
        f"parameters and gradients travel in buckets of {format_bytes(best.plan.bucket_bytes)}: a step takes "
        f"{format_seconds(best.price.step_seconds)}, and {format_seconds(before_seconds)} in buckets of "
        f"{format_bytes(usual)} (bucket_bytes={usual} forces that)",
        "buckets",
    )
    notes = (each for each in best.plan.notes if kind_of(each) != "price")  # those of the usual buckets
    return best._replace(plan=replace(best.plan, notes=(*notes, note)))
