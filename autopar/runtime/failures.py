"""What people see when a rank fails: one message of a screen at most, and the whole traceback in a file.

torchrun gives every rank the path of a file for its error, and shows what stands there in its summary. Without
it the summary names exit codes alone, and each rank prints hundreds of lines of frames of autopar and torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError, PeerError

_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for a rank's error
_INTERNAL = (Path(__file__).resolve().parents[1], Path(torch.__file__).parent)


def show_failures() -> None:
    """Under torchrun, says of an error that ends this rank what people need. More calls change nothing."""
    if _FILE in os.environ and not isinstance(sys.excepthook, _Shown):
        sys.excepthook = _Shown(sys.excepthook)


class _Shown:
    """The hook for errors that nobody catches.

    Args:
        before: the hook that was there, which shows errors that are not autopar's.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._before(kind, error, trace)
            return
        if isinstance(error, (AutoparError, PeerError)):
            _show(error)
        else:
            _record(error)
            self._before(kind, error, trace)


def _show(error: BaseException) -> None:
    """Prints an error of autopar's for people, and leaves its traceback in a file."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = Path(os.environ[_FILE]).with_suffix(".traceback.txt")
    whole.write_text("".join(traceback.format_exception(error)))
    lines = [f"{type(error).__name__}: {error}", *_frames(error), f"  all frames: {whole}"]
    _record(RuntimeError("\n".join(lines)))
    if not _is_first_to_say(lines[0]):
        lines = [f"{type(error).__name__}: as another rank says; {lines[-1].strip()}"]
    sys.stderr.write(f"[rank {rank}] " + "\n".join(lines) + "\n")
    sys.stderr.flush()


def _record(error: BaseException) -> None:
    """Writes an error with its traceback to the file that torchrun reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    trace = error.__traceback__
    try:
        raise error
    except BaseException as raised:  # the handler reads the traceback of what is being handled
        get_error_handler().record_exception(raised)
    error.__traceback__ = trace  # without the frame above


def _frames(error: BaseException) -> list[str]:
    """The lines of the person's own code that led to an error, innermost last."""
    own = [
        f"  at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _INTERNAL)
    ]
    return own[-3:]


def _is_first_to_say(text: str) -> bool:
    """Whether no other rank has said the same; true where they cannot be asked."""
    if not dist.is_initialized():
        return True
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    try:
        return bool(_torch.default_store().add(f"autopar/failures/{key}", 1) == 1)
    except RuntimeError:  # the store has died with the rank that held it
        return True
