"""All that differs between kinds of devices: clocks, memory, dtypes, sizes to measure.

To add a kind of device, write a subclass of `Device`, and add its name to `find_device`, MAIN_FORMAT and ABSENT.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from autopar.cost_model import Link
from autopar.errors import AutoparError

FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "tf32": torch.float32,  # the same tensors, multiplied with 10 bits of mantissa
        "float64": torch.float64,
    }
)

MAIN_FORMAT = {"cpu": "float32", "cuda": "bfloat16"}  # that training uses; efficiency is fitted to it

# What figures mean on each kind of device.
NOTES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            "devices_per_node": "ranks as run",
            "memory_bytes": "a rank's share of the machine",
            "host_seconds": "the host is the device",
        },
        "cuda": {
            "devices_per_node": "GPUs of this machine",
            "memory_bytes": "the whole device",
            "host_seconds": "to issue a kernel of a small layer, forward and backward",
        },
    }
)

# Guesses of links that could not be measured, with what they are guessed to be.
ABSENT: Mapping[str, Mapping[str, tuple[Link, str]]] = MappingProxyType(
    {
        "cpu": {
            "inside_node": (Link(250e6, 1e-4), "processes that share cores"),
            "across_nodes": (Link(125e6, 2e-4), "1 Gb/s Ethernet"),
        },
        "cuda": {
            "inside_node": (Link(25e9, 1e-5), "PCIe 4 with 16 lanes"),
            "across_nodes": (Link(12.5e9, 2e-5), "a NIC of 100 Gb/s for every GPU"),
        },
    }
)

_CALLS = 50  # of one sample of a kernel on a GPU
# Products ahead of them at most: a stream of CUDA takes about 1,000 kernels before the CPU has to wait.
_AHEAD = 500

# Machines of the catalogue whose hosts stand for those around a device, which nothing measures.
LIKE: Mapping[str, str] = MappingProxyType({"cpu": "cpu-gloo", "cuda": "h100-pcie"})


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        samples: timed repeats of every point, of which the median counts.
        sample_seconds: duration of one sample, for which a shorter kernel runs in a loop, on a GPU of `_CALLS` at most.
        point_seconds: a matrix product expected to take longer is left out.
        extents: rows of the square matrices that are multiplied, rising.
        wide: the long extents of a skinny product.
        skinny: its short extent, one after the other.
        memory_bytes: size of each array of the element-wise kernels, far above any cache.
        message_bytes: message sizes of the collectives, rising.
    """

    samples: int
    sample_seconds: float
    point_seconds: float
    extents: tuple[int, ...]
    wide: int
    skinny: tuple[int, ...]
    memory_bytes: int
    message_bytes: tuple[int, ...]


class Device(ABC):
    """One rank's device.

    Attributes:
        device: where tensors live.
        backend: backend of the process group.
    """

    backend: str

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def machine(self) -> str:
        """Name of the machine, which the source of every figure mentions."""

    @property
    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """Names of the dtypes in which the device multiplies matrices; a subset of FORMATS."""

    @abstractmethod
    def effort(self, quick: bool) -> Effort:
        """Sizes and repetitions of the measurements."""

    @abstractmethod
    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds of one call of `run`, as the mean over `times` calls in a row."""

    def kernel_seconds(self, run: Callable[[], object], times: int) -> float:
        """The same for kernels of this device only, without the CPU's time to issue them."""
        return self.seconds(run, times)

    @abstractmethod
    def issue_seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds in which the CPU issues one of `times` calls to an idle device; 0 where the CPU is the device."""

    @abstractmethod
    def memory_bytes(self, local_ranks: int) -> int:
        """Bytes of memory for one rank, if `local_ranks` run on this machine."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes of this memory that are used by other things than tensors, after all measurements."""

    @abstractmethod
    def per_node(self, local_ranks: int) -> int:
        """Number of ranks that a node like this one can have; `local_ranks` of them measure."""

    @contextlib.contextmanager
    def multiplying(self, number_format: str) -> Iterator[None]:
        """A context in which matrix products of float32 run in this format: "float32" or "tf32"."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if number_format == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class Cpu(Device):
    """One process with one thread; the host is the device."""

    backend = "gloo"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._held_before = peak if sys.platform == "darwin" else peak * 1024  # else in KiB

    @property
    def machine(self) -> str:
        """Text such as "one thread of" the processor's name, where Linux gives it, else of its architecture."""
        listing = Path("/proc/cpuinfo")
        lines = listing.read_text().splitlines() if listing.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"one thread of {names[0] if names else platform.machine()}"

    @property
    def formats(self) -> tuple[str, ...]:
        """All of FORMATS except tf32, because processors have no tensor cores."""
        return tuple(name for name in FORMATS if name != "tf32")

    def effort(self, quick: bool) -> Effort:
        """Arrays of 64 or 256 MiB, which exceed the caches of most processors."""
        if quick:
            return Effort(
                7, 3e-3, 0.1, (64, 128, 256, 512, 1024), 512, (8, 64), 2**26, (2**12, 2**16, 2**20, 2**22, 2**24)
            )
        return Effort(
            9,
            2e-2,
            1.0,
            (32, 64, 128, 256, 512, 1024, 2048),
            1024,
            (1, 8, 32, 128),
            2**28,
            tuple(4**i for i in range(5, 14)),
        )

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds of a call by the wall clock."""
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times

    def issue_seconds(self, run: Callable[[], object], times: int) -> float:
        """0, because the CPU launches and computes in the same thread."""
        return 0.0

    def memory_bytes(self, local_ranks: int) -> int:
        """A rank's share of the physical memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks

    def per_node(self, local_ranks: int) -> int:
        """Number of ranks that shared the node's memory and cores while they were measured."""
        return local_ranks

    def reserved_bytes(self) -> int:
        """Bytes of the interpreter and its libraries, which the process held before it measured."""
        return self._held_before


