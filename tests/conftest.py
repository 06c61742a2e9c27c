"""What holds for every test."""

import gc
import os
import zlib

import pytest

# Nothing that is made while modules are imported is garbage.
gc.disable()

# Fixtures of processes that the tests of a session share.
RANKS = frozenset(
    {"two_ranks", "four_ranks", "framework_ranks", "four_framework_ranks", "ranks_of"}
)


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of garbage collection, which would walk through it at every run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives the tests of shared ranks to half of the workers.

    Every worker that runs one starts a server, two ranks and four, each of which captures what the others have
    captured. The scheduler `loadgroup` begins with the largest group, and the other workers run the other tests.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    groups = max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // 2)
    for item in items:
        if RANKS & set(getattr(item, "fixturenames", ())):
            file = item.nodeid.partition("::")[0]
            number = zlib.crc32(file.encode()) % groups
            item.add_marker(pytest.mark.xdist_group(f"ranks{number}"))
