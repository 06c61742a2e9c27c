"""Part 11: a model on the host that nobody moves: where its ranks compute, and what they hold at the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import _torch
from benchmarks.accelerator.figures import Figure, Sentence
from benchmarks.accelerator.memory import peak_of
from benchmarks.accelerator.parts import Context, Found

WIDTH, LAYERS, ROWS = 4096, 16, 64  # 67 MB a layer, so that rounding of the allocator does not show
PEAK = "peak memory at the start : shards and one whole tensor"
ELSEWHERE = "parameters that do not lie on the accelerator of LOCAL_RANK"


@dataclass(frozen=True)
class Start:
    """What one rank found after its program was made.

    Attributes:
        devices: devices of its parameters, in order.
        expected: accelerator of its LOCAL_RANK.
        backend: backend of the process group for this device; "" without a group.
        peak_bytes: the most that it held at a time while the parameters were placed.
        shard_bytes: size of what it keeps of the parameters.
        whole_bytes: size of the largest parameter.
    """

    devices: list[str]
    expected: str
    backend: str
    peak_bytes: int
    shard_bytes: int
    whole_bytes: int


def run(context: Context) -> Iterator[Found]:
    """Starts a rank for every accelerator with a model on the host, and looks where its parameters went."""
    if not context.on_accelerator:
        why = "there is no accelerator"
        yield Figure(ELSEWHERE, None, "count", limit=0.0, note=why)
        yield Figure(PEAK, None, "ratio", limit=1.01, note=why)
        return
    found = autopar.launch(started, ranks=torch.accelerator.device_count())
    elsewhere = sum(device != each.expected for each in found for device in each.devices)
    yield Figure(ELSEWHERE, elsewhere, "count", limit=0.0)
    ratio = max(each.peak_bytes / (each.shard_bytes + each.whole_bytes) for each in found)
    yield Figure(PEAK, ratio, "ratio", limit=1.01)
    yield Figure("peak memory at the start", max(each.peak_bytes for each in found), "bytes")
    said = found[0].backend or "no process group"
    yield Sentence(f"{len(found)} ranks on {_torch.accelerator_kind()}: {said}.")


def started() -> Start:
    """Compiles a model on the host without naming a device, as the script of docs/start.md does."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    whole_bytes = max(p.nbytes for p in model.parameters())
    batch = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    compiled = autopar.compile(model, loss_fn=nn.functional.mse_loss, recipe="zero3")
    expected = torch.device(f"{_torch.accelerator_kind()}:{os.environ['LOCAL_RANK']}")
    peak_bytes = peak_of(lambda: compiled.prepare(*batch), expected)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in compiled.parameters()]
    return Start(
        devices=[str(x.device) for x in own],
        expected=str(expected),
        backend=_torch.backend_in_use(expected) or "" if dist.is_initialized() else "",
        peak_bytes=peak_bytes,
        shard_bytes=sum(x.nbytes for x in own),
        whole_bytes=whole_bytes,
    )
