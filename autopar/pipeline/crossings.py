"""The tensors that one block computes and later blocks use, and the cost of sending them between stages."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from autopar.cost_model import Link, collective_seconds
from autopar.pipeline.priced_blocks import PricedBlocks


class Crossings:
    """Tensors that later blocks of a plan use.

    Args:
        blocks: the plan's items by block.
        link: the link between stages; None without an axis for them.
    """

    def __init__(self, blocks: PricedBlocks, link: Link | None) -> None:
        self.blocks, self.link = blocks, link

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Name of a tensor that later captured parts use -> (the part that computes it, the last part that uses it)."""
        blocks, graph = self.blocks, self.blocks.graph
        dependent, outputs = set(graph.parameters.values()), set(graph.outputs)
        found: dict[str, tuple[int, int]] = {}
        for op in graph.ops:
            if not dependent.intersection(op.operands):
                continue  # every stage can compute it by itself
            dependent.update(op.results)
            for name in op.results:
                last = blocks.units - 1 if name in outputs else max(blocks.uses.get(name, [0]))
                if last > blocks.unit[op.name]:
                    found[name] = (blocks.unit[op.name], last)
        return found

    @cached_property
    def sent(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes sent to a stage that begins with block k, and of gradients back, at `[k]` of two arrays of `n + 1`."""
        blocks = self.blocks
        sent, gradients = np.zeros(blocks.n + 1), np.zeros(blocks.n + 1)
        for name, (made, last) in self.spans.items():
            size = blocks.bytes((name, blocks.flow.produced[name]))
            for at in blocks.spread(name, {*blocks.uses.get(name, ()), made, last}):
                if not at.get(made) or not at.get(last):
                    continue
                crossed = slice(min(at[made]) + 1, max(at[last]) + 1)
                sent[crossed] += size
                if blocks.graph.tensors[name].needs_grad:
                    gradients[crossed] += size
        return sent, gradients

    def send_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds to send these numbers of bytes to the next stage; 0 for 0 bytes, as at both ends of the model."""
        if self.link is None:
            return np.zeros_like(sizes)
        seconds = collective_seconds(
            "send", before_bytes=sizes, after_bytes=sizes, ranks=2, link=self.link, hardware=self.blocks.hardware
        )
        return np.where(sizes > 0, seconds, 0.0)
