"""Runs parts one after the other, each in a process of its own with its own time limit.

A part writes its result after every finding, in one move: what was found before it ended, by itself or not,
is kept. A result that is done for the same code, device and scope is not measured again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.calibrate.ranks import follow_parent
from benchmarks.accelerator.figures import Result
from benchmarks.accelerator.parts import Context, Part
from benchmarks.stored import write_whole
from tests.runtime.gloo_ranks import CONTEXT


@dataclass(frozen=True)
class Run:
    """One call of the command.

    Attributes:
        context: what the parts measure on.
        seconds: time for all parts.
        identity: what results depend on; a result of another identity is measured again.
    """

    context: Context
    seconds: float
    identity: dict[str, str]

    def path(self, part: Part) -> Path:
        """The file with a part's result."""
        return self.context.folder / f"{part.name}.json"

    def known(self, part: Part) -> Result | None:
        """The part's result so far, of this identity; None where there is none."""
        path = self.path(part)
        if not path.exists():
            return None
        found = Result.from_json(json.loads(path.read_text()))
        return found if found.run == self.identity else None


def run_parts(run: Run, parts: Sequence[Part], begin: Callable[[Part], None]) -> list[Result]:
    """The results of parts, measured unless they are done.

    Args:
        run: the call of the command.
        parts: the parts to run, in this order.
        begin: called with every part before it runs or is passed over.
    """
    end, found = time.monotonic() + run.seconds, list[Result]()
    for number, part in enumerate(parts):
        begin(part)
        known = run.known(part)
        if known is not None and known.state == "done":
            found.append(known)
            continue
        share = part.share / sum(each.share for each in parts[number:])
        found.append(measured(run, part, share * (end - time.monotonic())))
    return found


def measured(run: Run, part: Part, limit_seconds: float) -> Result:
    """The result of a part that runs now, and is ended after so many seconds."""
    # Forks of a server that has imported torch start sooner, but a fork cannot use an accelerator's context.
    context = multiprocessing.get_context("spawn") if run.context.on_accelerator else CONTEXT
    start = time.monotonic()
    _store(run, part, Result(part.name, run.identity))
    process = context.Process(target=_work, args=(run, part))
    process.start()
    try:
        process.join(limit_seconds)
        is_late = process.is_alive()
    finally:
        process.kill()
        process.join()
    found = run.known(part)
    assert found is not None, "it was stored before the process began"
    if found.state == "running":
        found.seconds = time.monotonic() - start
        found.state = "late" if is_late else "died"
        found.why = f"took over {limit_seconds:.0f} s" if is_late else f"ended with code {process.exitcode}"
        _store(run, part, found)
    return found


def _work(run: Run, part: Part) -> None:
    """The life of a part's process, which ends with the one that started it."""
    threading.Thread(target=follow_parent, daemon=True).start()
    _log_to(run.path(part).with_suffix(".log"))
    result, start = Result(part.name, run.identity), time.monotonic()
    try:
        for found in part.run(run.context):
            result.add(found)
            _note_time(result, start)
            _store(run, part, result)
        result.state = "done"
    except Exception:
        result.state, result.why = "raised", traceback.format_exc(limit=-6)
    _note_time(result, start)
    _store(run, part, result)
    os._exit(0)  # without waiting for threads of a library


def _log_to(path: Path) -> None:
    """Sends what libraries print to a file, so that the screen keeps the progress bar."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):  # standard output and standard error
        os.dup2(file, stream)


def _note_time(result: Result, start: float) -> None:
    result.seconds = time.monotonic() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result.processor_seconds = sum(each.ru_utime + each.ru_stime for each in used)


def _store(run: Run, part: Part, result: Result) -> None:
    write_whole(result.to_json(), run.path(part))
