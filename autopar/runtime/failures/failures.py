"""Reports failures of ranks: one message of at most a screen, and a file with every traceback.

torchrun gives every rank the path of a file for its error, and shows in its summary what the file holds. Left alone,
each rank prints hundreds of lines of frames of autopar and torch, and the summary names exit codes.

[Note: who speaks] Where one rank fails, all do: the others lose a peer. The lowest rank that knows the cause prints
it. A rank that only lost a peer knows none, and prints its error where no other rank reports a cause; it then names
the ranks that report nothing, which were killed or hang. Ranks report through the store that torchrun holds, which
outlives them. torchrun ends all ranks by SIGTERM when the first has ended; a rank that is about to report finishes
that first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.capture.remedies import remedy_of_operands
from autopar.errors import AutoparError, PeerError, first_line

_MAIN = threading.main_thread()
_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for a rank's error
_INTERNAL = (Path(__file__).resolve().parents[2], Path(torch.__file__).parent)
_STANDARD_LIBRARY = Path(contextlib.__file__).parent
_PATIENCE_SECONDS = 1.0  # from an error, or torchrun's signal, to the others' reports
_LONG_PATIENCE_SECONDS = 10.0  # of a rank that knows no cause, as long as torchrun misses no rank
_LINES, _COLUMNS = 16, 160  # of a message; the rest is in the file
# Beginnings of the lines that Dynamo adds to any error.
_DYNAMOS = (
    "Hint: Your code may result in an error when running in eager",
    "Developer debug context:",
    "For more details about this graph break",
    "Set TORCHDYNAMO_VERBOSE=1",
)
# Texts of the errors of torch's collectives where a peer is lost; Gloo raises them as plain RuntimeErrors.
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


# Sizes of a part and of the whole that a script was given, and what an error that names both may come from.
_PARTS: dict[tuple[int, int], str] = {}


def blame_parts(part: int, whole: int, words: str) -> None:
    """Has an error that ends this rank, and names both sizes, shown with `words`: a script has mixed part and whole."""
    _PARTS[part, whole] = words


def show_failures() -> None:
    """Under torchrun, has an error that ends this rank shown on one screen. More calls change nothing."""
    if _FILE in os.environ and not isinstance(sys.excepthook, _Shown):
        sys.excepthook = _Shown()


def show_failure(error: BaseException) -> None:
    """Under torchrun, shows an error of this rank as `show_failures` does, for a caller that ends the rank itself."""
    _Shown()(type(error), error, error.__traceback__)


class _Shown:
    """The hook for errors that nobody catches."""

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _finishing() as received:
            path = Path(os.environ[_FILE])
            whole = path.with_suffix(".traceback.txt")
            whole.write_text("".join(traceback.format_exception(kind, error, trace)))
            if _lost_peer(error) and (record := _torch.flight_record()):
                flight = path.with_suffix(".flight_recorder.json")
                flight.write_bytes(record)
                error.add_note(f"flight recorder: {flight}")
            reports = _Reports.of_this_run()
            knows = not _lost_peer(error)
            headline = first_line(_headline(error))[:_COLUMNS]
            others = reports.exchange(received, knows=knows, headline=headline)
            speaker = reports.settled(_speaker(others), knows=knows)
            if speaks := speaker == reports.rank:
                text = "\n".join([*screen(error), *_silent(others, knows), f"  all frames: {whole}"])
                sys.stderr.write(f"[rank {reports.rank}] {text}\n")
                sys.stderr.flush()
            is_same = not speaks and reports.headline(speaker) == headline
            if is_same:  # in full, for a launcher that ends the other rank before it has written its own
                text = "\n".join([*screen(error), f"  as on rank {speaker}; all frames: {whole}"])
            elif not speaks:
                text = f"{headline} (see rank {speaker} for more; all frames: {whole})"
            if not isinstance(error, KeyboardInterrupt):
                _record(path, text, follows=not (knows and speaks), same_as=speaker if is_same else None)


def screen(error: BaseException) -> list[str]:
    """The paragraphs that people need of an error: its type and message, its notes, the frames of their own code."""
    notes = [textwrap.indent(str(note), "  ") for note in getattr(error, "__notes__", ())]
    remedy = remedy_of_operands(error)
    if remedy is not None:
        notes.append(f"  remedy: {remedy}")
    if _waited_in_gather(error):
        notes.append(
            "  remedy: a tensor in shards is gathered in the line below, for which all ranks have to come to it: call "
            "it on every rank, not under `if rank == 0`."
        )
    if not isinstance(error, AutoparError):
        sizes = {int(n) for n in re.findall(r"\b\d{1,12}\b", str(error))}
        notes += [f"  remedy: {words}" for (part, whole), words in _PARTS.items() if {part, whole} <= sizes]
    return [_headline(error), *notes, *_frames(error)]


def _headline(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return (
            "Interrupted (Ctrl-C). To go on from the last autopar.checkpoint.save_checkpoint, start again and "
            "call load_checkpoint before the first step."
        )
    lines = [
        line
        for line in f"{type(error).__name__}: {error}".splitlines()
        if line.strip() and not line.strip().startswith(_DYNAMOS)
    ]
    kept = [textwrap.shorten(line, 4 * _COLUMNS) if len(line) > 4 * _COLUMNS else line for line in lines]
    return "\n".join(kept[:_LINES] + ["  ..."] * (len(kept) > _LINES))


def _frames(error: BaseException) -> list[str]:
    """The lines of the person's own code that led to an error, innermost last."""
    own = [
        f"  at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not _is_internal(Path(frame.filename))
        and not (frame.line or "").startswith("def ")  # code that Dynamo made of a function
    ]
    return own[-3:]


