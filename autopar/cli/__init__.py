"""The `autopar` command line: explain a plan, or prove it, before anyone rents the cluster."""

from autopar.versions import check_torch

check_torch()  # before what a torch that is too old cannot import

from autopar.cli.group import main  # noqa: E402
