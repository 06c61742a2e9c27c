"""The `autopar` command line: explain a plan, or prove it, before anyone rents the cluster."""

from autopar.cli.group import main

__all__ = ["main"]
