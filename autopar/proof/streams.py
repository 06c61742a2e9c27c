"""The noise of every op that draws: one stream for each op and batch, one number for each logical element.

A single device draws in the order of its ops. With a seed for every batch, the i-th op that draws takes its noise from
a generator that the i-th number of the seed seeds:

    batch -> seed -> keys k0, k1, ... of the ops that draw, in order -> torch.rand(shape of what is drawn)

The same ops stand in the captured graph in the same order. So the noise of a captured op is known, and a rank takes
its part of it: the rows of its micro-batch, if the single device runs the whole batch at once, and of these what the
layout of the op's result gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import CPU, forked_random_state
from autopar.analysis.parts import PartFinder, places_of
from autopar.capture.captured import Captured
from autopar.ir import Graph
from autopar.ops.nodes import draws
from autopar.planning.planning import Prepared
from autopar.proof.noise import DrawsFrom, drawn_shapes, example_of

Shape = tuple[int, ...]
_KEYS = 2**62


@dataclass(frozen=True)
class DrawingOp:
    """An op of a captured graph that draws.

    Attributes:
        first: number of draws before it.
        shapes: shapes of what it draws, in order, for a micro-batch.
        rows: sizes of the factors of its result's dims in the whole batch, and the position of the batch among them;
            None for a result without rows of the batch, or where the whole batch is not known.
    """

    first: int
    shapes: tuple[Shape, ...]
    rows: tuple[Shape, int] | None = None


@dataclass(frozen=True)
class Streams:
    """The draws of a captured step.

    Attributes:
        ops: name of an op that draws -> what it draws, in the order of the graph.
        graph: the captured graph.
        micro_batches: number of micro-batches of the whole batch that `DrawingOp.rows` speaks of.
    """

    ops: Mapping[str, DrawingOp]
    graph: Graph
    micro_batches: int = 1

    @classmethod
    def of(cls, prepared: Prepared) -> Streams:
        """The draws of a step captured for a micro-batch."""
        ops, first = {}, 0
        for node in prepared.captured.module.graph.nodes:
            if draws(node):
                shapes = tuple(_shapes(node))
                ops[node.name] = DrawingOp(first, shapes)
                first += len(shapes)
        return cls(ops, prepared.analysis.graph)

    def within(self, part: Captured, whole: Prepared) -> Streams:
        """The same, with the place of a micro-batch in the draws of a whole batch."""
        finder = PartFinder(whole.captured, whole.analysis.graph, part)
        if not self.ops or not finder.counts.is_alike:
            return self
        ops = {
            finder.counts.node(name).name: _rows_of(finder, name) for name in finder.nodes if draws(finder.nodes[name])
        }
        found = {name: replace(op, rows=ops[name]) for name, op in self.ops.items()}
        return replace(self, ops=found, micro_batches=int(finder.counts.ratio))

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all draws of a micro-batch, in order."""
        return [shape for op in self.ops.values() for shape in op.shapes]

    @contextmanager
    def on_one_device(self, batch: int) -> Iterator[None]:
        """A context in which the ops of a single device draw from the streams of a batch.

        The keys come from the default generator: a block that is recomputed in backward, and that has set the generator
        back, draws the same.
        """
        if not self.ops:
            yield
            return
        with forked_random_state([CPU], batch), DrawsFrom(lambda shape: stream(_next_key(), shape)):
            yield


@dataclass(frozen=True)
class MicroBatchStreams:
    """The noise of the ops of one micro-batch.

    Attributes:
        streams: the draws of the captured step.
        batch: number of the single device's batch that the micro-batch belongs to.
        part: number of micro-batches of that batch before this one.
        parts: number of micro-batches of that batch.
    """

    streams: Streams
    batch: int
    part: int = 0
    parts: int = 1

    @classmethod
    def number(cls, streams: Streams, micro_batch: int, group: int, *, is_whole: bool) -> MicroBatchStreams:
        """The noise of a micro-batch, by its number.

        Args:
            streams: the draws of the captured step.
            micro_batch: number of the micro-batch.
            group: number of micro-batches between two updates.
            is_whole: whether the single device runs them as one batch.
        """
        place = micro_batch % group
        return cls(streams, 0, place, group) if is_whole else cls(streams, place)

    @cached_property
    def _keys(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.batch)
        return [_next_key(generator) for _ in self.streams.shapes]

    def noise(self, name: str) -> list[Tensor]:
        """The noise of all draws of an op, for the whole micro-batch."""
        op = self.streams.ops[name]
        return [self._noise(op, i) for i in range(len(op.shapes))]

    def _noise(self, op: DrawingOp, i: int) -> Tensor:
        key, shape = self._keys[op.first + i], op.shapes[i]
        if self.parts == 1 or op.rows is None:
            return stream(key, shape)
        sizes, place = op.rows
        own = sizes[place] // self.streams.micro_batches
        whole = [*sizes[:place], own * self.parts, *sizes[place + 1 :]]
        return stream(key, whole).narrow(place, self.part * own, own).reshape(shape)


def stream(key: int, shape: Sequence[int]) -> Tensor:
    """Uniform numbers of float64 in [0, 1), in the order of the elements, on the CPU."""
    generator = torch.Generator().manual_seed(key)
    return torch.rand(math.prod(shape), generator=generator, dtype=torch.float64).reshape(tuple(shape))


def _next_key(generator: torch.Generator | None = None) -> int:
    return int(torch.randint(_KEYS, (), generator=generator))


def _shapes(node: fx.Node) -> list[Shape]:
    """The shapes of what a node draws, found by running its op on ones."""
    call: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: example_of(n.meta["val"]))
    return drawn_shapes(lambda: call(*args, **kwargs))


def _rows_of(finder: PartFinder, name: str) -> tuple[Shape, int] | None:
    tensor = finder.graph.tensors[finder.graph.by_name[name].results[0]]
    places = places_of(tensor.factors, finder.batch)
    if len(places) != 1:
        return None
    ((dim, index),) = places
    sizes = [dim or (1,) for dim in tensor.dims]
    before = sum(len(each) for each in sizes[:dim]) + index
    return tuple(n for each in sizes for n in each), before
