"""Measurements: matrix products, element-wise kernels, launches, and every collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar import _torch
from autopar.calibrate.devices import FORMATS, Effort
from autopar.calibrate.team import Team
from autopar.errors import AutoparError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
LINKS = ("inside_node", "across_nodes")
TINY_OPS = 200  # issued in a row, where the device takes so many
LAYERS = 20  # in a row: some 500 kernels, which a stream of CUDA takes without a wait
SINGLE_STEPS = 2  # launch and memory

Progress = Callable[[str, int, int], None]  # (what comes, steps done, steps in all)


@dataclass(frozen=True)
class Product:
    """Seconds of a product of an (m, k) with a (k, n) matrix in one number format."""

    number_format: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def traffic_bytes(self) -> int:
        """Read and written once each."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return elements * FORMATS[self.number_format].itemsize


@dataclass(frozen=True)
class Message:
    """Seconds of a collective over one link.

    `bytes` is the whole tensor, which a rank holds on one side of the collective; of a send, what
    is sent.
    """

    link: str
    collective: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """All that one calibration found; every time is the slowest rank's median.

    Attributes:
        machine: name of the device.
        kind: cpu or cuda.
        backend: backend of the process group, or "" for one rank alone.
        samples: number of samples behind each median.
        local_ranks, nodes: how the ranks lay; their product measured at the same time.
        devices_per_node: ranks that a node could have.
        memory_bytes, reserved_bytes: capacity of one rank's device, and the part that no tensor can have.
        launch_seconds: duration of a tiny op on the device.
        host_seconds: time of the CPU to issue an op of a training step; 0 where it is the device.
        rates: pairs (element-wise kernel, bytes per second that it reads and writes).
        products, messages: the curves.
    """

    machine: str
    kind: str
    backend: str
    samples: int
    local_ranks: int
    devices_per_node: int
    nodes: int
    memory_bytes: int
    reserved_bytes: int
    launch_seconds: float
    host_seconds: float
    rates: tuple[tuple[str, float], ...]
    products: tuple[Product, ...]
    messages: tuple[Message, ...]


def check_formats(names: Sequence[str]) -> None:
    """Raises AutoparError for an unknown number format."""
    for name in names:
        if name not in FORMATS:
            raise AutoparError(f"There is no dtype {name!r} to measure; choose from {', '.join(FORMATS)}.")


def measure(team: Team, *, quick: bool, formats: Sequence[str], progress: Progress) -> Measurements:
    """Measures this machine on all ranks of the team at once.

    `formats` are names of FORMATS, by default all that the device has. Raises AutoparError for one
    that it has not.
    """
    device, effort = team.device, team.device.effort(quick)
    formats = _supported(formats, device.formats)
    count = _Counter(progress, _steps(effort, formats, team))
    with torch.no_grad():
        count("launch cost")
        launch_seconds, host_seconds = _launch(team), _host(team)
        count("memory bandwidth")
        found = tuple(rates(team, effort))
        products = tuple(_products(team, effort, formats, count))
        messages = tuple(_messages(team, effort, count))
    return Measurements(
        machine=device.machine,
        kind=device.device.type,
        backend=device.backend if team.size > 1 else "",
        samples=effort.samples,
        local_ranks=team.local_size,
        nodes=team.nodes,
        devices_per_node=device.per_node(team.local_size),
        memory_bytes=device.memory_bytes(team.local_size),
        reserved_bytes=device.reserved_bytes(),
        launch_seconds=launch_seconds,
        host_seconds=host_seconds,
        rates=found,
        products=products,
        messages=messages,
    )


def _supported(asked: Sequence[str], supported: Sequence[str]) -> tuple[str, ...]:
    for name in asked:
        if name not in supported:
            raise AutoparError(f"This device has no matrix products in {name}; it has {', '.join(supported)}.")
    return tuple(dict.fromkeys(asked or supported))


class _Counter:
    """Reports each step as it begins."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, label: str) -> None:
        self.progress(label, self.done, self.total)
        self.done += 1


def _steps(effort: Effort, formats: Sequence[str], team: Team) -> int:
    links = (team.local_size > 1) + (team.nodes > 1)
    messages = links * len(COLLECTIVES) * len(effort.message_bytes)
    return SINGLE_STEPS + len(formats) * len(shapes(effort)) + messages


def _launch(team: Team) -> float:
    x = torch.ones(8, device=team.device.device)
    _ = x + 1  # the first call loads the kernel
    samples = [team.device.kernel_seconds(lambda: x + 1, TINY_OPS) for _ in range(11)]
    return team.largest(median(samples))


def _host(team: Team) -> float:
    """Seconds in which the CPU issues a kernel of a training step, autograd and Python included.

    It is the average over forward and backward of a small layer, some in a row: a matrix product takes a CPU several
    times as long to issue as an element-wise kernel, and the first kernel after a wait longer than the next ones.
    """
    run = layer(team.device.device)
    run()
    with KernelCount() as count:
        run()
    samples = [team.device.issue_seconds(run, LAYERS) for _ in range(11)]
    return team.largest(median(samples)) / count.kernels


def layer(device: torch.device, width: int = 64) -> Callable[[], object]:
    """A function that runs forward and backward of layer norm, two products, GELU and a sum."""
    x, up, down, scale, shift = (
        torch.randn(*shape, device=device, requires_grad=True)
        for shape in ((width, width), (width, width), (width, width), (width,), (width,))
    )

    def run() -> object:
        with torch.enable_grad():
            y = F.gelu(F.linear(F.layer_norm(x, (width,), scale, shift), up))
            return torch.autograd.grad((x + F.linear(y, down)).sum(), (x, up, down, scale, shift))

    return run


class KernelCount(_torch.TorchDispatchMode):
    """Counts the ops that run inside it, without those that only give another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.kernels += not op.is_view
        return op(*args, **(kwargs or {}))


