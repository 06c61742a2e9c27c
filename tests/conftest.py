"""What holds for every test."""

import gc
import logging

import pytest

from tests.support.session import begin_session

# Nothing that is made while modules are imported is garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(begin_session())


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of garbage collection, which would walk through it at every run."""
    gc.collect()
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
