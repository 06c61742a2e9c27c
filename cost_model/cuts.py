"""How many layers each stage of a pipeline has."""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.cost_model.arith import Quantity


class Cuts(NamedTuple):
    """Number of layers of the first stage, of the largest stage between the ends, and of the last stage.

    With a single stage only `first` counts.
    """

    first: Quantity
    middle: Quantity
    last: Quantity


def equal_cuts(layers: Quantity, stages: Quantity) -> Cuts:
    """The same number of layers for every stage; it may be a fraction."""
    share = layers / stages
    return Cuts(share, share, share)


def cuts_by_weight(layers: int, stages: int, *, before: float = 0.0, after: float = 0.0) -> Cuts:
    """Cuts a model into stages of about equal weight, between whole layers.

    With s the total weight divided by `stages`, stage k ends after the first layer at which the weight so far,
    `before` included, is at least k * s.

    Args:
        layers: number of repeated layers, each of weight 1.
        stages: number of pipeline stages.
        before, after: weights of what comes before the first layer and after the last, such as an embedding
            and a head, in layers.

    >>> cuts_by_weight(7, 3, after=2.0)
    Cuts(first=3, middle=3, last=1)
    """
    counts = [0] * stages
    share = (before + layers + after) / stages
    stage, reached = 0, before
    for _ in range(layers):
        counts[stage] += 1
        reached += 1
        if stage < stages - 1 and reached >= share * (stage + 1) - 1e-9:
            stage += 1
    return Cuts(counts[0], max(counts[1:-1], default=0), counts[-1])


def cuts_of_equal_ends(layers: int, stages: int) -> Cuts:
    """The division of Megatron-LM users where the stages do not divide the layers.

    The embedding and the head count as one layer each, so that the first and last stages have one layer less.
    """
    if stages == 1 or layers % stages == 0:
        return equal_cuts(layers, stages)
    if stages == 2:
        return Cuts(math.ceil(layers / 2), 0, layers // 2)
    share = math.ceil((layers + 2) / stages)
    return Cuts(share - 1, share, share - 1)
