"""The group of commands; every command has a file of its own."""

from __future__ import annotations

from typing import Any

import click

from autopar.calibrate.command import calibrate_command
from autopar.cli.compare import compare_command
from autopar.cli.diff import diff_command
from autopar.cli.explain import explain_command
from autopar.cli.fit import fit_command
from autopar.cli.run import run_command
from autopar.cli.verify import verify_command
from autopar.errors import AutoparError


class _Commands(click.Group):
    """Prints an error that people can mend as one sentence, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="autopar")
def main() -> None:
    """Parallelizes single-device PyTorch models over a cluster.

    explain, fit and compare need no GPU, no weights and no process group: they plan for a cluster that
    is only named.
    """


for _command in (
    explain_command, fit_command, compare_command, diff_command, verify_command, calibrate_command,
    run_command,
):  # fmt: skip
    main.add_command(_command)
