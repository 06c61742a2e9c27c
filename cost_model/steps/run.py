"""Settings of a step other than the layouts of its plan, and named parts of sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.cuts import Cuts
from autopar.cost_model.items import FULL, Region, TrainingState
from autopar.ir.recompute import Recompute

Stage = Literal["first", "middle", "last"]

STAGES: tuple[Stage, ...] = ("first", "middle", "last")

REGIONS: tuple[Region, ...] = ("before", "layers", "after")


@dataclass(frozen=True)
class Run:
    """Settings of a step other than the layouts of its plan: micro-batches, pipeline stages, recomputation.

    Attributes:
        micro_batches: number of micro-batches in a step.
        stages: number of pipeline stages; 1 without a pipeline.
        cuts: number of layers of each stage; None for equal shares.
        chunks: number of interleaved chunks of layers per stage.
        recompute: number of layers of each chunk that save only their input and are recomputed in backward; or "none"
            or "full".
        training_state: gradients and optimizer states that training keeps for each parameter.
        overlap_batches: number of micro-batches that run at a time.
    """

    micro_batches: Quantity = 1
    stages: Quantity = 1
    chunks: Quantity = 1
    cuts: Cuts | None = None
    recompute: Recompute | Quantity = "none"
    training_state: TrainingState = FULL
    overlap_batches: Quantity = 1

    def again(self, layers: Quantity) -> Quantity:
        """Number of a stage's `layers` that are recomputed in backward."""
        if isinstance(self.recompute, str):
            return layers if self.recompute == "full" else 0
        return smaller(layers, self.recompute * self.chunks)


ONE_BATCH = Run()


@dataclass(frozen=True)
class Term:
    """A named part of a sum, which may itself have parts."""

    name: str
    value: Quantity
    parts: tuple[Term, ...] = ()
    note: str = ""


def total(terms: Iterable[Term]) -> Quantity:
    """The sum of terms."""
    return sum((term.value for term in terms), start=0)
