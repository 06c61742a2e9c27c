"""Bytes of all possible stages: memory of the whole step, memory saved for backward, and transient memory.

For every micro-batch in flight, a stage holds the tensors that its ops save for backward, and the tensors that it
received and sent (`torch.distributed.pipelining` keeps these).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np

from autopar.cost_model import keeps
from autopar.cost_model.items import MemoryItem
from autopar.cost_model.memory import KeptSlice
from autopar.ir import Op, Tier
from autopar.pipeline.crossings import Crossings
from autopar.pipeline.parts import repeating_parts
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.producers import Memory
from autopar.pipeline.repetition import Places
from autopar.pipeline.saved_bytes import SavedBytes, SavedMemory
from autopar.pipeline.stretches import has, sums

# Number of times that the bytes of every kind count in what a stage holds during the whole step.
KEPT: Mapping[str, float] = MappingProxyType({"parameters": 1, "gradients": 1, "optimizer": 1, "buffers": 1})


class StageBytes:
    """Bytes of all possible stages of a plan.

    Args:
        blocks: the plan's work and memory, by block.
        crossings: tensors that one block computes and a later one uses.
    """

    def __init__(self, blocks: PricedBlocks, crossings: Crossings) -> None:
        self.blocks, self.crossings = blocks, crossings

    def held(self, weights: Mapping[str, float], tier: Tier = "device", *, stored_alone: bool = False) -> np.ndarray:
        """Bytes of parameters and their gradients and states, counted once in every stage that uses them.

        Where ranks own parameters, these are the bytes of the rank that holds most of a stage.

        Args:
            weights: kind of a holding, such as "gradients" -> number of times that its bytes count.
            tier: tier of the holdings that count.
            stored_alone: whether only holdings count that the optimizer reads or updates.
        """
        found = [self._held(rank, weights, tier, stored_alone) for rank in self.blocks.holdings_of_ranks]
        return np.take_along_axis(np.array(found), self._fullest, axis=0)[0] if found[1:] else found[0]

    @cached_property
    def _fullest(self) -> np.ndarray:
        """Index of the rank that holds most of every possible stage."""
        found = [self._held(rank, KEPT, "device", False) for rank in self.blocks.holdings_of_ranks]
        return np.argmax(found, axis=0)[None]

    def _held(
        self, holdings: Iterable[MemoryItem], weights: Mapping[str, float], tier: Tier, stored_alone: bool
    ) -> np.ndarray:
        """See `held`; of one rank."""
        held: dict[str, float] = {}
        everywhere = 0.0
        for h in holdings:
            if h.kind in weights and h.tier == tier and (h.is_stored or not stored_alone):
                if not h.of:  # what every stage has, whatever its blocks
                    everywhere += weights[h.kind] * h.bytes
                    continue
                name = self.blocks.graph.parameters.get(h.of, h.of)
                held[name] = held.get(name, 0) + weights[h.kind] * h.bytes
        covered = [
            (size / len(spread), sorted(itertools.chain.from_iterable(at.values())))
            for name, size in held.items()
            for spread in [self.blocks.spread(name, self.blocks.uses.get(name, [0]))]
            for at in spread
        ]
        return self._covered([*covered, (everywhere, range(self.blocks.n))])

    def _covered(self, shared: Iterable[tuple[float, Sequence[int]]]) -> np.ndarray:
        """Bytes of every stage, given pairs of bytes and blocks; a stage with any of the blocks has the bytes."""
        n = self.blocks.n
        single, total = np.zeros(n), np.zeros((n + 1, n + 1))
        sizes: dict[tuple[int, ...], float] = {}
        for size, units in shared:
            sizes[tuple(units)] = sizes.get(tuple(units), 0.0) + size
        for units, size in sizes.items():
            if len(units) == 1:
                single[units[0]] += size
            else:
                total += size * has(units, n)
        return total + sums(single)

    @cached_property
    def saved_memory(self) -> SavedBytes:
        """The memory saved for backward or sent between blocks, if whole blocks are recomputed."""
        memories = self._memories(self._saved_memory(self.blocks.unit_repeats))
        return SavedBytes(memories, self._moments, self.blocks.repeating, keeps_part=False)

    def saved_with(self, entering: Mapping[Memory, Sequence[int]]) -> SavedBytes:
        """The memory saved for backward or sent between blocks, if single ops are recomputed.

        `entering` maps the memory that recomputed blocks save to the captured parts that save it.
        """
        memories = self._memories(entering)
        return SavedBytes(memories, self._moments, self.blocks.repeating, keeps_part=True)

    def _memories(self, entering: Mapping[Memory, Sequence[int]]) -> list[SavedMemory]:
        kept, wires = self._saved_memory({}), self._wires
        entering = dict(entering)
        found = [self._take_slice(each, kept, entering) for each in self._slices(kept, entering)]
        for at in {**kept, **entering, **wires}:
            size, spans = self.blocks.bytes(at), wires.get(at, [])
            units = {*kept.get(at, ()), *entering.get(at, ())}
            units.update(itertools.chain.from_iterable(spans))
            for places in self.blocks.spread(at[0], units | {*self.blocks.uses.get(at[0], ())}):
                found.append(
                    SavedMemory(
                        size,
                        _places(places, kept.get(at, ())),
                        _places(places, entering.get(at, ())),
                        tuple(
                            (min(places[made]), max(places[last]))
                            for made, last in spans
                            if places.get(made) and places.get(last)
                        ),
                    )
                )
        return found

    def _slices(
        self, kept: Mapping[Memory, Sequence[int]], entering: Mapping[Memory, Sequence[int]]
    ) -> list[KeptSlice]:
        """The slices that are saved in place of memory that their block would save as a whole."""
        return [
            each
            for each in self.blocks.slices
            if each.block in (entering if each.block in self._again else kept).get(each.memory, ())
        ]

    def _take_slice(
        self, each: KeptSlice, kept: dict[Memory, list[int]], entering: dict[Memory, Sequence[int]]
    ) -> SavedMemory:
        """The device's memory of a slice; removes the memory that it replaces from what the block saves."""
        size = self._slice_bytes(each) if each.tier == "device" else 0.0
        at = (each.block,)
        if each.block in self._again:
            entering[each.memory] = [unit for unit in entering[each.memory] if unit != each.block]
            return SavedMemory(size, (), at, ())
        kept[each.memory].remove(each.block)
        return SavedMemory(size, at, (), ())

    def _slice_bytes(self, each: KeptSlice) -> float:
        return self.blocks.bytes((each.tensor, each.slice_layout))

    def saved_in(self, tier: Tier) -> np.ndarray:
        """Bytes of every stage that a micro-batch in flight keeps in the tier host or nvme."""
        single = np.zeros(self.blocks.n)
        for each in self.blocks.slices:
            if each.tier == tier:
                single[each.block] += self._slice_bytes(each)
        return sums(single)

    @cached_property
    def _again(self) -> frozenset[int]:
        """Blocks that the plan recomputes."""
        return repeating_parts(self.blocks.graph, self.blocks.plan)[1]

    @cached_property
    def _wires(self) -> dict[Memory, list[tuple[int, int]]]:
        """Memory that later blocks use -> pairs of the captured part computing it and the last part using it."""
        found: dict[Memory, list[tuple[int, int]]] = {}
        for name, span in self.crossings.spans.items():
            at = self.blocks.flow.saved.memory(name, self.blocks.flow.produced[name])
            found.setdefault(at, []).append(span)
        return found

    def _saved_memory(self, again: Mapping[int, bool]) -> dict[Memory, list[int]]:
        """Memory saved for backward -> the captured parts that save it.

        A recomputed part (`again`) saves only the tensors that enter it.
        """
        graph, flow = self.blocks.graph, self.blocks.flow
        stored = {*graph.parameters.values(), *graph.buffers.values()}
        found: dict[Memory, list[int]] = {}
        for op in graph.ops:
            unit = self.blocks.unit[op.name]
            kept = op.saved if keeps(op, graph.tensors) else ()
            names = self._from_outside(op) if again.get(unit) else kept
            enters = flow.entering(op, self.blocks.unit) if again.get(unit) else None
            layouts = (*(enters or flow.operands[op.name]), *flow.results[op.name])
            for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
                if name in names and flow.saved.root(name) not in stored:
                    units = found.setdefault(flow.saved.memory(name, layout), [])
                    if unit not in units:
                        units.append(unit)
        return found

    def _from_outside(self, op: Op) -> tuple[str, ...]:
        """Operands of an op that no op of its block computes."""
        producers = {name: self.blocks.graph.producer.get(name) for name in op.operands}
        unit = self.blocks.unit[op.name]
        return tuple(n for n, made in producers.items() if made is None or self.blocks.unit[made.name] != unit)

    @cached_property
    def _moments(self) -> np.ndarray:
        """Transient bytes of every block on the rank with most of them."""
        return np.max([self._moments_of(rank) for rank in self.blocks.holdings_of_ranks], axis=0)

    def _moments_of(self, holdings: Sequence[MemoryItem]) -> np.ndarray:
        """Transient bytes of every block on one rank: of a loss, or of gathered parameters with their gradients."""
        blocks = self.blocks
        gathered, losses = np.zeros(blocks.n), np.zeros(blocks.n)
        for h in holdings:
            if h.kind == "gathered":
                gathered[blocks.all_of(blocks.unit.get(h.of, blocks.units - 1))] += h.bytes
            elif h.kind == "working":
                losses[blocks.all_of(blocks.unit[h.of])] += h.bytes / blocks.times(h.of)
        return np.maximum(losses, 2 * gathered)


def _places(places: Places, units: Iterable[int]) -> tuple[int, ...]:
    """The blocks of the whole model for captured parts, ascending."""
    return tuple(sorted({at for unit in units for at in places.get(unit, ())}))
