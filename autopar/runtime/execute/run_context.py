"""The state that determines a call's result together with its operands: autocast and random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar import _torch
from autopar.runtime.execute.recording import tensors_of


@dataclass(frozen=True)
class RunContext:
    """The state that determines a call's result together with its operands: autocast and random generators.

    Attributes:
        autocasts: kind of device -> whether autocast is on, and its number format.
        tensors: some tensors, for their devices.
    """

    autocasts: Mapping[str, tuple[bool, torch.dtype]]
    devices: tuple[torch.device, ...]

    @classmethod
    def now(cls, inputs: Sequence[Any]) -> RunContext:
        devices = tuple(dict.fromkeys(x.device for each in inputs for x in tensors_of(each)))
        kinds = sorted({"cpu", *(device.type for device in devices)})
        return cls({k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds}, devices)

    def generators(self) -> Any:
        """The states of the generators that a call may draw from."""
        probes = [torch.empty(0, device=device) for device in self.devices]
        return torch.get_rng_state(), *get_device_states(*probes)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context with the autocast and random states of the first run; the random states are restored at its end."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_torch.forked_random_state(self.devices))
            for device, (is_on, dtype) in self.autocasts.items():
                stack.enter_context(torch.autocast(device, dtype, is_on))
            yield


def set_generators(state: Any) -> None:
    cpu, devices, states = state
    torch.set_rng_state(cpu)
    set_device_states(devices, states)
