"""The collective that each rank called last, in a file that outlives the rank.

[Note: trails] A rank that is killed says nothing: by the kernel, where memory ran out, or by NCCL's watchdog, which
ends a process before Python hears of a lost peer. So under `autopar run` every rank notes which collective it begins or
waits for, in a file that is mapped into its memory: that takes the host two microseconds, and the kernel keeps what a
dead process wrote. After all ranks have ended, `autopar run` reads the files. Of ranks that run alike, those with the
fewest calls are those that the others waited for.
"""

from __future__ import annotations

import functools
import linecache
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

from autopar.ops.generated import GENERATED, graph_of, node_of_line, op_words

FOLDER = "AUTOPAR_TRAILS"  # environment variable that names the folder of the files
_BYTES = 1024  # of a file
_DEPTH = 16  # frames between a collective and the graph that asks for it, at most


class Trail:
    """What this rank notes.

    Args:
        path: the rank's file.

    Attributes:
        step: number of the step.
        axes: c10d name of a group -> name of its axis.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._count = 0
        self._ops: WeakKeyDictionary[CodeType, dict[int, str]] = WeakKeyDictionary()
        self.step = 0
        self.axes: dict[str, str] = {}

    def note(self, collective: str, group: str) -> None:
        """Notes that a collective on the group of this c10d name begins now, or is waited for."""
        self._count += 1
        op = self._running_op(sys._getframe(1))
        place = f"{collective} over axis {self.axes[group]}" if group in self.axes else collective
        text = f"{self._count} in step {self.step}, {place}{op}\0".encode()[:_BYTES]
        self._memory[: len(text)] = text

    def _running_op(self, frame: FrameType | None) -> str:
        """The op that the graph runs now, in words; "" outside of a graph, as in backward."""
        for _ in range(_DEPTH):
            if frame is None:
                break
            if frame.f_code.co_filename.startswith(GENERATED):
                known = self._ops.setdefault(frame.f_code, {})
                if frame.f_lineno not in known:
                    known[frame.f_lineno] = _op_of(frame)
                return known[frame.f_lineno]
            frame = frame.f_back
        return ""


def _op_of(frame: FrameType) -> str:
    graph = graph_of(frame)
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    node = None if graph is None else node_of_line(graph, text)
    return "" if node is None else f", for {op_words(node)}"


@functools.cache
def trail() -> Trail | None:
    """The trail of this rank; None where nobody will read it."""
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    return Trail(Path(folder) / f"rank-{rank}") if folder and rank and Path(folder).is_dir() else None


def name_axes(axes: Mapping[str, str]) -> None:
    """Has groups called by their axes: c10d name of a group -> name of the axis."""
    if (own := trail()) is not None:
        own.axes.update(axes)


def begin_step(number: int) -> None:
    """Notes the step of the collectives that follow."""
    if (own := trail()) is not None:
        own.step = number


def last_collectives(folder: Path) -> Iterator[str]:
    """A line for all ranks whose last call of a collective is the same; those that the others waited for come first."""
    ends: dict[str, list[int]] = {}
    for path in folder.glob("rank-*"):
        text = path.read_bytes().partition(b"\0")[0].decode(errors="replace")
        ends.setdefault(text, []).append(int(path.name.removeprefix("rank-")))
    for text, ranks in sorted(ends.items(), key=lambda item: int(item[0].partition(" ")[0] or "0")):
        said = f"the last call of a collective was {text}" if text else "no collective was called"
        yield f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}: {said}"
