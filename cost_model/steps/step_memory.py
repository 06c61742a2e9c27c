"""Memory of a step: what every stage holds, saved activations in flight, and the transient peak."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import reduce

import numpy as np

from autopar.cost_model.arith import Quantity, larger, smaller
from autopar.cost_model.items import (
    TOUCHED,
    MemoryItem,
    Region,
)
from autopar.cost_model.steps.run import STAGES, Stage, Term, total
from autopar.cost_model.steps.step_data import StepData
from autopar.ir import Tier


class StepMemory(StepData):
    """Peak memory of a step, by stages and by parts."""

    def peak_bytes(self) -> Quantity:
        """Peak memory of the fullest rank."""
        first, middle, last = (total(self.memory(stage)) for stage in STAGES)
        return larger(first, larger(middle, last))

    def memory(self, stage: Stage = "first") -> tuple[Term, ...]:
        """Peak memory of a device on a pipeline stage, by parts; "middle" is the fullest stage between the ends."""
        kinds = ("parameters", "gradients", "optimizer", "buffers")
        saved = self._saved(stage)
        return (
            *(Term(kind, self.held(kind, stage), self._held_parts(kind, stage)) for kind in kinds),
            saved,
            Term(
                "transient peak",
                self._transient(stage),
                note="the loss, or one layer gathered or run again",
            ),
            Term("reserved", self.hardware.reserved_bytes, note="context and library buffers"),
        )

    def stored(self, tier: Tier, stage: Stage = "first") -> tuple[Term, ...]:
        """Memory that a rank keeps on the host or in files, by parts."""
        return tuple(
            Term(kind, self.held(kind, stage, tier), self._held_parts(kind, stage, tier))
            for kind in (*TOUCHED, "saved activations")
        )

    def _transient(self, stage: Stage) -> Quantity:
        """Bytes of the largest memory that exists only while one block (a layer) runs.

        While a loss runs, its operands and their gradients exist, which autograd does not save. While a block with
        sharded parameters runs, the gathered parameters and their gradients exist. While a block is recomputed, all
        activations that it saves exist; the blocks after the recomputed ones have freed theirs by then.
        """
        moments = self._moments(stage)
        found = list(moments.values())
        if recomputed := self._by_block("recomputed", stage):
            returned = sum((h.bytes for h in self.holdings if h.kind == "returned"), start=0)
            found += [moments.get(block, 0) + held - returned for block, held in recomputed.items()]
        elif self._recomputes:
            found.append(self._last_layer_again(stage, moments))
        return reduce(larger, _distinct(found), 0)

    @property
    def _recomputes(self) -> bool:
        return not (isinstance(self.run.recompute, str) and self.run.recompute == "none")

    def _last_layer_again(self, stage: Stage, moments: Mapping[Hashable, Quantity]) -> Quantity:
        """Bytes of the last layer while it is recomputed, beyond what the loss and the head have freed by then.

        It takes no more than layers that run once, where there are such: they have freed theirs.
        """
        layers = self._saved_of("layers")
        count = self._share("layers", stage) * self.layers
        is_last = larger(0, 1 - (count - self.run.again(count)))
        blocks = {h.block for h in self.holdings if h.region == "layers"}
        moment = reduce(larger, (moments[block] for block in blocks if block in moments), 0)
        freed = self._share("after", stage) * self._saved_of("after")
        return moment + is_last * layers / self.layers - freed

    def _saved_of(self, region: Region) -> Quantity:
        """Bytes of a region's activations that stay where nothing is recomputed, of the whole model."""
        found = (h.bytes for h in self.holdings if self._is(h, "saved activations", region))
        return sum(found, start=0)

    def _moments(self, stage: Stage) -> dict[Hashable, Quantity]:
        """Block -> bytes of its loss, or of its gathered parameters with their gradients, whichever is more."""
        working, gathered = (self._by_block(kind, stage) for kind in ("working", "gathered"))
        return {block: larger(working.get(block, 0), 2 * gathered.get(block, 0)) for block in {**working, **gathered}}

    def _by_block(self, kind: str, stage: Stage) -> dict[Hashable, Quantity]:
        """Block -> bytes of a kind of memory that exists only while the block runs; a layer counts in full."""
        found: dict[Hashable, Quantity] = {}
        for h in self.holdings:
            if h.kind == kind:
                share = 1 if h.region == "layers" else self._share(h.region, stage)
                found[h.block] = found.get(h.block, 0) + share * h.bytes
        return found

    def _in_flight(self, stage: Stage) -> Quantity:
        """Number of micro-batches whose activations a stage keeps at once under 1F1B, counted in whole stages.

        Stage r keeps p - r of them. With v chunks it runs 2 (p - 1 - r) + (v - 1) p + 1 of its chunks
        before the first backward (Narayanan et al. 2021, section 2.2), which is p + (p - 1) / v on the
        first stage.
        """
        if self.run.overlap_batches != 1:  # without stages
            return self.run.overlap_batches
        p, v = self.run.stages, self.run.chunks
        behind = {"first": p - 1, "middle": p - 2, "last": 0}[stage]
        return smaller(self.run.micro_batches, ((v - 1) * p + 1 + smaller(2, v) * behind) / v)

    def _saved(self, stage: Stage) -> Term:
        """Saved activations of the micro-batches in flight."""
        flight = self._in_flight(stage)
        if self._recomputes:
            return self._recomputed(stage, flight)
        parts = self._held_parts("saved activations", stage)
        return Term(
            "saved activations",
            flight * self.held("saved activations", stage),
            tuple(Term(part.name, flight * part.value) for part in parts),
            "of all micro-batches in flight",
        )

    def _recomputed(self, stage: Stage, flight: Quantity) -> Term:
        """Bytes of saved activations if layers are recomputed, times the micro-batches in flight.

        They are the inputs of the recomputed layers and the activations of the other layers. The activations of the
        layer that backward recomputes at the moment are part of the transient peak.
        """
        ends = (self._share(region, stage) * self._saved_of(region) for region in ("before", "after"))
        count, one = (
            self._share("layers", stage) * self.layers,
            self._saved_of("layers") / self.layers,
        )
        again = self.run.again(count)
        parts = (
            Term("inputs of layers", flight * self.boundary_bytes * again),
            Term("layers that run once", flight * one * (count - again)),
            Term("embedding, head and loss", flight * sum(ends)),
        )
        return Term("saved activations", total(parts), parts, "layers are run again in backward")

    @staticmethod
    def _is(h: MemoryItem, kind: str, region: Region) -> bool:
        return h.kind == kind and h.region == region


def _distinct(values: Iterable[Quantity]) -> list[Quantity]:
    """The values without repetitions, since equal blocks have equal formulas. Arrays are all kept."""
    kept, seen = [], set()
    for value in values:
        key = id(value) if isinstance(value, np.ndarray) else value
        if key not in seen:
            seen.add(key)
            kept.append(value)
    return kept
