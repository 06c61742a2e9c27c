"""The times of this machine that a plan for processors starts with, where nobody names the hardware.

The catalogue's processes have a core each and issue bare kernels. An op of a training step takes several times as long
to issue, autograd and Python included, and where ranks share cores, everything takes longer. So all ranks measure at
once what they will run at once:

    op          forward and backward of a layer with hardly any work, by the number of its kernels
    update      an op of AdamW on a small parameter, which no autograd records
    arithmetic  a matrix product
    memory      copies, products and sums of elements
    message     all-reduces of three sizes
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar import _torch
from autopar.calibrate.devices import Effort, find_device
from autopar.calibrate.fit import RINGS, fit_link
from autopar.calibrate.measure import KernelCount, Message, collective_run, layer, product_seconds, rates
from autopar.calibrate.team import Team
from autopar.cost_model import Hardware, Link
from autopar.cost_model.machines.hardware import Source
from autopar.cost_model.machines.hardware_toml import parse_hardware
from autopar.cost_model.machines.hardware_writing import format_hardware
from autopar.cost_model.optimizers import optimizer_format
from autopar.errors import AutoparError
from autopar.planning.cache_files import read_cached, write_cached
from autopar.planning.stored_plans import code_version
from autopar.runtime.ranks.processes import world_size
from autopar.units import counted

log = logging.getLogger("autopar")

_Key = TypeVar("_Key", int, str)

# A third of a second on idle cores; message sizes of small models. A sample outlasts several turns of a scheduler.
_EFFORT = Effort(5, 1e-2, 0.0, (), 0, (), 2**20, (2**12, 2**17, 2**20))
_EXTENT = 256  # of the product whose rate stands for all
_DIGITS = 2
_PARAMETERS = 8  # of the small update
# Ops that take as long as what the runtime does in a step beside ops (arguments, guards, hooks, results): a step of
# `mlp` less the plain one, benchmarks/speed/bench_tiny.py on one process.
_STEP_OPS = 20
# By the default process group, of whose place `Team` takes where one process has none, and by what else they depend on.
_found: weakref.WeakKeyDictionary[Any, dict[object, Hardware]] = weakref.WeakKeyDictionary()


def measured_at_start(hardware: Hardware, folder: Path | None) -> Hardware:
    """Processors of the catalogue with the times of this machine, measured by all ranks together, once.

    Args:
        hardware: the machine of the catalogue.
        folder: folder that keeps the times for the next start of this autopar, so that it finds the plan again; None
            keeps none.

    The same on every rank. Ranks on several nodes are not measured.
    """
    device = find_device("cpu", 0)
    team = Team.of_process_group(device) if world_size() > 1 else Team(device)
    if team.nodes > 1:
        return hardware
    threads = torch.get_num_threads()
    found = _found.setdefault(dist.group.WORLD if team.size > 1 else Team, {})
    if team.largest((hardware, threads) not in found):
        name = f"{hardware.name}-{team.size}-{threads}-{code_version()[0][:12]}.toml"
        file = None if folder is None else folder / name
        with _torch.forked_random_state([team.device.device]):  # a script that has set a seed may draw from it next
            found[hardware, threads] = _kept(file, team) or _measured(hardware, team, file)
    return found[hardware, threads]


def _kept(file: Path | None, team: Team) -> Hardware | None:
    """What an earlier start has kept, as the first rank reads it; None if there is nothing, or it is damaged."""
    text = [kept_text(file) if team.rank == 0 and file is not None else None]
    if team.size > 1:
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


def _measured(hardware: Hardware, team: Team, file: Path | None) -> Hardware:
    op_seconds = _op_seconds(team)
    product_seconds_here = product_seconds(team, _EFFORT, "float32", (_EXTENT,) * 3)
    speed = 2 * _EXTENT**3 / product_seconds_here / hardware.dtype_flops_per_second("float32")
    reached = min(rate for _, rate in rates(team, _EFFORT)) / hardware.memory_bytes_per_second
    link = hardware.inside_node if team.size == 1 else _link(hardware, team, op_seconds)
    ranks = counted(team.size, "rank")
    source = Source("measured", f"at the start of {ranks} on {team.device.machine}")
    alike = Source("guess", "as much slower or faster than in the catalogue as float32 is")
    formats = {f"peak_flops.{name}": source if name == "float32" else alike for name, _ in hardware.dtype_flops}
    names = ["launch_seconds", "host_seconds", "update_seconds", "step_seconds", "memory_efficiency"]
    if team.size > 1:
        names += ["inside_node.bandwidth_bytes_per_second", "inside_node.latency_seconds"]
    found = dataclasses.replace(
        hardware,
        peak_flops=_scaled(hardware.peak_flops, speed),
        dtype_flops=_scaled(hardware.dtype_flops, speed),
        memory_efficiency=min(1.0, _rounded(reached)),
        launch_seconds=_rounded(op_seconds),
        host_seconds=_rounded(op_seconds),
        update_seconds=_rounded(_update_seconds(team)),
        step_seconds=_rounded(_STEP_OPS * op_seconds),
        inside_node=link,
        sources=tuple((dict(hardware.sources) | formats | dict.fromkeys(names, source)).items()),
    )
    text = format_hardware(found)
    if team.rank == 0 and file is not None:
        try:
            write_cached(text, file)
        except OSError as error:
            log.warning("The times of this machine are not stored in %s: %s.", file.parent, error.strerror)
    return parse_hardware(text, found.name).hardware  # as the next start reads it, so that it finds stored plans


def _link(hardware: Hardware, team: Team, op_seconds: float) -> Link:
    """The link between the ranks, as their all-reduces show it."""
    group, members = dist.group.WORLD, list(range(team.size))
    assert group is not None, "there are several ranks"
    messages = []
    for name, size in ((name, size) for name in RINGS[:1] for size in _EFFORT.message_bytes):
        run = collective_run(name, group, members, team, size // 4)
        messages.append(Message("inside_node", name, team.size, size, team.seconds(run, _EFFORT, meets=True)))
    fitted = fit_link(messages, op_seconds).link
    return dataclasses.replace(
        hardware.inside_node,
        bandwidth_bytes_per_second=_rounded(fitted.bandwidth_bytes_per_second),
        latency_seconds=_rounded(fitted.latency_seconds),
    )


def _op_seconds(team: Team) -> float:
    """Seconds of an op of a training step, autograd and Python included, with hardly any work in it."""
    run = layer(team.device.device, width=8)
    run()
    with KernelCount() as count:
        run()
    return team.seconds(run, _EFFORT) / count.kernels


def _update_seconds(team: Team) -> float:
    """Seconds of one op of an optimizer's update of a parameter."""
    parameters = [nn.Parameter(torch.ones(8, device=team.device.device)) for _ in range(_PARAMETERS)]
    optimizer = torch.optim.AdamW(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    return team.seconds(optimizer.step, _EFFORT) / _PARAMETERS / optimizer_format("adamw").ops


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _scaled(rates: tuple[tuple[_Key, float], ...], factor: float) -> tuple[tuple[_Key, float], ...]:
    return tuple((key, _rounded(rate * factor)) for key, rate in rates)
