"""The data of a step, with the shares of its stages in work and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.cuts import Cuts, equal_cuts
from autopar.cost_model.items import (
    MemoryItem,
    Region,
    WorkItem,
)
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.software import Software
from autopar.cost_model.steps.run import Run, Stage, Term
from autopar.ir import Tier


@dataclass
class StepData:
    """One step of a plan: its work and its memory.

    Every method computes with numbers or with symbols, whichever the attributes have.

    Attributes:
        items: work of a step, such as matrix products and collectives, each with its duration.
        holdings: memory of a rank, such as parameters and saved activations.
        run: number of micro-batches, stages and so on.
        hardware: figures of the machine.
        software: figures of the runtime, such as what it overlaps with compute.
        layers: number of repeated layers in the whole model.
        boundary_bytes: size of the activations that one layer passes to the next, of one micro-batch on one rank.
        boundary_link: link between two pipeline stages.
        boundary_crosses: 1 where messages between stages leave the node, 0 where none does.
        boundary_parts: number of ranks that each send a part of these activations to the next stage, whose ranks
            gather them (Narayanan et al. 2021, section 4.1). Saved activations stay whole.
    """

    items: Sequence[WorkItem]
    holdings: Sequence[MemoryItem]
    run: Run
    hardware: Hardware
    software: Software
    layers: Quantity = 1
    boundary_bytes: Quantity = 0
    boundary_link: Link | None = None
    boundary_crosses: Quantity = 0
    boundary_parts: Quantity = 1
    _sums: dict[object, Quantity] = field(default_factory=dict)

    @property
    def cuts(self) -> Cuts:
        """Number of layers of the first, middle and last stages."""
        return self.run.cuts or equal_cuts(self.layers, self.run.stages)

    @property
    def _alone(self) -> Quantity:
        """1 for a single stage, which has the regions before and after the layers; else 0."""
        return larger(0, 2 - self.run.stages)

    def _share(self, region: Region, stage: Stage) -> Quantity:
        """Fraction of a region that a stage has, 0 to 1."""
        if region == "layers":
            return getattr(self.cuts, stage) / self.layers
        if stage == "middle":
            return 0
        return 1 if (region, stage) in (("before", "first"), ("after", "last")) else self._alone

    def held(self, kind: str, stage: Stage, tier: Tier = "device") -> Quantity:
        """Bytes of one kind of holding on a stage, for one micro-batch."""
        return self._once(
            ("held", kind, stage, tier),
            lambda: sum(
                (self._share(h.region, stage) * h.bytes for h in self.holdings if h.kind == kind and h.tier == tier),
                start=0,
            ),
        )

    def _held_parts(self, kind: str, stage: Stage, tier: Tier = "device") -> tuple[Term, ...]:
        sums: dict[str, Quantity] = {}
        for h in self.holdings:
            if h.kind == kind and h.tier == tier:
                sums[h.name] = sums.get(h.name, 0) + self._share(h.region, stage) * h.bytes
        return tuple(Term(name, value) for name, value in sums.items())

    def _once(self, key: object, make: Callable[[], Quantity]) -> Quantity:
        if key not in self._sums:
            self._sums[key] = make()
        return self._sums[key]
