"""The states of this process's random generators, as plain values that load without running code."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autopar import _torch


def random_states() -> dict[str, Any]:
    """The states of torch's generators, of the CPU and of the accelerator, of Python's and of numpy's.

    >>> import torch
    >>> before = random_states()
    >>> drawn = torch.rand(2)
    >>> set_random_states(before)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": _numpy_state()}
    if _torch.has_used_accelerator():
        found["device"] = torch.get_device_module().get_rng_state()
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets the generators to states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    words, *rest = states["numpy"]
    np.random.set_state(("MT19937", words.numpy(), *rest))
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])


def _numpy_state() -> list[Any]:
    """The state of numpy's generator, its words as a tensor."""
    state: Any = np.random.get_state()
    _, words, *rest = state
    return [torch.from_numpy(words.astype(np.int64)), *rest]
