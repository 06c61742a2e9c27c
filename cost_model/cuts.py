"""How many layers each stage of a pipeline has."""

from __future__ import annotations

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
