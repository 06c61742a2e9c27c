"""The seed of a run's random ops, drawn from PyTorch's generator as an op of one device draws its numbers.

torch.manual_seed(0); step(x)      the masks of seed 0
step(x)                            the next ones
torch.manual_seed(0); step(x)      those of the first step again
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.program.program import Program
from autopar.runtime.ranks.world import World

_REPLICA_STRIDE = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio (Knuth, volume 3, section 6.4)


class Seeds:
    """Draws one seed for every step and forward that has random ops.

    Attributes:
        generator: draws the seeds of micro-batches and stages; in the same state on every rank.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def draw(self, program: Program, world: World) -> None:
        """Before a run: takes a seed from the first rank's generator. Every rank draws, so that all stay in step.

        A program without random ops draws none, and no rank waits for the first.
        """
        if program.is_random:
            own = world.agree(int(torch.randint(2**62, ())))
            # Replicas whose generators are alike draw other masks all the same, for they have other rows.
            number = 0 if world.replicas is None else world.replicas.number
            self.generator.manual_seed((own + number * _REPLICA_STRIDE) % 2**62)


def draw_alike(device: torch.device, *more: torch.Generator) -> None:
    """Gives generators the first rank's state: torch's of the CPU and of a device, and more; every rank calls it."""
    if not dist.is_initialized():
        return
    on_device = [] if device.type == "cpu" else [torch.get_device_module(device)]
    pairs = [(x.get_rng_state, x.set_rng_state) for x in (torch, *on_device)]
    pairs += [(x.get_state, x.set_state) for x in more]
    for read, write in pairs:
        state = read().to(device)
        dist.broadcast(state, src=0)
        write(state.cpu())
