"""Where things are printed: results on stdout, what is going on on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from autopar.models.importing import staying
from autopar.search.request.request import Progress
from autopar.units import printable
from autopar.views import Page, write_html, write_trace
from autopar.views.terminal import Screen

_QUIET_SECONDS = 5.0  # a command that takes no longer writes nothing but its result


def console() -> Screen:
    """The terminal; a file or a pipe gets wide lines rather than the 80 columns rich assumes."""
    return Screen() if sys.stdout.isatty() else Screen(width=140)


@contextlib.contextmanager
def working() -> Iterator[Progress]:
    """The current activity on stderr: a progress bar on a terminal, elsewhere lines every few seconds.

    A model that ends the program meanwhile is an AutoparError.
    """
    with staying("The model"):
        if not sys.stderr.isatty():
            yield _now_and_then(lambda message: click.echo(f"... {message}", err=True))
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Screen(stderr=True), transient=True) as bar:
            task = bar.add_task("reading the model", total=None)
            yield lambda message: bar.update(task, description=message)


def _now_and_then(show: Progress) -> Progress:
    """The same for a log, which gets the messages of the last `_QUIET_SECONDS` together."""
    last, waiting = time.monotonic(), list[str]()

    def tell(message: str) -> None:
        nonlocal last
        waiting.append(message)
        if time.monotonic() - last >= _QUIET_SECONDS:
            show("\n... ".join(waiting))
            last = time.monotonic()
            waiting.clear()

    return tell


def print_json(document: Mapping[str, Any]) -> None:
    """Prints a document to stdout as indented JSON.

    A command with `--json` prints nothing else there, so that its output can be parsed. Raises ValueError for
    a number that is not finite.
    """
    click.echo(json.dumps(document, indent=1, default=str, allow_nan=False))


def write_files(page: Page, html: Path | None, trace: Path | None) -> None:
    """The report and the trace, where they are wanted."""
    if html is not None:
        write_html(page, html)
        _wrote(html)
    if trace is not None:
        write_trace(page.trace, trace)
        _wrote(trace)


def _wrote(path: Path) -> None:
    click.echo(f"Wrote {printable(str(path))}", err=True)
