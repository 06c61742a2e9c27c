"""The causes of a step's time: compute, memory bandwidth, communication along an axis, the bubble, the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.cost_model.arith import Quantity
from autopar.cost_model.compute import memory_seconds
from autopar.cost_model.items import COMPUTE
from autopar.cost_model.steps.run import Term
from autopar.cost_model.steps.step import Step

# Term of a step's time -> its cause, for terms with a single cause.
_CAUSES = {
    "pipeline bubble": "bubble",
    "stage boundaries": "along pp",
    "waiting for the host": "host",
    "optimizer": "memory bandwidth",
    "fixed": "fixed",
}


def where_time_goes(step: Step) -> dict[str, Quantity]:
    """Seconds of a step by cause, such as compute, memory bandwidth, "along tp", bubble, host or fixed.

    Communication that overlaps with compute is subtracted: its cause "hidden behind compute" has negative seconds.
    """
    found: dict[str, Quantity] = {}
    slow = _memory_share(step)
    for term in step.time():
        for name, value in _causes(term, slow):
            found[name] = found.get(name, 0.0) + value
    return found


def _causes(term: Term, slow: Quantity) -> Iterator[tuple[str, Quantity]]:
    """Yields causes and seconds of a term of a step's time; `slow` is the part of compute that waits for memory."""
    if term.name in ("compute", "embedding, head and loss"):
        yield "compute", term.value * (1 - slow)
        yield "memory bandwidth", term.value * slow
    elif term.name.startswith("communication "):
        yield term.name.removeprefix("communication "), term.value
    elif term.parts and all(" along " in part.name for part in term.parts):
        for part in term.parts:
            yield f"along {part.name.partition(' along ')[2]}", part.value
    elif "hidden" in term.name:
        yield "hidden behind compute", term.value
    else:
        yield _CAUSES.get(term.name, term.name), term.value


def _memory_share(step: Step) -> Quantity:
    """Fraction of the compute time of forward and backward that is limited by memory bandwidth, not by FLOP/s."""
    bound: Quantity = 0.0
    whole: Quantity = 0.0
    for item in step.items:
        if item.resource == COMPUTE and item.phase in ("forward", "backward"):
            seconds = item.count * item.seconds
            moving = memory_seconds(item.traffic_bytes, step.hardware)
            bound = bound + seconds * (moving >= 0.999 * item.seconds)
            whole = whole + seconds
    return bound / np.maximum(whole, 1e-300)
