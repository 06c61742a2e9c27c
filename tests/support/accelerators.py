"""Accelerators that torch seems to find, on a machine without, and the script of docs/start.md."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

START = Path(__file__).parents[2] / "docs" / "start.md"


def first_script() -> str:
    """The first script of docs/start.md, word for word."""
    found = re.search(r"```python\n# train.py\n(.*?)```", START.read_text(), re.S)
    assert found is not None
    return found.group(1)


@contextlib.contextmanager
def seeming_accelerators(count: int, current: int = 0) -> Iterator[list[str]]:
    """Context in which torch finds accelerators of the kind cuda; yields the devices that are made current.

    Nothing can be computed on them: a build of torch for processors aborts where autograd meets one of their tensors.

    Args:
        count: number of accelerators.
        current: number of the current one.
    """
    taken: list[str] = []
    with mock.patch.multiple(
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: count,
        current_device_index=lambda: current,
        set_device_index=lambda device: taken.append(str(device)),
    ):
        yield taken
