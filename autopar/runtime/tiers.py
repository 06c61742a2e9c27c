"""The memories of a rank besides its device's, and the moves between them and the device.

On an accelerator the host's memory is pinned, so that the accelerator reads it directly; every copy blocks until
it has ended. A rank that computes on the processor has only one memory. What is put into a tier is then a second
copy in that memory, and moves in both directions are real copies and are counted, so that tests on processors can
check the moves.
"""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import PlanError
from autopar.ir import Tier
from autopar.ir.tier import FROM_DEVICE, TO_DEVICE


class Tiers:
    """What lies in each tier of one rank, and what has moved.

    Args:
        device: the device that the rank computes on.

    Attributes:
        live_bytes: tier -> bytes of the tensors that were put into it and are still alive.
        moved_bytes: (tier, "to_device" or "from_device") -> bytes moved so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live_bytes: Counter[Tier] = Counter()
        self.moved_bytes: Counter[tuple[Tier, str]] = Counter()

    def keep(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy of a tensor in a tier."""
        if tier == "nvme":
            raise PlanError(
                "Parameters on nvme cannot be run yet; store them in the tier host or device."
            )
        return self.counted(_torch.host_copy(x), tier)

    def counted(self, x: Tensor, tier: Tier) -> Tensor:
        """A tensor that was made in a tier; its bytes are counted from now on, for as long as its memory is held."""
        self.live_bytes[tier] += x.nbytes
        weakref.finalize(x.untyped_storage(), self._gone, tier, x.nbytes)
        return x

    def _gone(self, tier: Tier, size_bytes: int) -> None:
        self.live_bytes[tier] -= size_bytes

    def to_device(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy on the device of a tensor in a tier."""
        self.moved_bytes[tier, TO_DEVICE] += x.nbytes
        return _torch.device_copy(x, self.device)

    def from_device(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy in a tier of a tensor on the device."""
        self.moved_bytes[tier, FROM_DEVICE] += x.nbytes
        return self.keep(x, tier)
