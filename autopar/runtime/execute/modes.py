"""Modes of torch: those that a program depends on, and those under which it is captured and run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Context without inference mode, because tensors made in inference mode could not be trained later."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


def modes(device: torch.device) -> tuple[object, ...]:
    """Global modes that a program depends on: autocast and its dtype, and the default dtype."""
    kind = device.type
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return (casts, torch.get_default_dtype())


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context without autocast, because its casts already are in the captured graph."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else contextlib.nullcontext()