def _is_internal(file: Path) -> bool:
    """Whether a file is of autopar, torch or the standard library."""
    if any(file.is_relative_to(folder) for folder in _INTERNAL):
        return True
    return file.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in file.parts


def _lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that a collective or a wait failed because of another rank."""
    return isinstance(error, (PeerError, dist.DistError)) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, AutoparError)
        and any(text in str(error) for text in _LOST_PEER)
    )


def _waited_in_gather(error: BaseException) -> bool:
    """Whether a rank waited in vain for others to redistribute a DTensor."""
    frames = traceback.extract_tb(error.__traceback__)
    is_lost = _lost_peer(error) or "timeout" in str(error).lower()
    return is_lost and any(frame.filename.endswith("distributed/tensor/_redistribute.py") for frame in frames)


def _speaker(reports: Mapping[int, bool]) -> int:
    """The rank that prints, of ranks that report whether they know the cause."""
    return min(reports, key=lambda rank: (not reports[rank], rank))


def _silent(reports: Mapping[int, bool], knows: bool) -> list[str]:
    """A line on the ranks that report no error, where no rank knows the cause."""
    missing = sorted(set(range(int(os.environ.get("WORLD_SIZE", "1")))) - set(reports))
    if knows or not missing:
        return []
    ranks = f"rank {missing[0]} reports" if len(missing) == 1 else f"ranks {missing[:8]} report"
    return [
        f"  {ranks} no error: killed (by the kernel, if memory ran out: see dmesg), or hanging. torchrun's summary "
        "below names the signal. Lower the memory of a rank (memory_bytes=, recompute=, recipe='zero3'), and go on "
        "from the last checkpoint."
    ]


class _Reports:
    """Reports of the failing ranks, exchanged through the store of torchrun.

    Args:
        rank: this rank.
        size: number of ranks.
        store: the store; None where there is none, so that each rank is the only one to report.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None) -> None:
        self.rank, self._size, self._store = rank, size, store

    @classmethod
    def of_this_run(cls) -> _Reports:
        """The reports of the ranks that torchrun has started at this attempt."""
        env = os.environ
        rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        if size == 1 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return cls(rank, size, None)
        try:
            store = dist.TCPStore(
                env["MASTER_ADDR"],
                int(env["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_PATIENCE_SECONDS),
            )
        except (RuntimeError, dist.DistError):  # torchrun has ended
            return cls(rank, size, None)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, dist.PrefixStore(f"autopar/failures/{attempt}", store))

    def exchange(self, received: Sequence[int] = (), *, knows: bool, headline: str = "") -> dict[int, bool]:
        """Reports whether this rank knows the cause; gives what is known of the others.

        A rank that knows waits for the ranks below it alone, and for a short time. Reports are numbered as they come,
        so that a look is for one key, the next one's, however many ranks there are.

        Args:
            received: signals so far; more may come.
            knows: whether this rank knows the cause.
            headline: first line of this rank's error.
        """
        found = {self.rank: knows}
        if self._store is None:
            return found
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store has died with its host
            self._store.set(str(self.rank), f"{int(knows)}{headline}")
            self._store.set(f"report/{self._store.add('reports', 1)}", f"{self.rank} {int(knows)}")
            awaited, heard = set(range(self.rank if knows else self._size)), 0
            deadline = time.monotonic() + (_PATIENCE_SECONDS if knows else _LONG_PATIENCE_SECONDS)
            while time.monotonic() < deadline:
                while self._store.check([f"report/{heard + 1}"]):
                    heard += 1
                    rank, its = map(int, self._store.get(f"report/{heard}").split())
                    found[rank] = bool(its)
                if any(found.values()) and not knows:
                    break
                if _speaker(found) < self.rank or awaited <= found.keys():
                    break
                if received:
                    deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
                    received = ()
                time.sleep(0.02)
        return found

    def headline(self, rank: int) -> str:
        """The first line of a rank's error; "" if that rank has reported none."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._store is not None and self._store.check([str(rank)]):
                return self._store.get(str(rank)).decode()[1:]
        return ""

    def settled(self, speaker: int, *, knows: bool) -> int:
        """The rank that prints the report: the first chosen rank that registers in the store."""
        if self._store is None or speaker != self.rank:
            return speaker
        with contextlib.suppress(RuntimeError, dist.DistError):
            return int(self._store.compare_set(f"speaker/{int(knows)}", "", str(self.rank)))
        return speaker


@contextlib.contextmanager
def _finishing() -> Iterator[list[int]]:
    """Context that delays SIGTERM and SIGINT until the report is written; yields the delayed signals.

    A handler that was not installed from Python stays, since Python could not bring it back.
    """
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    for each in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(each) is not None:
            before[each] = signal.signal(each, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if received:
            os.kill(os.getpid(), received[0])


@contextlib.contextmanager
def told_to_end() -> Iterator[list[int]]:
    """Context in which torchrun's SIGTERM is noted and does not end the process; yields the signals so far.

    For a wait that another rank's death makes vain: torchrun ends those who wait before they know of it, and without
    this they would end without a word. Whoever waits in vain has to raise an error once a signal has come; where the
    wait ends well in the same moment, the signal ends the process after it. Nothing is changed without torchrun, in
    other threads than the main one, and where somebody else handles the signal.
    """
    received: list[int] = []
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if _FILE not in os.environ or not is_free or threading.current_thread() is not _MAIN:
        yield received
        return
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if received:  # and no error tells of it
        os.kill(os.getpid(), signal.SIGTERM)


def _record(path: Path, text: str, *, follows: bool, same_as: int | None = None) -> None:
    """Writes a rank's text to the file that torchrun reads.

    Args:
        path: the file.
        text: the text for torchrun's summary.
        follows: whether another rank has the cause, or prints it. torchrun takes the earliest error for the root
            cause, in whole seconds, so that such an error is dated a second later.
        same_as: the rank that prints the same error; None if no rank does.
    """
    when = int(time.time()) + follows
    message = {"message": text, "same_as": same_as, "extraInfo": {"timestamp": str(when)}}
    path.write_text(json.dumps({"message": message}))
