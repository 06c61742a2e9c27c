"""The seed of a run's random ops, drawn from PyTorch's generator as an op of one device draws its numbers.

torch.manual_seed(0); step(x)      the masks of seed 0
step(x)                            the next ones
torch.manual_seed(0); step(x)      those of the first step again

And the states of this process's random generators, as plain values that load without running code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar import _torch
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


def random_states() -> dict[str, Any]:
    """The states of torch's generators, of the CPU and of the accelerator, of Python's and of numpy's.

    >>> import torch
    >>> before = random_states()
    >>> drawn = torch.rand(2)
    >>> set_random_states(before)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": _numpy_state()}
    if _torch.has_used_accelerator():
        found["device"] = torch.get_device_module().get_rng_state()
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets the generators to states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    words, *rest = states["numpy"]
    np.random.set_state(("MT19937", words.numpy(), *rest))
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])


def _numpy_state() -> list[Any]:
    """The state of numpy's generator, its words as a tensor."""
    state: Any = np.random.get_state()
    _, words, *rest = state
    return [torch.from_numpy(words.astype(np.int64)), *rest]
