"""Bytes of every stage: memory held all the time, memory that stays for backward, and transient memory.

For every micro-batch in flight a stage holds the tensors that its ops keep for backward and, because
`torch.distributed.pipelining` does, the values that it received and sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from autopar.cost_model import keeps
from autopar.cost_model.memory import KeptSlice
from autopar.ir import Op, Tier
from autopar.pipeline.crossings import Crossings
from autopar.pipeline.parts import repeating_parts
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.recomputable import Memory
from autopar.pipeline.repetition import Places
from autopar.pipeline.staying import Staying, StayingBytes
from autopar.pipeline.stretches import has, sums


class StageBytes:
    """Bytes of a plan's stages.

    Args:
        blocks: the plan's items by block.
        crossings: what crosses from one block to a later one.
    """

    def __init__(self, blocks: PricedBlocks, crossings: Crossings) -> None:
        self.blocks, self.crossings = blocks, crossings

    def held(
        self, weights: Mapping[str, float], tier: Tier = "device", *, stored_alone: bool = False
    ) -> np.ndarray:
        """Bytes of parameters and their gradients and states, counted once in every stage that uses them.

        Args:
            weights: kind of a holding -> number of times that it counts.
            tier: memory in which the counted holdings lie.
            stored_alone: whether only holdings count that the optimizer finds there.
        """
        held: dict[str, float] = {}
        for h in self.blocks.holdings:
            if h.kind in weights and h.tier == tier and (h.is_stored or not stored_alone):
                name = self.blocks.graph.parameters.get(h.of, h.of)
                held[name] = held.get(name, 0) + weights[h.kind] * h.bytes
        return self._covered(
            (size / len(spread), sorted(itertools.chain.from_iterable(at.values())))
            for name, size in held.items()
            for spread in [self.blocks.spread(name, self.blocks.uses.get(name, [0]))]
            for at in spread
        )

    def _covered(self, shared: Iterable[tuple[float, Sequence[int]]]) -> np.ndarray:
        """Bytes of every stage, from pairs of a size and the blocks of which a stage needs one to count it, once."""
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
    def stays(self) -> StayingBytes:
        """All memory that stays for backward or crosses between blocks, where whole blocks are recomputed."""
        memories = self._memories(self._staying(self.blocks.unit_repeats))
        return StayingBytes(memories, self._moments, self.blocks.repeating, keeps_part=False)

    def stays_with(self, entering: Mapping[Memory, Sequence[int]]) -> StayingBytes:
        """The same, where `entering` says which memory stays of recomputed blocks, and for which captured parts."""
        memories = self._memories(entering)
        return StayingBytes(memories, self._moments, self.blocks.repeating, keeps_part=True)

    def _memories(self, entering: Mapping[Memory, Sequence[int]]) -> list[Staying]:
        kept, wires = self._staying({}), self._wires
        entering = dict(entering)
        found = [self._take_slice(each, kept, entering) for each in self._slices(kept, entering)]
        for at in {**kept, **entering, **wires}:
            size, spans = self.blocks.bytes(at), wires.get(at, [])
            units = {*kept.get(at, ()), *entering.get(at, ())}
            units.update(itertools.chain.from_iterable(spans))
            for places in self.blocks.spread(at[0], units | {*self.blocks.uses.get(at[0], ())}):
                found.append(
                    Staying(
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
        """The slices of memory that their block would keep otherwise."""
        return [
            each
            for each in self.blocks.slices
            if each.block in (entering if each.block in self._again else kept).get(each.memory, ())
        ]

    def _take_slice(
        self,
        each: KeptSlice,
        kept: dict[Memory, list[int]],
        entering: dict[Memory, Sequence[int]],
    ) -> Staying:
        """A slice that its block keeps in place of the memory, which is taken from what it keeps."""
        size = self.blocks.bytes((each.tensor, each.slice_layout))
        at = (each.block,)
        if each.block in self._again:
            entering[each.memory] = [unit for unit in entering[each.memory] if unit != each.block]
            return Staying(size, (), at, ())
        kept[each.memory].remove(each.block)
        return Staying(size, at, (), ())

    @cached_property
    def _again(self) -> frozenset[int]:
        """Blocks that the plan recomputes."""
        return repeating_parts(self.blocks.graph, self.blocks.plan)[1]

    @cached_property
    def _wires(self) -> dict[Memory, list[tuple[int, int]]]:
        """Memory that crosses -> pairs of the captured part that makes it and the last that uses it."""
        found: dict[Memory, list[tuple[int, int]]] = {}
        for name, span in self.crossings.spans.items():
            at = self.blocks.flow.saved.memory(name, self.blocks.flow.produced[name])
            found.setdefault(at, []).append(span)
        return found

    def _staying(self, again: Mapping[int, bool]) -> dict[Memory, list[int]]:
        """Memory that stays for backward -> the captured parts that keep it.

        A part that is recomputed (`again`) keeps only the tensors that enter it.
        """
        graph, flow = self.blocks.graph, self.blocks.flow
        stored = {*graph.parameters.values(), *graph.buffers.values()}
        found: dict[Memory, list[int]] = {}
        for op in graph.ops:
            unit = self.blocks.unit[op.name]
            kept = op.saved if keeps(op, graph.tensors) else ()
            names = self._from_outside(op) if again.get(unit) else kept
            layouts = (*flow.operands[op.name], *flow.results[op.name])
            for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
                if name in names and flow.saved.root(name) not in stored:
                    units = found.setdefault(flow.saved.memory(name, layout), [])
                    if unit not in units:
                        units.append(unit)
        return found

    def _from_outside(self, op: Op) -> tuple[str, ...]:
        """Operands that are made outside of the op's block."""
        makers = {name: self.blocks.graph.producer.get(name) for name in op.operands}
        unit = self.blocks.unit[op.name]
        return tuple(
            n for n, made in makers.items() if made is None or self.blocks.unit[made.name] != unit
        )

    @cached_property
    def _moments(self) -> np.ndarray:
        """Bytes that every block has for a moment: the loss, or gathered parameters with gradients."""
        blocks = self.blocks
        gathered, losses = np.zeros(blocks.n), np.zeros(blocks.n)
        for h in blocks.holdings:
            if h.kind == "gathered":
                gathered[blocks.all_of(blocks.unit.get(h.of, blocks.units - 1))] += h.bytes
            elif h.kind == "working":
                losses[blocks.all_of(blocks.unit[h.of])] += h.bytes / blocks.times(h.of)
        return np.maximum(losses, 2 * gathered)


def _places(places: Places, units: Iterable[int]) -> tuple[int, ...]:
    """The blocks of the whole model for captured parts, ascending."""
    return tuple(sorted({at for unit in units for at in places.get(unit, ())}))
