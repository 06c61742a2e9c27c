"""Scripts that torchrun starts as users start them, and what a user then sees in the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROWS, COLUMNS = 24, 100  # of a terminal's screen
_PATIENCE_SECONDS = 15.0  # from SIGTERM or SIGINT to SIGKILL


@dataclass(frozen=True)
class Screen:
    """The output of a run in the terminal.

    Attributes:
        text: standard output and standard error, in the order in which they were written.
        exit_code: the launcher's exit code; None where the time was over.
        seconds: duration from the start to the launcher's end.
    """

    text: str
    exit_code: int | None
    seconds: float

    @property
    def first(self) -> str:
        """The lines that fit on one screen, longer ones being wrapped."""
        rows, shown = 0, []
        for line in self.text.splitlines():
            rows += max(1, -(-len(line) // COLUMNS))
            if rows > ROWS:
                break
            shown.append(line)
        return "\n".join(shown)


def launch(script: Path, *, ranks: int, timeout_seconds: float, interrupt_at: str | None = None) -> Screen:
    """Runs a script on ranks of this machine by torchrun, at a free port.

    Args:
        script: path of the script; logs of the run are left in its folder.
        ranks: number of processes.
        timeout_seconds: limit after which all processes are ended.
        interrupt_at: text in the output at which the launcher gets the signal of Ctrl-C.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--log-dir",
        str(script.parent / "logs"),
        str(script),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    start = time.monotonic()
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    ended = threading.Event()
    timer = threading.Timer(timeout_seconds, _end, (launcher, ended))
    timer.start()
    try:
        text = _read(launcher, interrupt_at)
    finally:
        timer.cancel()
        _end(launcher, threading.Event())
    code = None if ended.is_set() else launcher.returncode
    return Screen(text, code, time.monotonic() - start)


def _read(launcher: subprocess.Popen[str], interrupt_at: str | None) -> str:
    lines = []
    assert launcher.stdout is not None, "it is a pipe"
    for line in launcher.stdout:
        lines.append(line)
        if interrupt_at is not None and interrupt_at in line:
            interrupt_at = None
            os.killpg(launcher.pid, signal.SIGINT)  # a terminal gives it to the whole group
    return "".join(lines)


def _end(launcher: subprocess.Popen[str], ended: threading.Event) -> None:
    """Ends a launcher that still runs, which ends its ranks."""
    if launcher.poll() is not None:
        return
    ended.set()
    launcher.terminate()
    try:
        launcher.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
