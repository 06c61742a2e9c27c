"""What happens to one rank: it is killed at a random moment, or cannot write."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp

from autopar.runtime.checkpoint.checkpoint_saving import Save

Place = Literal["in a step", "in a collective", "saving", "loading", "full disk", "truncated file"]
_STRAGGLE_SECONDS = 0.4  # that another rank is late, while the victim waits for it in a collective
_STEP_SECONDS = 0.02  # about the time of a step


@dataclass(frozen=True)
class Accident:
    """An accident of one rank in one attempt.

    Attributes:
        place: where it happens; of a truncated file, how the attempt before it ends ("in a step").
        signal: name of the signal; of a full disk, none is sent.
        victim: rank that it happens to.
        ranks: number of ranks.
        step: step in which, or after which, it happens.
        moment: number from 0 to 1, drawn evenly; where within the step or the save.
    """

    place: Place
    signal: str
    victim: int
    ranks: int
    step: int
    moment: float

    def die(self) -> None:
        """Sends the signal to this process."""
        os.kill(os.getpid(), getattr(signal, self.signal))
        time.sleep(60)


class Armed:
    """The accident of no rank; subclasses have that of one."""

    def loading(self) -> None:
        """Called before the checkpoint is loaded."""

    def step(self, step: int) -> None:
        """Called before a step."""

    def saving(self, step: int) -> None:
        """Called before a save."""


class _Dies(Armed):
    def __init__(self, accident: Accident) -> None:
        self._accident = accident

    def loading(self) -> None:
        if self._accident.place == "loading":
            dcp.load = self._dying  # type: ignore[assignment]

    def step(self, step: int) -> None:
        accident = self._accident
        if step != accident.step:
            return
        if accident.place == "in a step":
            _after(accident.moment * _STEP_SECONDS, accident.die)
        if accident.place == "in a collective":
            _after(_STRAGGLE_SECONDS / 2, accident.die)

    def saving(self, step: int) -> None:
        accident = self._accident
        if step < accident.step:
            return
        if accident.place == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        if accident.place == "saving":
            self._in_a_save()

    def _in_a_save(self) -> None:
        """Before the file is written, before it is synced, or on the first rank between two renames."""
        points: list[Callable[[], None]] = [self._before_writing, self._before_syncing]
        if self._accident.victim == 0:
            points += [self._before_naming]
        points[int(self._accident.moment * len(points))]()

    def _before_writing(self) -> None:
        Save.write = self._dying  # type: ignore[method-assign]

    def _before_syncing(self) -> None:
        os.fsync = self._dying

    def _before_naming(self) -> None:
        Path.rename = self._dying  # type: ignore[method-assign]

    def _dying(self, *_: Any, **__: Any) -> Any:
        self._accident.die()


class _IsLate(Armed):
    """Lets the victim wait in a collective."""

    def __init__(self, accident: Accident) -> None:
        self._accident = accident

    def step(self, step: int) -> None:
        if step == self._accident.step:
            time.sleep(_STRAGGLE_SECONDS)


def arm(accident: Accident | None, rank: int) -> Armed:
    """What happens to a rank."""
    if accident is None:
        return Armed()
    if rank == accident.victim:
        return _Dies(accident)
    is_late = accident.place == "in a collective" and rank == (accident.victim + 1) % accident.ranks
    return _IsLate(accident) if is_late else Armed()


def _after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
