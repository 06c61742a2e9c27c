"""All ranks doing one thing together: what goes wrong on one is known to all."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from autopar.errors import AutoparError, PeerError, first_line
from autopar.ops.collectives import group_name

T = TypeVar("T")


def is_first() -> bool:
    """Whether this is the first rank, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def warn_together(message: str, *, stacklevel: int) -> None:
    """Calls `warnings.warn` on the first rank only, for a warning that all ranks would give.

    Not for what concerns one rank, which has to say it itself.
    """
    if is_first():
        warnings.warn(message, stacklevel=stacklevel + 1)


@dataclass(frozen=True)
class AllRanks:
    """The ranks of the default process group, or this process alone if there is none.

    A wait for the others ends when one of them dies, or with the timeout of the process group.

    Attributes:
        doing: what they do, for errors: "Saving /runs/1".
    """

    doing: str

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return not dist.is_initialized()

    @property
    def first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.alone else dist.get_rank()

    @property
    def count(self) -> int:
        """The number of ranks."""
        return 1 if self.alone else dist.get_world_size()

    def share(self, works: Sequence[T]) -> Sequence[T]:
        """This rank's share of works, which all ranks know in the same order."""
        return works[self.rank :: self.count]

    def everyones(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        with self.naming_failures():
            dist.all_gather_object(values, value)
        return values

    def at_first(self, value: T) -> list[T]:
        """The values of all ranks, on the first; none on the others."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size() if self.first else []
        with self.naming_failures():
            dist.gather_object(value, values if self.first else None)
        return values

    def from_first(self, values: Sequence[T]) -> T:
        """This rank's value, of those that the first rank has for all ranks, by rank."""
        if self.alone:
            return values[0]
        own: list[Any] = [None]
        with self.naming_failures():
            dist.scatter_object_list(own, list(values) if self.first else None, src=0)
        found: T = own[0]
        return found

    def each(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank and returns its result; any rank's error is raised on all, as an AutoparError."""
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:  # the others would wait for this rank
            own = error
        problems = self.everyones(None if own is None else f"{type(own).__name__}: {own}")
        if isinstance(own, AutoparError):
            raise own
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise AutoparError(f"{self.doing} failed on rank {rank}. {problem}") from own
        return result

    def first_alone(self, work: Callable[[], object]) -> None:
        """Runs `work` on the first rank, while the others wait."""
        self.each(lambda: work() if self.first else None)

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Turns exceptions of collectives and of torch.distributed.checkpoint into autopar's errors."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                yield
        except CheckpointException as error:  # known to all ranks
            rank, (cause, _) = min(error.failures.items())
            raise AutoparError(f"{self.doing} failed on rank {rank}. {type(cause).__name__}: {cause}") from cause
        except RuntimeError as error:
            if self.alone:
                raise
            raise self._peer_error(error) from error

    def _peer_error(self, error: RuntimeError) -> PeerError:
        reason = first_line(error)
        assert dist.group.WORLD is not None
        return PeerError(
            f"{self.doing} broke on rank {dist.get_rank()}: another rank died, hangs, or does something "
            f"else. Its own error is in its own log. ({reason})",
            collective="gather",
            group=group_name(dist.group.WORLD),
        )
