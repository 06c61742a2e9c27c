"""`autopar run`: a training script on all ranks of one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as torchrun

from autopar.cli.options import POSITIVE
from autopar.errors import MeshError
from autopar.runtime.launch import check_ranks, threads_of_a_rank


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True},
    help="""Run SCRIPT on several ranks of this machine, as `torchrun --standalone` does, at a free port.

What follows SCRIPT is given to it. For several machines use torchrun itself.

\b
Examples:
  autopar run train.py --ranks 4
  autopar run --ranks 2 examples/train_gpt.py --steps 100""",
)
@click.option("--ranks", type=POSITIVE, metavar="N",
              help="Number of processes; by default one for each accelerator.")  # fmt: skip
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(ranks: int | None, script: Path, arguments: tuple[str, ...]) -> None:
    count = ranks or torch.accelerator.device_count()
    if not count:
        raise MeshError(
            "There is no accelerator here: say how many processes share the CPUs, such as --ranks 4."
        )
    check_ranks(count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(count)))
    words = ["--standalone", "--nproc-per-node", str(count), str(script), *arguments]
    try:
        torchrun(get_args_parser().parse_args(words))
    except ChildFailedError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
