"""What the processes of a test session have in common: those that a test starts, and the workers of pytest-xdist."""

import os
import sys
import tempfile
from collections.abc import Callable

CAPTURES = "AUTOPAR_TEST_CAPTURES"  # variable of the environment with the folder of captures


def begin_session() -> Callable[[], None]:
    """Makes the folder of captures unless this process was started by one of the session; returns how to end it."""
    # Compiled modules are kept, whatever the shell says: the suite starts Python more than a hundred times.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if CAPTURES in os.environ:
        return lambda: None
    folder = tempfile.TemporaryDirectory(prefix="captures-")
    os.environ[CAPTURES] = folder.name

    def end() -> None:
        del os.environ[CAPTURES]
        folder.cleanup()

    return end
