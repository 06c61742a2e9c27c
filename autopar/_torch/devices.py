"""Everything that depends on the kind of a device; see benchmarks/results/accelerators.md.

torch.accelerator serves CUDA, ROCm (which torch calls cuda), XPU and others alike. This module adds what it lacks.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has a queue and a memory of its own; the processor and the meta device have none.

    >>> is_accelerator(torch.device("cuda", 1)), is_accelerator(torch.device("cpu"))
    (True, False)
    """
    return device.type not in ("cpu", "meta")


def accelerator_kind() -> str | None:
    """The kind of this machine's accelerator, such as "cuda"; None where torch finds none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def current_device(kind: str) -> torch.device:
    """This process's device of a kind."""
    if kind == "cpu":
        return CPU
    return torch.device(kind, torch.get_device_module(kind).current_device())


def accelerator_of_rank() -> torch.device | None:
    """The accelerator of this process under a launcher; None without a launcher or an accelerator.

    It is the current device where the script has set another than device 0, and else that of LOCAL_RANK.
    """
    kind, number = accelerator_kind(), os.environ.get("LOCAL_RANK")
    if kind is None or number is None:
        return None
    # A process may see its own device alone, as under `srun --gpus-per-task=1`.
    own = int(number) % torch.accelerator.device_count()
    return torch.device(kind, torch.accelerator.current_device_index() or own)


def accelerator_count(kind: str) -> int:
    """The number of accelerators of a kind that this process sees."""
    return torch.accelerator.device_count() if accelerator_kind() == kind else 0


def use_device(device: torch.device) -> None:
    """Makes a device the current one of its kind, on which kernels and collectives run that name none."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def identity_of(device: torch.device) -> str:
    """A text that two processes have in common only if they use one device; "" for a processor.

    It is the UUID of an accelerator, and its machine and number where it has none.
    """
    if not is_accelerator(device):
        return ""
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", f"{platform.node()} {device.index}"))


def device_model(device: torch.device) -> str:
    """The name of a device as its maker gives it, such as "NVIDIA H100 80GB HBM3"; "" where it has none.

    >>> device_model(torch.device("cpu")), device_model(torch.device("meta"))
    ('', '')
    """
    if not is_accelerator(device):
        return ""
    module: Any = torch.get_device_module(device)
    has_name = module.is_available() and hasattr(module, "get_device_name")
    return str(module.get_device_name(device)) if has_name else ""


def has_used_accelerator() -> bool:
    """Whether this process has a context of an accelerator, which no copy of the process may use."""
    kind = accelerator_kind()
    return kind is not None and torch.get_device_module(kind).is_initialized()


def catalogue_name(device: torch.device) -> str:
    """Name of the machine in the catalogue whose prices are used for a device if the user names no hardware.

    >>> catalogue_name(torch.device("cpu")), catalogue_name(torch.device("cuda"))
    ('cpu-gloo', 'h100')
    """
    return "h100" if is_accelerator(device) else "cpu-gloo"


def backend_of(device: torch.device) -> str:
    """The backend of a process group whose tensors lie on the device: gloo for processors, nccl for CUDA and ROCm.

    >>> backend_of(torch.device("cpu")), backend_of(torch.device("cuda", 0))
    ('gloo', 'nccl')
    """
    return dist.get_default_backend_for_device(device)


def backends_of(device: torch.device) -> str:
    """The backends of a process group for a device and its host, as tensors stored on the host are gathered there.

    >>> backends_of(torch.device("cpu")), backends_of(torch.device("cuda", 0))
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    own = backend_of(device)
    return f"cpu:gloo,{device.type}:{own}" if is_accelerator(device) else own


def backend_in_use(device: torch.device) -> str | None:
    """The backend by which the default process group communicates tensors of a device; None if it has none."""
    pairs = (part.partition(":") for part in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device.type)


def uses_own_backend(device: torch.device) -> bool:
    """Whether the default process group communicates tensors of a device by the backend that torch has for its kind."""
    return backend_in_use(device) == backend_of(device)


def uses_nccl(device: torch.device) -> bool:
    """Whether the default process group communicates tensors of a device by NCCL."""
    return backend_in_use(device) == "nccl"


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work that was submitted to it."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def peak_allocated_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors have held on the device; None on a processor, which does not count them."""
    return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else None


def autocast_kinds() -> tuple[str, ...]:
    """The kinds of devices under whose autocast a model may run here."""
    kind = accelerator_kind()
    return ("cpu",) if kind is None else ("cpu", kind)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of matrix products on a device; None if autocast is off.

    >>> autocast_dtype(CPU) is None
    True
    """
    kind = device.type
    is_known = torch.amp.is_autocast_available(kind)  # not of the meta device
    return torch.get_autocast_dtype(kind) if is_known and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context without autocast, for a graph that has its casts."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else contextlib.nullcontext()


@contextlib.contextmanager
def forked_random_state(devices: Iterable[torch.device], seed: int | None = None) -> Iterator[None]:
    """Context that restores the random states of the processor and of the devices at its end.

    With a seed both begin from it. On processors that is not `torch.manual_seed`: it formats the stack of every call
    for an accelerator that may be set up later, which takes 0.2 ms of each step.
    """
    others = list(dict.fromkeys(device for device in devices if is_accelerator(device)))
    # Without devices the kind is only looked up, and every build of torch knows "cuda".
    with torch.random.fork_rng(others, device_type=others[0].type if others else "cuda"):
        if seed is not None:
            (torch.manual_seed if others else torch.default_generator.manual_seed)(seed)
        yield


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the processor's and of the device's random generator."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return states


def copy_to_host(x: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy of a tensor in the host's memory, and the event after which it holds the values.

    A copy from an accelerator goes to pinned memory, so that the host need not wait for it. From a processor the
    copy is there at once, and the event is None.
    """
    if not is_accelerator(x.device):
        return x.detach().clone(), None
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x.detach(), non_blocking=True)
    arrived = torch.Event(x.device)
    arrived.record()
    return copy, arrived


def host_copies(groups: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copies of named tensors in the host's memory, for all of which the host waits at once.

    >>> host_copies([{"x": torch.ones(2)}, {}])
    [{'x': tensor([1., 1.])}, {}]
    """
    copies = [{name: copy_to_host(x) for name, x in each.items()} for each in groups]
    for each in copies:
        for _, arrived in each.values():
            if arrived is not None:
                arrived.synchronize()
    return [{name: copy for name, (copy, _) in each.items()} for each in copies]


def host_copy(x: Tensor) -> Tensor:
    """A contiguous copy of a tensor in the host's memory, which holds the values when this returns.

    Where the tensor is on an accelerator the copy is pinned.

    >>> x = torch.ones(2)
    >>> host_copy(x).data_ptr() == x.data_ptr()
    False
    """
    copy, arrived = copy_to_host(x.contiguous())
    if arrived is not None:
        arrived.synchronize()
    return copy


def device_copy(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host's memory to the device; when this returns, the source may be overwritten.

    >>> x = torch.ones(2)
    >>> device_copy(x, CPU).data_ptr() == x.data_ptr()
    False
    """
    return x.detach().to(device, copy=True)
