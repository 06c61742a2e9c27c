"""What holds for every test."""

import gc


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of garbage collection, which would walk through it at every run."""
    gc.collect()
    gc.freeze()
