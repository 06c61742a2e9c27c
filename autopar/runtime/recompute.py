"""Blocks that keep only what enters them, and run again in backward; which do, `autopar.program.recomputation` says.

After Chen et al. 2016, "Training deep nets with sublinear memory cost", section 3, by
torch.utils.checkpoint. What is drawn is drawn again from the same state of the generator; new values of
buffers are results, which the second run does not return; collectives are made again, by all ranks in
the order of the same graph. The second run ends with the last tensor that backward wants, so that a
collective behind that is not repeated.

Of a pipeline stage whose blocks run again the backward is not split in two, for a block would run again
for each part: where a zero-bubble schedule has the first half, all of it runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.ops.nodes import draws
from autopar.runtime.gather import Gathers


class Recomputed(nn.Module):
    """A block of a program, as a function of all that enters it."""

    def __init__(self, block: fx.GraphModule, gathers: Gathers) -> None:
        super().__init__()
        self.block = block
        self._gathers = gathers
        self._draws = any(draws(node) for node in block.graph.nodes)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        return checkpoint(
            self.block, *inputs, use_reentrant=False, preserve_rng_state=self._draws,
            context_fn=lambda: (contextlib.nullcontext(), self._gathers.second_run()),
        )  # fmt: skip
