"""The checkpoints of a training loop: the last ones, written while it goes on, and found again when it restarts.

    runs/1/step-00000200/             complete, of step 200, as save_checkpoint writes it
    runs/1/step-00000300/             the next one
    runs/1/step-00000400.partial/     being written, or left by a run that ended then
    runs/1/step-00000400.damaged/     found damaged at a restart, and set aside

[Note: the loop's own state] Besides model and optimizer a checkpoint has, for every rank, the states of its random
generators and the position of its data loader. With as many ranks each gets its own back. With others a rank gets the
generators of one of them, and the loader's position, which must have been the same on all.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.background_save import BackgroundSave
from autopar.runtime.checkpoint.checkpoint_loading import load
from autopar.runtime.checkpoint.checkpoint_saving import Host, Save, collect, compare_replicas, progress
from autopar.runtime.formats.checkpoint_folder import (
    OtherVersionError,
    beside,
    check_bytes,
    located,
    opened,
    own_files,
    remove,
)
from autopar.runtime.ranks.all_ranks import AllRanks, warn_together
from autopar.runtime.ranks.seeds import random_states, set_random_states

_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(\.previous)?")


class ResumableLoader(Protocol):
    """A data loader that can go on in the middle of an epoch, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""


@dataclass(frozen=True)
class LastCheckpoint:
    """The checkpoint that a loop goes on from.

    Attributes:
        step: number of steps made; 0 where there is no checkpoint yet.
        extra: extra values that were saved with it, their tensors on the CPU.
        path: folder of the checkpoint; None where there is none yet.
    """

    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


class Checkpoints:
    """The checkpoints of a training loop in one folder, of which the last ones are kept.

    All ranks make one, and all call its methods. A save copies what it needs to the host and returns; files are
    written in a thread, and the checkpoint counts once all ranks have written theirs. The next save, `load_last` and
    `finish` wait for it, and raise what went wrong. A save that is cut short leaves the checkpoints before it.

    Args:
        folder: a folder for the checkpoints of this run, which all ranks see.
        keep: number of complete checkpoints kept; the disk holds one more while a save is written.
        background: whether files are written while training goes on, which takes host memory for a copy of what this
            rank writes.
        timeout_seconds: seconds that the first rank waits for the files of the other ranks.

    Raises AutoparError for `keep` below one.

    >>> import autopar, tempfile, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with autopar.checkpoint.Checkpoints(folder, keep=2) as checkpoints:
    ...         first = checkpoints.load_last(model, optimizer).step
    ...         for step in range(first, 3):
    ...             checkpoints.save(step + 1, model, optimizer, rate=0.1)
    ...         last = checkpoints.load_last(model, optimizer)
    >>> first, last.step, last.extra
    (0, 3, {'rate': 0.1})
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, background: bool = True, timeout_seconds: float = 1800.0
    ) -> None:
        if keep < 1:
            raise AutoparError(
                f"keep={keep}: give the number of checkpoints to keep, 1 or more; with 2, a damaged one costs only the "
                "steps since the one before it."
            )
        self._folder, self._keep = Path(folder).resolve(), keep
        self._background, self._timeout_seconds = background, timeout_seconds
        self._pending: BackgroundSave | None = None
        self._host: Host = {}

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        loader: ResumableLoader | None = None,
        **extra: Any,
    ) -> None:
        """Saves the state after `step` steps: model, optimizer, random generators, the loader's position.

        Args:
            step: number of steps made so far; a checkpoint of the same step is replaced.
            model: a compiled module that has its plan, or any module.
            optimizer: optimizer of the model's parameters; None to save the model alone.
            loader: the data loader, whose position is saved.
            extra: small values to have back, as for `save_checkpoint`; those of the first rank are kept.

        Raises AutoparError on every rank for what cannot be saved, and for a save before this one that failed;
        PlanError for a compiled module without a plan; PeerError if another rank died or hangs.
        """
        self.finish()
        folder = self._folder / f"step-{step:08d}"
        if not _NAME.fullmatch(folder.name):
            raise AutoparError(f"step={step!r}: give the number of steps made so far, which is not negative.")
        ranks, model = AllRanks(f"Saving {folder}"), _torch.uncompiled(model)
        compare_replicas(model)

        def own() -> Any:
            tensors, notes = collect(model, optimizer, extra, with_model=True)
            return tensors, {**notes, "step": step, "loops": [_loop_state(loader)]}

        tensors, notes = ranks.each(own)
        ranks.first_alone(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        save = Save.begin(ranks, folder, tensors, notes)
        if self._background:
            ranks.each(lambda: save.stage(self._host))
        on_host = all(tensor.device.type == "cpu" for tensor in tensors.values())
        self._pending = BackgroundSave(ranks, save, self._prune, self._timeout_seconds, on_host=on_host)
        if not self._background:
            self.finish()

    def load_last(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, loader: ResumableLoader | None = None
    ) -> LastCheckpoint:
        """Loads the newest checkpoint that is whole, under this plan or another; does nothing where there is none.

        A newer one that is damaged is set aside with a warning.

        Args:
            model: a compiled module that has its plan, or any module.
            optimizer: optimizer of the model's parameters, if one was saved.
            loader: the data loader, which goes on from its saved position.

        Returns:
            The number of steps made and the extra values.

        Raises AutoparError on every rank where all checkpoints are damaged, for one of another model, and for a loader
        whose positions differed among other ranks; PlanError for a compiled module without a plan; PeerError if
        another rank died or hangs.
        """
        self.finish()
        model = _torch.uncompiled(model)
        progress(model)  # refuses a module without a plan at the first start, too, and not only after a crash
        ranks = AllRanks(f"Looking for checkpoints in {self._folder}")
        folder = self._newest_whole(ranks)
        if folder is None:
            return LastCheckpoint()
        notes = load(folder, model, optimizer, checked=True)
        ranks.each(lambda: _restore_loop(folder, notes["loops"], ranks, loader))
        return LastCheckpoint(notes["step"], notes["extra"], folder)

    def finish(self) -> None:
        """Waits for the save that is being written, if any; every rank calls it.

        Raises AutoparError on every rank if it failed on any; PeerError if another rank died or hangs.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    @property
    def is_saving(self) -> bool:
        """Whether this rank still has a save to write; another rank may be done sooner."""
        return self._pending is not None and self._pending.is_alive

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else other ranks may not come to wait; the thread ends by itself
            self.finish()

    # --- the folder

    def _newest_whole(self, ranks: AllRanks) -> Path | None:
        """The newest checkpoint in which no rank finds damage; newer ones, which are damaged, are set aside.

        Where all are damaged nothing is set aside, so that every later start says so too.
        """
        candidates = ranks.each(lambda: _found(self._folder) if ranks.first else [])
        candidates = ranks.everyones(candidates)[0]
        damages: dict[Path, str] = {}
        for folder in candidates:
            own = ranks.each(partial(_damage, folder, ranks))
            problems = [x for x in ranks.everyones(own) if x]
            if not problems:
                _set_all_aside(damages, ranks)
                return folder
            damages[folder] = problems[0]
        if damages:
            newest = next(iter(damages.values()))
            raise AutoparError(
                f"Every checkpoint in {self._folder} is damaged. The newest: {newest} Copy one from elsewhere, or give "
                "another folder to start from the beginning."
            )
        return None

    def _prune(self) -> None:
        """Deletes checkpoints but for the newest."""
        for folder in _found(self._folder)[self._keep :]:
            for each in (folder, beside(folder, "previous")):
                remove(each)
        for left in self._folder.glob("step-*.partial"):
            remove(left)


