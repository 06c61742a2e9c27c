"""What holds for every test."""

import gc
import logging
from pathlib import Path

import pytest

from tests.support.session import begin_session

# Tests that are slow beside those that say so themselves; `benchmarks/suite/slow_tests.py` has chosen them.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())

# Nothing that is made while modules are imported is garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(begin_session())


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid in SLOW:
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of four ranks together, so that one worker of pytest-xdist has nearly all of them.

    Two workers with four ranks each would be eight processes that wait for each other.
    """
    together = [i for i, item in enumerate(items) if "four_ranks" in getattr(item, "fixturenames", ())]
    if together:
        own = set(together)
        after = [items[i] for i in range(together[0], len(items)) if i not in own]
        items[together[0] :] = [items[i] for i in together] + after


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of garbage collection, which would walk through it at every run."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    _trace_nothing()


def _trace_nothing() -> None:
    """Keeps torch from writing its structured trace in every capture, which it does where its logger has a handler.

    Pytest gives a handler to every logger that does not hand its records on.
    """
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True
