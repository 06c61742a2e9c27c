"""`autopar run`: a training script on all ranks of one machine, started again when a rank dies."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as torchrun

from autopar.cli.options import POSITIVE, Count, Real
from autopar.errors import CaptureError, LayoutError, MeshError, NoLossError, PlanError, RecipeError, SearchError
from autopar.ops.trail import FOLDER, last_collectives
from autopar.runtime.ranks.launch import (
    check_ranks,
    first_failure,
    has_message,
    is_repeated,
    message_of,
    threads_of_a_rank,
)
from autopar.units import printable


class Life(NamedTuple):
    """An attempt that failed.

    Attributes:
        error: error of the script in one line; "" where a rank was killed.
        seconds: duration of the attempt.
    """

    error: str
    seconds: float


@dataclass(frozen=True)
class Restarts:
    """When a run that failed is started again, and on how many ranks.

    [Note: which failures are worth a restart] torchrun's agent ends all ranks when one fails, and every attempt has an
    agent of its own. A number of ranks has `most` restarts; then the run goes on with one less. An attempt that lasted
    long has them all back, so that a run of weeks survives more deaths than one that fails whenever it starts. An
    error of the script that comes twice in a row is no accident, and ends the attempts on that number of ranks; so does
    an error in what the script asks of a plan, at its first time. The same error on two numbers of ranks ends the run.
    A rank that was killed has no error.

    Attributes:
        ranks: number of ranks at first.
        most: number of restarts on each number of ranks.
        least: lowest number of ranks to go on with.
        good_seconds: duration of an attempt that gives the restarts back.
    """

    ranks: int
    most: int
    least: int
    good_seconds: float = math.inf

    def attempts(self, lives: list[Life]) -> Iterator[int]:
        """The number of ranks of each attempt.

        Args:
            lives: the attempts so far, which grow meanwhile.

        >>> lives = []
        >>> for ranks in Restarts(ranks=4, most=1, least=2).attempts(lives):
        ...     print(ranks)
        ...     lives.append(Life(error="", seconds=5.0))
        4
        4
        3
        3
        2
        2
        """
        for ranks in range(self.ranks, self.least - 1, -1):
            first, left = len(lives), self.most + 1
            while left and not _stays(lives[first:]):
                yield ranks
                left = self.most if lives[-1].seconds >= self.good_seconds else left - 1
            if first and lives[-1].error and lives[-1].error == lives[first - 1].error:
                return  # of one rank less it would be the same again


# Errors in what a script asks of a plan, which it will ask again.
_ASKED = (MeshError, LayoutError, CaptureError, PlanError, RecipeError, SearchError, NoLossError)


def _stays(lives: Sequence[Life]) -> bool:
    """Whether another attempt would end with the same error, as the last two did, or the last one's kind says."""
    errors = [life.error for life in lives[-2:]]
    is_repeated = len(errors) == 2 and bool(errors[0]) and errors[0] == errors[1]
    asked = {kind.__name__ for kind in _ASKED}
    return is_repeated or (bool(errors) and errors[-1].partition(":")[0] in asked)


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True},
    help="""Run SCRIPT on several ranks of this machine, as `torchrun --standalone` does, at a free port.

Arguments after SCRIPT are passed to it. When a rank dies, all ranks are started again, and a script that saves with
autopar.checkpoint.Checkpoints goes on from its last checkpoint. With --min-ranks it goes on with one rank less when the
restarts are used up; with --max-restarts 0, at once. After an attempt of ten minutes or more, the count of restarts
begins again. The attempts on a number of ranks end when the script raises the same error twice in a row, or an error
about its options, such as a recipe that does not exist; all end when one rank less ends with the same error. For
several machines use torchrun itself.

\b
Examples:
  autopar run train.py --ranks 4
  autopar run train.py --ranks 4 --min-ranks 2
  autopar run --ranks 2 examples/train_gpt.py --steps 100""",
)
@click.option("--ranks", type=POSITIVE, metavar="N", help="Number of processes; by default one for each accelerator.")
@click.option(
    "--max-restarts",
    type=Count(least=0),
    default=3,
    metavar="K",
    show_default=True,
    help="Number of restarts before the number of ranks is lowered.",
)
@click.option(
    "--restore-minutes",
    type=Real(min=0),
    default=10.0,
    metavar="M",
    show_default=True,
    help="After an attempt of this many minutes the count of restarts begins again.",
)
@click.option("--min-ranks", type=POSITIVE, metavar="M", help="Lowest number of ranks to go on with; by default N.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    ranks: int | None,
    max_restarts: int,
    restore_minutes: float,
    min_ranks: int | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    count = ranks or torch.accelerator.device_count()
    if not count:
        raise MeshError("There is no accelerator here: say how many processes share the CPUs, such as --ranks 4.")
    if min_ranks is not None and min_ranks > count:
        raise MeshError(f"--min-ranks {min_ranks} is more than the {count} ranks to begin with.")
    check_ranks(count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(count)))
    lives: list[Life] = []
    restarts = Restarts(count, max_restarts, min_ranks or count, 60 * restore_minutes)
    for now in restarts.attempts(lives):
        if lives:
            _say(f"{script} starts again on {now} of {count} ranks.")
        begin_seconds = time.monotonic()
        error = _failure(now, script, arguments)
        if error is None:
            return
        lives.append(Life(error, time.monotonic() - begin_seconds))
    sys.exit(1)


def _failure(ranks: int, script: Path, arguments: tuple[str, ...]) -> str | None:
    """Runs a script once. None if it ended well, else its error in one line, "" where a rank was killed."""
    words = ["--standalone", "--nproc-per-node", str(ranks), str(script)]
    options = get_args_parser().parse_args(words)
    # Not parsed with the others: torchrun takes an option of the script for its own if it begins like one of these.
    options.training_script_args = list(arguments)
    with tempfile.TemporaryDirectory(prefix="autopar-run-") as folder:
        os.environ[FOLDER] = folder
        try:
            torchrun(options)
        except SignalException as signaled:  # by Ctrl-C or a scheduler; torchrun has ended the ranks
            _say(f"ended by {signaled.sigval.name}.")
            sys.exit(128 + signaled.sigval)
        except ChildFailedError as error:
            for line in _summary(error):
                _say(f"{script.name} failed on {line}")
            _, first = first_failure(error)
            if not _is_killed(first):
                return _cause(first)
            for line in last_collectives(Path(folder)):
                _say(line)
            return ""
    return None


def _say(line: str) -> None:
    """Prints a line, whose names may be those of modules."""
    click.echo(printable(f"autopar run: {line}"), err=True)


def _summary(error: ChildFailedError) -> Iterator[str]:
    """A line for the rank that failed first, and for each that failed by something else.

    A rank whose error another rank has printed has no line, and neither has one that torchrun ended because of others.
    """
    first, _ = first_failure(error)
    for rank, failure in sorted(error.failures.items(), key=lambda item: (item[0] != first, item[0])):
        is_ended = _is_killed(failure) and failure.exitcode == -signal.SIGTERM
        if rank == first or not (is_repeated(failure) or is_ended):
            yield f"rank {rank}: {_cause(failure)}"


def _is_killed(failure: ProcessFailure) -> bool:
    """Whether a signal ended a rank before it could report an error."""
    return failure.exitcode < 0 and not has_message(failure)


def _cause(failure: ProcessFailure) -> str:
    """The first line of a rank's error, or what ended a rank that reported none."""
    if _is_killed(failure):
        return f"killed by {failure.signal_name()}"
    if not has_message(failure):
        return f"exit code {failure.exitcode}"
    return message_of(failure.message).partition("\n")[0]
