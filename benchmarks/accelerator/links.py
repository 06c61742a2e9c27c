"""Part 13: 2, 4 and 8 devices: what recipes and schedules take over their links, and whether replicas stay alike.

A rank that is killed is part `faults`, a model that nobody moves part `start`; where there are devices for all ranks,
both use them.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar import _torch
from autopar.calibrate.devices import device_count
from autopar.ir import SCHEDULES
from benchmarks.accelerator.figures import Figure, Picture
from benchmarks.accelerator.joining import staged_or_devices
from benchmarks.accelerator.overlap import compiled_gpt
from benchmarks.accelerator.parts import Context, Found
from benchmarks.accelerator.several_ranks import trained
from benchmarks.accelerator.trace import Trace, traced
from tests.runtime.gloo_ranks import Ranks, join

RECIPES = ("ddp", "zero3", "tp", "tp+sp")
TIMED_STEPS = 5
# A line of NCCL's log for each communicator that it has made.
_COMMUNICATOR = re.compile(r"Init COMPLETE")
_SCHEDULE_MICRO_BATCHES = 8  # one a row of the batch


@dataclass(frozen=True)
class Measured:
    """What a rank found of one plan.

    Attributes:
        seconds: median step.
        priced_seconds: the step by the plan's price.
        trace: one profiled step.
        groups: process groups of the rank.
        digests: parameter that is whole on this rank -> digest of its bits after the last step.
    """

    seconds: float
    priced_seconds: float
    trace: Trace
    groups: int
    digests: dict[str, str]


def run(context: Context) -> Iterator[Found]:
    """Trains a GPT by every recipe and schedule on as many ranks as there are devices, at most 8."""
    counts = _counts(context)
    if not counts:
        yield Figure("plans over links between devices", None, "seconds", note="there is one device")
    for count in context.subjects(counts):
        log = _log_of_nccl(context, count)
        joined = staged_or_devices(context, count) if context.on_accelerator else join
        ranks = Ranks(count, joined, context.processes)
        try:
            yield from _recipes(context, ranks)
            yield from _schedules(context, ranks)
        finally:
            ranks.stop()
        yield _communicators(context, count, log)


def _counts(context: Context) -> Sequence[int]:
    """Numbers of ranks: each has a device of its own, but for a processor, whose ranks share the cores."""
    most = device_count(context.device.type) if context.on_accelerator else 4
    return [count for count in (2, 4, 8) if count <= most]


def _sizes(context: Context) -> tuple[int, int, int]:
    """Width, layers (two stages for each of eight ranks) and length of the GPT."""
    return context.size((32, 8, 16), (1024, 16, 512))


def _recipes(context: Context, ranks: Ranks) -> Iterator[Found]:
    bars: dict[str, list[tuple[str, float]]] = {}
    for recipe in context.subjects(RECIPES):
        words = f"{recipe} on {ranks.count}"
        yield trained(words, context, ranks, {"x": ranks.count}, recipe, 1)
        steps = context.size(20, 200)
        found = ranks.run(_measured, {"x": ranks.count}, recipe, 1, context.device.type, _sizes(context), steps)
        yield from _figures(words, found)
        bars.setdefault("step", []).append((recipe, _slowest(found)))
    yield Picture(f"Steps of recipes on {ranks.count} ranks", "bars", "seconds", bars)


def _figures(words: str, found: Sequence[Measured]) -> Iterator[Figure]:
    first, digests = found[0], [each.digests for each in found]
    priced = f"priced at {first.priced_seconds:.3g} s"
    yield Figure(f"{words}: step", _slowest(found), "seconds", note=priced)
    beside = first.trace.beside_compute("communication")
    exposed = None if beside is None else 1 - beside
    yield Figure(f"{words}: share of communication that is exposed", exposed, "ratio")
    yield Figure(f"{words}: times that the host waits in a step", max(each.trace.waits for each in found), "count")
    yield Figure(f"{words}: process groups of a rank", max(each.groups for each in found), "count")
    names = digests[0].keys()
    unlike = sum(len({each[name] for each in digests}) > 1 for name in names)
    note = f"of {len(names)} replicated parameters"
    yield Figure(f"{words}: replicas with other bits after training", unlike, "count", limit=0, note=note)


def _schedules(context: Context, ranks: Ranks) -> Iterator[Found]:
    measured, priced = [], []
    for schedule in context.subjects(tuple(SCHEDULES)):
        words, mesh = f"{schedule} on {ranks.count}", {"pp": ranks.count}
        arguments = (mesh, schedule, _SCHEDULE_MICRO_BATCHES, context.device.type, _sizes(context), TIMED_STEPS)
        found = ranks.run(_measured, *arguments)
        note = f"priced at {found[0].priced_seconds:.3g} s"
        yield Figure(f"{words}: step", _slowest(found), "seconds", note=note)
        measured.append((schedule, _slowest(found)))
        priced.append((schedule, found[0].priced_seconds))
    series = {"measured": measured, "priced": priced}
    yield Picture(f"Steps of schedules on {ranks.count} ranks", "bars", "seconds", series)


def _slowest(found: Sequence[Measured]) -> float:
    return max(each.seconds for each in found)


def _measured(
    mesh: dict[str, int], recipe: str, micro_batches: int, kind: str, sizes: tuple[int, int, int], steps: int
) -> Measured:
    """A rank's task: trains by a plan for so many steps, of which the last ones are timed."""
    device = _torch.current_device(kind)
    made, batch = compiled_gpt(kind, sizes, mesh=mesh, recipe=recipe, micro_batches=micro_batches)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    seconds = []
    for _ in range(steps):
        _torch.synchronize(device)
        start = time.perf_counter()
        made.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        _torch.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Measured(
        statistics.median(seconds[-TIMED_STEPS:]),
        made.explain().step_seconds,
        traced(lambda: made.step(*batch), device),
        len(dist.distributed_c10d._world.pg_map),
        {} if "pp" in mesh else _digests(made),
    )


def _digests(made: autopar.CompiledModule) -> dict[str, str]:
    """Digests of the bits of parameters that every rank has whole."""
    found = {}
    for name, parameter in made.named_parameters():
        if isinstance(parameter, DTensor) and not all(each.is_replicate() for each in parameter.placements):
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(bits).hexdigest()
    return found


def _log_of_nccl(context: Context, count: int) -> Path:
    """Tells NCCL, before ranks start, to write what it does into files of this folder, one a rank."""
    folder = context.folder / f"nccl-{count}"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/%p.log"}
    return folder


def _communicators(context: Context, count: int, log: Path) -> Figure:
    words = f"{count} ranks: communicators of a rank, for all plans together"
    made = [len(_COMMUNICATOR.findall(each.read_text())) for each in sorted(log.iterdir())]
    note = "" if made else f"{_torch.backend_of(context.device)} keeps no log of them"
    return Figure(words, max(made, default=None), "count", note=note)
