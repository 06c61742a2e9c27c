"""The ranks that measure together, and how they time something at the same moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from autopar.calibrate.devices import Device, Effort
from autopar.errors import AutoparError

LONGEST_LOOP = 1000


@dataclass(frozen=True)
class Team:
    """The default process group, or one process alone.

    Attributes:
        device: device of this rank.
        rank, size: position in the whole group, and its number of ranks.
        local_size: ranks of one node, numbered one after the other.
    """

    device: Device
    rank: int = 0
    size: int = 1
    local_size: int = 1

    @classmethod
    def of_process_group(cls, device: Device) -> Team:
        """The default process group as torchrun lays it out. Raises AutoparError for uneven nodes."""
        size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size % local_size:
            raise AutoparError(f"{size} ranks with {local_size} on this node: give every node as many ranks.")
        return cls(device, dist.get_rank(), size, local_size)

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            dist.barrier()

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, the same on all of them."""
        return self.largest_each([value])[0]

    def largest_each(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' values at every position, the same on all of them."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float32, device=self.device.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        found: list[float] = shared.tolist()
        return found

    def seconds(self, run: Callable[[], object], effort: Effort, *, meets: bool = False) -> float:
        """Seconds of `run` when all ranks do it at once: the median of samples that each end with the slowest rank.

        Where ranks share cores, some of them run first; a rank's own median would be that of turns in which it did.

        Args:
            run: a kernel, or a collective if `meets`; the ranks agree on the number of runs.
            effort: how often and how long it runs.
            meets: whether ranks wait for each other in it, so that none may begin later than the others.
        """
        clock = self.device.seconds if meets else self.device.kernel_seconds
        run()  # the first call allocates, compiles or connects
        once = self.largest(min(clock(run, 1) for _ in range(3)))
        times = max(1, min(LONGEST_LOOP, round(effort.sample_seconds / max(once, 1e-9))))
        samples = []
        for _ in range(effort.samples):
            self.barrier()
            samples.append(clock(run, times))
        return median(self.largest_each(samples))

    def group(self, link: str) -> tuple[dist.ProcessGroup, list[int]] | None:
        """This rank's process group over a link, with its members; None where the link joins nobody.

        `inside_node` joins the ranks of a node, `across_nodes` those of one place in every node, so
        that all ranks of a node use its way out at the same time. Every rank must ask.
        """
        step, width = (1, self.local_size) if link == "inside_node" else (self.local_size, self.nodes)
        if width == 1:
            return None
        starts = range(0, self.size, width) if step == 1 else range(step)
        teams = [list(range(start, start + step * width, step)) for start in starts]
        groups = [dist.new_group(members) for members in teams]
        return next((group, members) for group, members in zip(groups, teams, strict=True) if self.rank in members)
