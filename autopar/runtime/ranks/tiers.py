"""The memories of a rank besides its device's, and the moves between them and the device.

On an accelerator the host's memory is pinned, so that the accelerator reads it directly; every copy blocks until
it has ended. A rank that computes on the processor has only one memory. What is put into a tier is then a second
copy in that memory, and moves in both directions are real copies and are counted, so that tests on processors can
check the moves. The tier nvme is files (`autopar.runtime.ranks.files`), there and on any other device.
"""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir import Tier
from autopar.ir.tier import FROM_DEVICE, FROM_HOST, TO_DEVICE, TO_HOST
from autopar.runtime.ranks.files import Files


class Tiers:
    """The tensors in each tier of one rank, and the moves between tiers.

    Args:
        device: the device that the rank computes on.
        files: location of the tier nvme; None if no folder was named.

    Attributes:
        live_bytes: tier -> bytes of the tensors that were put into it and are still alive.
        moved_bytes: (farther tier of a link, name of the move) -> bytes moved over it so far.
    """

    def __init__(self, device: torch.device, files: Files | None = None) -> None:
        self.device, self._files = device, files
        self.live_bytes: Counter[Tier] = Counter()
        self.moved_bytes: Counter[tuple[Tier, str]] = Counter()

    def keep(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy of a tensor in a tier."""
        if tier == "nvme":
            return self.empty_in_file(x.shape, x.dtype).copy_(x.detach())
        return self.counted(_torch.host_copy(x), tier)

    def empty_in_file(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in the tier nvme, without values yet. Raises AutoparError if there is no folder or no room."""
        return self.counted(self.files.empty(shape, dtype), "nvme")

    @property
    def files(self) -> Files:
        """The location of the tier nvme. Raises AutoparError if no folder was named."""
        if self._files is None:
            raise AutoparError(
                "The plan keeps parameters on nvme, but no folder was named for them: give compile(..., "
                "nvme='/path/on/the/disk'). Without a folder there are only the tiers device and host."
            )
        return self._files

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

    def to_host(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy in the host's memory of a tensor in a farther tier."""
        self.moved_bytes[tier, TO_HOST] += x.nbytes
        return self.keep(x, "host")

    def from_host(self, x: Tensor, tier: Tier) -> Tensor:
        """A copy in a farther tier of a tensor in the host's memory."""
        self.moved_bytes[tier, FROM_HOST] += x.nbytes
        return self.keep(x, tier)
