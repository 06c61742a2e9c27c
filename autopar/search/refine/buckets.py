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
# Least relative gain for which a plan names its buckets. They are chosen last: what they gain, the search did not know.
_WORTH = 1e-2


def with_buckets(found: Planned, request: Request) -> Planned:
    """The plan with the buckets that make its step shortest, or that the request names, and a note on a choice.

    Sizes that do not fit into memory are not taken, but for one that is asked for.
    """
    price = composed(found.graph, found.plan, **request.figures)
    # A search of stages adds a time to launch kernels, so that its own price is not the one to compare with.
    added_seconds = found.price.step_seconds - price.step_seconds

    def priced(size: int) -> Planned:
        notes = tuple(each for each in found.plan.notes if kind_of(each) != "price")  # those of the usual buckets
        plan = replace(found.plan, bucket_bytes=size, notes=notes)
        seconds, peak_bytes = composed(found.graph, plan, **request.figures)
        return found._replace(plan=plan, price=Composed(seconds + added_seconds, peak_bytes))

    if request.bucket_bytes is not None:
        return priced(request.bucket_bytes)
    if not sent_bytes(found.graph, found.plan):
        return found
    usual = usual_bytes(found.graph, found.plan)
    sizes = {size: priced(size) for size in dict.fromkeys((usual, *sizes_of(found.graph, found.plan)))}
    bound = request.search_bound_bytes
    fitting = [each for each in sizes.values() if bound is None or each.price.peak_bytes <= bound]
    best = min(fitting, key=lambda each: each.price.step_seconds, default=sizes[usual])
    before_seconds = sizes[usual].price.step_seconds
    if best.price.step_seconds >= (1 - _WORTH) * before_seconds:
        return found
    return _noted(best, usual, before_seconds)


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
