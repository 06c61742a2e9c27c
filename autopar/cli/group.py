"""The group of commands; every command has a file of its own, which is imported when the command is used."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from autopar.errors import AutoparError, did_you_mean
from autopar.units import printable
from autopar.versions import VERSION

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Misused(click.ClickException):
    """A command line that cannot be read; the first line that is printed says what to change."""

    exit_code = 2


class _Commands(click.Group):
    """Prints an error that people can mend as one sentence, without a traceback or the usage before it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # A file that is opened has its name in the error, stdout has none.
            if error.errno not in _FULL or error.filename is not None:
                raise
            # What is left in the buffer would be another error when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"Error: The output cannot be written: {error.strerror}.", err=True)
            sys.exit(1)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            ctx.fail(_no_command(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _Misused(printable(_sentence(error, error.ctx or ctx))) from error
        except AutoparError as error:
            raise click.ClickException(printable(str(error))) from error


def _no_command(name: str, commands: Mapping[str, click.Command]) -> str:
    """The error for a command that there is not."""
    hint = did_you_mean(name, tuple(commands))
    return f"There is no command {name!r}{hint}; there are {', '.join(commands)}."


def _sentence(error: click.UsageError, ctx: click.Context) -> str:
    """The error of a command line, with an example if an argument is missing, and the command that shows help."""
    example = re.search(r"^ +(autopar .*)", ctx.command.help or "", re.M)
    is_missing = isinstance(error, click.MissingParameter) and example is not None
    shown = f" Write for example: {example[1]}" if is_missing and example else ""
    return f"{error.format_message()}{shown}\nTry '{ctx.command_path} --help' for help."


class _ByUse(UserDict[str, Any]):
    """Commands by name, each imported from its module when it is first asked for."""

    def __getitem__(self, name: str) -> click.Command:
        found: click.Command = getattr(import_module(self.data[name]), f"{name}_command")
        return found


_PLACES = {
    "explain": "autopar.cli.explain",
    "fit": "autopar.cli.fit",
    "compare": "autopar.cli.compare",
    "diff": "autopar.cli.diff",
    "verify": "autopar.cli.verify",
    "calibrate": "autopar.calibrate.command",
    "run": "autopar.cli.run",
}


@click.group(
    cls=_Commands,
    commands=_ByUse(_PLACES),
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION)
def main() -> None:
    """Parallelizes single-device PyTorch models over a cluster.

    explain, fit and compare need no GPU, no weights and no process group: they plan for a cluster that
    is only named.
    """
