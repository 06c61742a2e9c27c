"""The share of each product in the FLOPs of a rank's graph, and of each collective in the bytes it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from autopar import _torch
from autopar._torch import pytree
from autopar.ops.collectives import Collective

# Seconds of backward's messages as a part of the seconds of backward's products, if a step communicates for as long as
# it computes: forward and backward each communicate for a half, and backward computes for two thirds, so this is
# (1/2) / (2/3). Forward runs in the mirrored order of backward.
_MESSAGES = 0.75
Example = tuple[Sequence[int], torch.dtype]


def shares_of_work(
    module: fx.GraphModule, examples: Sequence[Example], device: torch.device
) -> Mapping[fx.Node, float]:
    """Each call's share of the FLOPs of all calls; for a collective, `_MESSAGES` of its share of all bytes sent.

    So all collectives together count `_MESSAGES` times as much as all products, whatever the machine. The graph runs
    once without values.

    Args:
        module: graph of one rank.
        examples: shape and format of the local tensor of each placeholder.
        device: device of the graph's tensors.
    """
    counted = _Counted(module)
    with _torch.FakeTensorMode(), torch.no_grad(), counted.counter:
        counted.run(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in examples))
    flops, sent = max(1, sum(counted.flops.values())), max(1, sum(counted.sent_bytes.values()))
    return {
        **{node: count / flops for node, count in counted.flops.items()},
        **{node: _MESSAGES * count / sent for node, count in counted.sent_bytes.items()},
    }


class _Counted(fx.Interpreter):
    """A run that notes the FLOPs of every call, and the larger of a collective's operand and result in bytes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.counter = FlopCounterMode(display=False)
        self.flops: dict[fx.Node, int] = {}
        self.sent_bytes: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        call = Collective.of(n)
        before = self.counter.get_total_flops()
        is_exchange = call is not None and call.counts is not None
        # How many rows an exchange brings is known in a step alone: as many as it takes, where experts are in balance.
        result = self.env[call.x] if call and is_exchange else super().run_node(n)
        if call is None:
            self.flops[n] = self.counter.get_total_flops() - before
        else:
            self.sent_bytes[n] = max(_bytes(result), _bytes(self.env[call.x]))
        return result


def _bytes(x: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))
