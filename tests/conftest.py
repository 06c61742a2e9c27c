"""What holds for every test."""

import gc

# Nothing that is made while modules are imported is garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of garbage collection, which would walk through it at every run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
