"""Seconds of a backward in two halves, op by op: gradients of inputs first, those of parameters later.

The second half runs an op again if gradients of both kinds leave it (`autopar.runtime.pipeline.split_backward`). A
product
divides: each half computes some of its gradients. Any other op, such as a norm with a scale, runs as a whole in both
halves. The host launches such ops twice, and finds them by a walk through autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from autopar.cost_model import Hardware
from autopar.cost_model.compute import is_product
from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.ir import Graph, Op

# Durations in units of the host's time to issue a kernel. Measured with four layers of a Transformer so small that
# nothing but the host takes time (benchmarks/speed/bench_split_backward.py): the walk, for every op of backward; and
# one more run of an op, with what it passes on to its parameters.
WALK_KERNELS = 0.4
AGAIN_KERNELS = 4.0


class Halves(NamedTuple):
    """One execution of an item of backward, if the backward is split into two halves.

    Attributes:
        second_seconds: duration of its part in the second half.
        extra_seconds: duration of both halves together, beyond that of a whole backward.
    """

    second_seconds: float
    extra_seconds: float


class SplitSeconds:
    """Durations of both halves of a backward.

    Args:
        graph: the captured model.
        hardware: machine whose figures give the host's time per kernel.
    """

    def __init__(self, graph: Graph, hardware: Hardware) -> None:
        self._graph, self._host_seconds = graph, float(hardware.host_seconds)
        self._kernel_seconds = max(self._host_seconds, float(hardware.launch_seconds))

    def halves(self, item: WorkItem) -> Halves:
        """The part of an item of backward in the second half, and the cost of splitting it."""
        op = self._graph.by_name.get(item.of)
        seconds = float(item.seconds)
        if op is None or item.carries == "gradient":
            return Halves(seconds, 0.0)
        if item.resource != COMPUTE:
            return Halves(0.0, 0.0)
        kernels_seconds = item.kernels * self._kernel_seconds
        walk_seconds = WALK_KERNELS * kernels_seconds
        if not self.runs_in_both(op):
            return Halves(self._weight_share(op.operands) * seconds, walk_seconds)
        first, second = self._parts(op)
        first_seconds = max(first * seconds, kernels_seconds)
        second_seconds = max(second * seconds, AGAIN_KERNELS * kernels_seconds)
        whole_seconds = max(seconds, item.kernels * self._host_seconds)
        return Halves(second_seconds, first_seconds + second_seconds - whole_seconds + walk_seconds)

    def runs_in_both(self, op: Op) -> bool:
        """Whether gradients of both kinds leave an op, so that it runs in both halves."""
        return 0.0 < self._weight_share(op.operands) < 1.0

    def _parts(self, op: Op) -> tuple[float, float]:
        """Parts of an op's backward that the two halves run: of a product, the gradient of one operand each."""
        return (0.5, 0.5) if is_product(op) else (1.0, 1.0)

    def _weight_share(self, operands: Sequence[str]) -> float:
        """Fraction of the gradients of operands that parameters wait for, but no other stage."""
        wanted = [n for n in operands if self._graph.tensors[n].needs_grad]
        return sum(name not in self._of_inputs for name in wanted) / max(1, len(wanted))

    @cached_property
    def _of_inputs(self) -> frozenset[str]:
        """Names of the tensors that depend on an input of the model, such as activations.

        Others are parameters, buffers, and what is computed from these alone: a cast, a view, a masked weight.
        """
        found = set(self._graph.inputs.values())
        for op in self._graph.ops:
            if not found.isdisjoint(op.operands):
                found.update(op.results)
        return frozenset(found)