def _found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; other programs call their folders so, too."""
    if not folder.is_dir():
        return []
    names = [match for each in folder.iterdir() if (match := _NAME.fullmatch(each.name)) and own_files(each)]
    steps = sorted({int(match[1]) for match in names}, reverse=True)
    return [folder / f"step-{step:08d}" for step in steps]


def _set_all_aside(damages: Mapping[Path, str], ranks: AllRanks) -> None:
    for folder, problem in damages.items():
        aside = _free_beside(folder).name
        ranks.first_alone(partial(_set_aside, folder))
        warn_together(f"{problem} It is set aside as {aside}, and the checkpoint before it is tried.", stacklevel=4)


def _damage(folder: Path, ranks: AllRanks) -> str:
    """The problem that this rank finds with a checkpoint; "" if it finds none.

    Raises OtherVersionError for one of another version, which is not damaged.
    """
    try:
        place = located(folder)
        notes, saved = opened(place)
        check_bytes(place, notes, ranks.share(sorted(saved)))
    except OtherVersionError:
        raise
    except AutoparError as error:
        return str(error)
    return ""


def _free_beside(folder: Path) -> Path:
    """The first of `<folder>.damaged`, `<folder>.damaged-2` and so on that is not there."""
    names = ("damaged", *(f"damaged-{number}" for number in range(2, 1000)))
    return next(path for name in names if not (path := beside(folder, name)).exists())


def _set_aside(folder: Path) -> None:
    """Renames a damaged checkpoint, so that it is not taken for one, and can be looked at."""
    for each in (folder, beside(folder, "previous")):
        if each.exists():
            each.rename(_free_beside(folder))


# --- the loop's own state


def _loop_state(loader: ResumableLoader | None) -> dict[str, Any]:
    """This rank's generators and the position of its loader."""
    return {"random": random_states(), "loader": None if loader is None else loader.state_dict()}


def _restore_loop(
    folder: Path, loops: Sequence[Mapping[str, Any]], ranks: AllRanks, loader: ResumableLoader | None
) -> None:
    """Restores what `_loop_state` gave, see [Note: the loop's own state]."""
    if loader is not None:
        positions = [loop["loader"] for loop in loops]
        loader.load_state_dict(_position(folder, positions, ranks))
    set_random_states(loops[ranks.rank % len(loops)]["random"])


def _position(folder: Path, positions: Sequence[Any], ranks: AllRanks) -> dict[str, Any]:
    """The saved position for this rank's loader."""
    position: dict[str, Any] | None = positions[ranks.rank % len(positions)]
    if position is None:
        raise AutoparError(f"{folder} was saved without a loader; load it without one.")
    if len(positions) != ranks.count and len(set(map(_packed, positions))) > 1:
        raise AutoparError(
            f"{folder} was saved by {len(positions)} ranks whose loaders were at different positions, but "
            f"{ranks.count} ranks run here. Give all ranks the same batches (batch='global'), or load it without a "
            "loader and set its position yourself."
        )
    return position


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
