"""Modules that models need, and what to do where one cannot be imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.errors import AutoparError


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Context in which an ImportError becomes an AutoparError that says what to install or correct.

    Args:
        what: what is imported, as the subject of a sentence.
    """
    try:
        yield
    except ImportError as error:
        raise AutoparError(f"{what} cannot be imported: {reason(error)}") from error


@contextlib.contextmanager
def staying(what: str) -> Iterator[None]:
    """Context in which a SystemExit becomes an AutoparError, so that no command ends as if it had answered.

    Args:
        what: what is run, as the subject of a sentence.
    """
    try:
        yield
    except SystemExit as error:
        raise AutoparError(
            f"{what} ends the program (sys.exit({error.code!r})): leave that out, "
            'or put it below if __name__ == "__main__":.'
        ) from error


def reason(error: ImportError) -> str:
    """The first error of those that led to this one, and a remedy.

    >>> reason(ModuleNotFoundError("No module named 'einops'", name="einops"))
    "No module named 'einops'. Install it: pip install einops."
    """
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    said = str(chain[-1]).partition("\n")[0].rstrip(".")
    for package in ("torchvision", "torchaudio"):
        # A build for another torch fails in the middle of an import, with words about operators or symbols.
        if any(package in str(each) for each in chain) and not _is_missing(chain[-1]):
            return (
                f"{said}. The {package} that is installed does not fit torch {torch.__version__}: install the one of "
                f"this release (pip install --upgrade {package}), or remove it (pip uninstall {package})."
            )
    if isinstance(chain[-1], ModuleNotFoundError) and chain[-1].name:
        return f"{said}. Install it: pip install {chain[-1].name.partition('.')[0]}."
    return f"{said}. Fix that import, or install another version of what it imports."


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and bool(error.name)
