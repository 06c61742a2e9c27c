"""Part 7: what a user sees of a step that runs out of memory, and of a rank that is killed."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import _torch
from autopar.runtime.failures.failing_op import is_out_of_memory
from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.joining import staged_or_devices
from benchmarks.accelerator.parts import Context, Found
from tests.runtime.gloo_ranks import Join, join

RANKS = 3
BOUND_SECONDS = 60.0  # from the death of a rank to the end of the last survivor
TIMEOUT_SECONDS = 15.0  # that a collective waits
TOLERANCE = 1e-5  # of losses in float32, whose mean is taken in other parts
# What the error of a step that runs out of memory has to say.
SAID = {"what was asked": "allocate", "what was planned": "planned:", "what to change": "remedy:"}


def run(context: Context) -> Iterator[Found]:
    """Provokes both faults."""
    joined = staged_or_devices(context, RANKS) if context.on_accelerator else join
    yield from killed_rank(context, joined, "killed rank")
    yield from _out_of_memory(context)


class Wide(nn.Module):
    """Layers whose activations take most of the memory of a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _out_of_memory(context: Context) -> Iterator[Found]:
    """A step that does not fit says so, and the same process then trains by a plan of smaller parts."""
    rows, parts = context.size(2**16, 2**22), 16
    torch.manual_seed(0)
    x = torch.randn(rows, 256, device=context.device)
    # A whole batch keeps 4 activations of this size and makes a fifth; a step of its sixteenths took 2.4 of them, with
    # what a first step allocates once (measured on a CPU).
    free_bytes = 4 * x.numel() * x.element_size()
    expected, said = _plain_loss(context, x, parts), ""
    whole, smaller = _compiled(context, 1), _compiled(context, parts)
    with _little_memory(context, free_bytes):
        try:
            whole.step(x, x)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for what, words in SAID.items():
        name = f"out of memory: an error without {what}"
        yield Figure(name, float(words not in said), "count", limit=0)
    with _little_memory(context, free_bytes):
        loss = smaller.step(x, x).item()
    yield Figure(
        f"out of memory: loss of {parts} micro-batches in the same process afterwards",
        abs(loss / expected - 1),
        "error",
        limit=TOLERANCE,
    )
    yield Sentence(f"The error of a step without memory: {said}")


def _model(context: Context) -> Wide:
    torch.manual_seed(1)
    return Wide(256).to(context.device)


def _compiled(context: Context, micro_batches: int) -> autopar.CompiledModule:
    return autopar.compile(_model(context), loss_fn=F.mse_loss, mesh={"dp": 1}, micro_batches=micro_batches)


def _plain_loss(context: Context, x: Tensor, parts: int) -> float:
    """The loss of the model without autopar, in parts of equal size."""
    model = _model(context)
    with torch.no_grad():
        losses = [F.mse_loss(model(part), part) for part in x.chunk(parts)]
    return torch.stack(losses).mean().item()


@contextmanager
def _little_memory(context: Context, free_bytes: int) -> Iterator[None]:
    """Inside it so many bytes can be allocated: a tensor takes the rest, or a limit of the process forbids it."""
    if context.on_accelerator:
        torch.accelerator.empty_cache()
        free, _ = torch.accelerator.get_memory_info(context.device)
        rest = max(0, free - free_bytes)
        ballast = torch.empty(rest, dtype=torch.uint8, device=context.device)
        try:
            yield
        finally:
            del ballast
            torch.accelerator.empty_cache()
        return
    # Of data, not of addresses: the allocator reserves 64 MiB of addresses for a new thread.
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def killed_rank(context: Context, joined: Join, name: str) -> Iterator[Found]:
    """One of three ranks that join so is killed in backward; the others end in time and say so.

    Args:
        context: what the part measures on.
        joined: how the ranks join.
        name: words that the names of the figures begin with.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, context.device.type, joined)
        processes = [
            context.processes.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            processes[1].join(2 * BOUND_SECONDS)
            death = time.monotonic()
            for process in processes:
                process.join(max(0.0, death + BOUND_SECONDS - time.monotonic()))
            seconds = time.monotonic() - death
            said = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        finally:
            for process in processes:
                process.kill()
                process.join(10)
    yield Figure(f"{name}: time until the others ended", seconds, "seconds", limit=BOUND_SECONDS)
    silent = RANKS - 1 - sum("another rank" in text for text in said)
    yield Figure(f"{name}: others without an error that names it", silent, "count", limit=0)
    yield Sentence(f"The error of the others ({name}): {said[0] if said else 'none'}")


def _rank(rank: int, folder: str, kind: str, joined: Join) -> None:
    """The life of a rank; the one in the middle is killed in its second backward."""
    joined(rank, RANKS, f"{folder}/store")
    device = _torch.current_device(kind)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))).to(device)
    x = torch.randn(6, 12).to(device)
    made = autopar.compile(
        model, loss_fn=F.mse_loss, mesh={"dp": RANKS}, recipe="zero3", timeout_seconds=TIMEOUT_SECONDS
    )
    made.step(x, x)
    if rank == 1:
        (ready,) = made._kept.ready[True]
        leaf = ready.bound._runner.leaves[2]  # type: ignore[union-attr]
        leaf.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    try:
        made.step(x, x)
        _torch.synchronize(device)
    except autopar.PeerError as error:
        Path(folder, f"error{rank}").write_text(str(error))
    os._exit(0)