def rates(team: Team, effort: Effort) -> Iterator[tuple[str, float]]:
    """Bytes per second of kernels that read and write 2 or 3 arrays."""
    x, y, z = torch.ones(3, effort.memory_bytes // 4, device=team.device.device).unbind()
    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: y.copy_(x)),
        "multiply": (2, lambda: y.mul_(1.0)),
        "add": (3, lambda: torch.add(x, y, out=z)),
    }
    for name, (arrays, run) in kernels.items():
        yield name, arrays * effort.memory_bytes / team.seconds(run, effort)


def shapes(effort: Effort) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the products to measure: squares, and one extent short in turn; work rising."""
    wide = effort.wide
    squares = [(extent, extent, extent) for extent in effort.extents]
    thin = [
        shape for short in effort.skinny for shape in ((short, wide, wide), (wide, short, wide), (wide, wide, short))
    ]
    return tuple(sorted({*squares, *thin}, key=lambda s: (s[0] * s[1] * s[2], s)))


def _products(team: Team, effort: Effort, formats: Sequence[str], count: _Counter) -> Iterator[Product]:
    for name in formats:
        slowest = 0.0  # seconds per FLOP of the last product
        for m, n, k in shapes(effort):
            count(f"{name} product {m} x {k} x {n}")
            if slowest * 2 * m * n * k > effort.point_seconds:
                continue
            seconds = product_seconds(team, effort, name, (m, n, k))
            slowest = seconds / (2 * m * n * k)
            yield Product(name, m, n, k, seconds)


def product_seconds(team: Team, effort: Effort, name: str, shape: tuple[int, int, int]) -> float:
    """Seconds of a product of an (m, k) with a (k, n) matrix of a number format, all ranks at once."""
    m, n, k = shape
    device, dtype = team.device.device, FORMATS[name]
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    product = torch.empty(m, n, device=device, dtype=dtype)
    with team.device.multiplying(name):
        return team.seconds(lambda: torch.mm(a, b, out=product), effort)


def _messages(team: Team, effort: Effort, count: _Counter) -> Iterator[Message]:
    for link in LINKS:
        found = team.group(link)
        if found is None:
            continue
        group, members = found
        for collective in COLLECTIVES:
            for size in effort.message_bytes:
                elements = max(1, size // 4 // len(members)) * len(members)
                count(f"{collective} of {4 * elements} bytes {link.replace('_', ' ')}")
                run = collective_run(collective, group, members, team, elements)
                seconds = team.seconds(run, effort, meets=True)
                if collective == "send":
                    seconds /= 2  # there and back
                yield Message(link, collective, len(members), 4 * elements, seconds)


def collective_run(
    name: str, group: dist.ProcessGroup, members: Sequence[int], team: Team, elements: int
) -> Callable[[], object]:
    """A function that runs a collective whose whole is of so many float32 elements."""
    whole = torch.zeros(elements, device=team.device.device)
    part = torch.zeros(elements // len(members), device=team.device.device)
    other = torch.zeros_like(whole) if name == "all_to_all" else whole
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: _torch.start_all_reduce(whole, group).wait(),
        "all_gather": lambda: _torch.start_all_gather(whole, part, group).wait(),
        "reduce_scatter": lambda: _torch.start_reduce_scatter(part, whole, group).wait(),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": lambda: _there_and_back(whole, group, members, team.rank),
    }
    return runs[name]


def _there_and_back(x: Tensor, group: dist.ProcessGroup, members: Sequence[int], rank: int) -> None:
    """Members 0 and 1, 2 and 3, ... pass `x` to each other; one left over waits."""
    position = members.index(rank)
    if position ^ 1 >= len(members):
        return
    peer = members[position ^ 1]
    if position % 2 == 0:
        dist.send(x, dst=peer, group=group)
        dist.recv(x, src=peer, group=group)
    else:
        dist.recv(x, src=peer, group=group)
        dist.send(x, dst=peer, group=group)