class Cuda(Device):
    """One GPU of this process."""

    backend = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ballast = torch.ones(4096, 4096, device=device, dtype=torch.float16)
        self._product = torch.empty_like(self._ballast)
        self._ahead = 1  # products in the queue before a sample begins

    @property
    def machine(self) -> str:
        """Name of the device as the driver gives it."""
        return torch.cuda.get_device_name(self.device)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the dtypes in which the GPU multiplies matrices; bfloat16 and tf32 need compute capability 8."""
        old = torch.cuda.get_device_capability(self.device) < (8, 0)
        return tuple(name for name in FORMATS if not (old and name in ("tf32", "bfloat16")))

    def effort(self, quick: bool) -> Effort:
        """Arrays of 0.5 or 1 GiB, an order above the largest second-level caches."""
        if quick:
            return Effort(
                5,
                5e-3,
                0.1,
                (256, 512, 1024, 2048, 4096, 8192),
                4096,
                (64, 256),
                2**29,
                (2**12, 2**16, 2**20, 2**24, 2**28),
            )
        return Effort(
            11,
            2e-2,
            1.0,
            (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
            8192,
            (16, 64, 256, 1024),
            2**30,
            tuple(4**i for i in range(5, 16)),
        )

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds of a call by events on the stream."""
        start, end = self._events()
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / times

    def kernel_seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds of a call behind a queue of other work, of at most `_CALLS` calls.

        The GPU then never waits for the CPU, which takes longer to issue a small kernel than the GPU to run it. Where
        it reached the first call before the last one was issued, more work goes ahead, and the sample is taken again.
        """
        while True:
            seconds, waited = self._behind_queue(run, min(times, _CALLS))
            if not waited or self._ahead == _AHEAD:
                return seconds
            self._ahead = min(2 * self._ahead, _AHEAD)

    def _behind_queue(self, run: Callable[[], object], times: int) -> tuple[float, bool]:
        """Seconds of a call, and whether the GPU was through with the queue before all calls were issued."""
        torch.cuda.synchronize(self.device)
        start, end = self._events()
        for _ in range(self._ahead):
            torch.mm(self._ballast, self._ballast, out=self._product)
        start.record()
        for _ in range(times):
            run()
        waited = start.query()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / times, waited

    def issue_seconds(self, run: Callable[[], object], times: int) -> float:
        """Seconds of the CPU alone: the queue is empty, and takes all that is issued."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times

    def memory_bytes(self, local_ranks: int) -> int:
        """Bytes of the whole device's memory."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def per_node(self, local_ranks: int) -> int:
        """Number of GPUs of this machine."""
        return torch.cuda.device_count()

    def reserved_bytes(self) -> int:
        """Bytes that are neither free nor in torch's memory pool: CUDA context, buffers of NCCL and cuBLAS."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def check_device(kind: str, local_ranks: int) -> None:
    """Raises AutoparError where this machine has no such device for every rank.

    Nothing is started on a GPU: another process's context would count as taken memory.
    """
    if kind not in ABSENT:
        raise AutoparError(f"There is no kind of device {kind!r}; choose {' or '.join(ABSENT)}.")
    if kind == "cuda" and local_ranks > torch.cuda.device_count():
        raise AutoparError(
            f"Every rank needs a GPU of its own: this machine lacks {local_ranks}, torch "
            f"{torch.__version__} sees {torch.cuda.device_count()}; use fewer ranks or --device cpu."
        )


def find_device(kind: str, local_rank: int) -> Device:
    """The device of this process, one of those that `check_device` allows."""
    if kind == "cpu":
        return Cpu(torch.device("cpu"))
    torch.cuda.set_device(local_rank)
    return Cuda(torch.device("cuda", local_rank))


def device_count(kind: str) -> int:
    """The GPUs of this machine, at least 1, or the processors that this process may use."""
    return max(1, torch.cuda.device_count()) if kind == "cuda" else len(os.sched_getaffinity(0))


def default_device() -> str:
    """The name "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
