"""The times of an op, a product and a message that a search starts with, where nobody names the hardware.

The catalogue's processes have a core each. Where they share cores a message takes several times as long, and an op of a
training step always takes several times as long to issue as a bare kernel: that is the time of the host, which no op is
priced below. A small model that is split at the catalogue's prices may then be slower than on one process.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist

from autopar import _torch
from autopar.calibrate.devices import Effort, find_device
from autopar.calibrate.fit import RINGS, fit_link
from autopar.calibrate.measure import LAYERS, KernelCount, Message, collective_run, layer, product_seconds
from autopar.calibrate.team import Team
from autopar.cost_model import Hardware
from autopar.cost_model.machines.hardware import Source
from autopar.cost_model.machines.hardware_toml import parse_hardware
from autopar.cost_model.machines.hardware_writing import format_hardware
from autopar.errors import AutoparError
from autopar.planning.cache_files import read_cached, write_cached
from autopar.planning.stored_plans import code_version

log = logging.getLogger("autopar")

_Key = TypeVar("_Key", int, str)

# A fifth of a second on two idle cores; message sizes of small models.
_EFFORT = Effort(7, 2e-3, 0.0, (), 0, (), 0, (2**12, 2**17, 2**20))
_EXTENT = 256  # of the product whose rate stands for all products
_DIGITS = 2
_found: weakref.WeakKeyDictionary[Any, Hardware] = weakref.WeakKeyDictionary()  # by the default process group


def measured_at_start(hardware: Hardware, folder: Path | None) -> Hardware:
    """Processors of the catalogue with the times of this machine, measured by all ranks together, once.

    Args:
        hardware: the machine of the catalogue.
        folder: folder that keeps the times for the next start of this autopar, so that it finds the plan again; None
            keeps none.

    The same on every rank. Ranks on several nodes are not measured.
    """
    team = Team.of_process_group(find_device("cpu", 0))
    if team.nodes > 1 or team.size == 1:
        return hardware
    group = dist.group.WORLD
    assert group is not None, "there are several ranks"
    if group not in _found:
        file = None if folder is None else folder / f"{hardware.name}-{team.size}-{code_version()[0][:12]}.toml"
        with _torch.forked_random_state([team.device.device]):  # a script that has set a seed may draw from it next
            _found[group] = _kept(file, team) or _measured(hardware, team, group, file)
    return _found[group]


def _kept(file: Path | None, team: Team) -> Hardware | None:
    """What an earlier start has kept, as the first rank reads it; None if there is nothing, or it is damaged."""
    text = [kept_text(file) if team.rank == 0 and file is not None else None]
    dist.broadcast_object_list(text, src=0)
    try:
        return None if text[0] is None else parse_hardware(text[0], str(file)).hardware
    except AutoparError:
        return None


def kept_text(file: Path) -> str | None:
    """The text of a file of a cache folder; None, with a line in the log, for one that does not count."""
    try:
        return read_cached(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("The times in %s are not used; they are measured again: %s", file, error)
        return None


def _measured(hardware: Hardware, team: Team, group: dist.ProcessGroup, file: Path | None) -> Hardware:
    op_seconds = _op_seconds(team)
    members = list(range(team.size))
    messages = []
    for name, size in ((name, size) for name in RINGS[:1] for size in _EFFORT.message_bytes):
        run = collective_run(name, group, members, team, size // 4)
        messages.append(Message("inside_node", name, team.size, size, team.seconds(run, _EFFORT, meets=True)))
    fitted = fit_link(messages, op_seconds).link
    link = dataclasses.replace(
        hardware.inside_node,
        bandwidth_bytes_per_second=_rounded(fitted.bandwidth_bytes_per_second),
        latency_seconds=_rounded(fitted.latency_seconds),
    )
    product_seconds_here = product_seconds(team, _EFFORT, "float32", (_EXTENT,) * 3)
    speed = 2 * _EXTENT**3 / product_seconds_here / hardware.dtype_flops_per_second("float32")
    source = Source("measured", f"at the start of {team.size} ranks on {team.device.machine}")
    alike = Source("guess", "as much slower or faster than in the catalogue as float32 is")
    formats = {f"peak_flops.{name}": source if name == "float32" else alike for name, _ in hardware.dtype_flops}
    times = ("launch_seconds", "host_seconds", "inside_node.bandwidth_bytes_per_second", "inside_node.latency_seconds")
    found = dataclasses.replace(
        hardware,
        peak_flops=_scaled(hardware.peak_flops, speed),
        dtype_flops=_scaled(hardware.dtype_flops, speed),
        launch_seconds=_rounded(op_seconds),
        host_seconds=_rounded(op_seconds),
        inside_node=link,
        sources=tuple((dict(hardware.sources) | formats | dict.fromkeys(times, source)).items()),
    )
    text = format_hardware(found)
    if team.rank == 0 and file is not None:
        try:
            write_cached(text, file)
        except OSError as error:
            log.warning("The times of this machine are not stored in %s: %s.", file.parent, error.strerror)
    return parse_hardware(text, found.name).hardware  # as the next start reads it, so that it finds stored plans


def _op_seconds(team: Team) -> float:
    """Seconds of an op of a training step, autograd and Python included, with hardly any work in it."""
    run = layer(team.device.device, width=8)
    run()
    with KernelCount() as count:
        run()
    samples = [team.device.seconds(run, LAYERS) for _ in range(_EFFORT.samples)]
    return team.largest(median(samples)) / count.kernels


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _scaled(rates: tuple[tuple[_Key, float], ...], factor: float) -> tuple[tuple[_Key, float], ...]:
    return tuple((key, _rounded(rate * factor)) for key, rate in rates)
