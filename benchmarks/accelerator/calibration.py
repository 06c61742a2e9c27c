"""Part 1: what the device can do, measured by `autopar calibrate`, and what calibrate leaves out.

The hardware file that the other parts price with is written beside the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F

from autopar.calibrate import Measurements, calibrate, to_hardware
from autopar.calibrate.devices import Device, device_count, find_device
from autopar.calibrate.document import Fits, to_toml
from autopar.cost_model import find_hardware
from autopar.ir.files import write_whole
from benchmarks.accelerator.figures import Figure, Picture
from benchmarks.accelerator.parts import Context, Found

HARDWARE = "hardware.toml"
SAMPLES = 5


def hardware_of(context: Context) -> str:
    """What later parts price with: the hardware file of this part, or else a machine of the catalogue."""
    path = context.folder / HARDWARE
    return str(path) if path.exists() else context.size("cpu-gloo", "h100")


def run(context: Context) -> Iterator[Found]:
    """Measures, writes the hardware file, reads it back."""
    kind = context.device.type
    ranks = device_count(kind) if context.scope == "whole" else 1
    formats = context.size(tuple(context.subjects(("float32", "bfloat16"))), ())
    found = calibrate(device=kind, ranks=ranks, quick=True, formats=formats)
    path = context.folder / HARDWARE
    hardware = to_hardware(found, path.stem)
    write_whole(to_toml(found, path.stem), path)
    differs = float(find_hardware(path) != hardware)
    yield Figure("figures that the hardware file loses", differs, "count", limit=0)
    yield from _rates(found)
    yield from _fits(found)
    device = find_device(kind, 0)
    yield from _host_link(context, device)
    yield from _attention(context, device)


def _rates(found: Measurements) -> Iterator[Found]:
    """Peaks, bandwidth and launch."""
    fits = Fits(found)
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in fits.formats}
    for product in found.products:
        if product.m == product.n == product.k:
            curves[product.number_format].append((product.m, product.flops / product.seconds))
    for name, flops in fits.peaks.items():
        yield Figure(f"peak of products in {name}", flops, "FLOP/s", note="fitted over all sizes")
    yield Picture("Square products", "curves", "FLOP/s", curves, across="rows of the matrices")
    for kernel, rate in found.rates:
        yield Figure(f"memory bandwidth of {kernel}", rate, "bytes/s")
    yield Figure("launch of an op on the device", found.launch_seconds, "seconds")
    yield Figure("time of the host to issue an op", found.host_seconds, "seconds")


def _fits(found: Measurements) -> Iterator[Found]:
    """How well the cost model's formulas fit what was measured."""
    fits = Fits(found)
    yield Figure("mean error of the formula of products", fits.products.error, "ratio")
    if not fits.links:
        yield Figure("collectives", None, "seconds", note="one rank has none")
    for link, fit in fits.links.items():
        for name, error in fit.errors.items():
            words = link.replace("_", " ")
            yield Figure(f"mean error of the formula of {name} {words}", error, "ratio")
    curves: dict[str, list[tuple[float, float]]] = {}
    for message in found.messages:
        curves.setdefault(message.collective, []).append((message.bytes, message.seconds))
    if curves:
        title = f"Collectives over {found.local_ranks} ranks, {found.backend}"
        yield Picture(title, "curves", "seconds", curves, across="bytes of the whole tensor")


def _seconds(device: Device, call: Callable[[], object]) -> float:
    """Median duration of a call after a first one."""
    call()
    return median(device.seconds(call, 1) for _ in range(SAMPLES))


def _host_link(context: Context, device: Device) -> Iterator[Found]:
    """Copies between host and device; on a processor, copies within its memory by the same code."""
    size = context.size(2**24, 2**28)
    there = torch.zeros(size, dtype=torch.uint8, device=context.device)
    for words, pinned in (("pageable", False), ("pinned", True)):
        if pinned and not context.on_accelerator:
            why = "memory is pinned for an accelerator"
            yield Figure("copies from pinned memory", None, "bytes/s", note=why)
            continue
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        for name, target, source in (("to the device", there, here), ("to the host", here, there)):

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)

            rate = size / _seconds(device, copy)
            yield Figure(f"copy {name}, {words} memory", rate, "bytes/s")


def _attention(context: Context, device: Device) -> Iterator[Found]:
    """Forward and backward of causal attention by length, counted as half of the square."""
    heads, width = context.size((2, 32), (16, 128))
    lengths = context.size((64, 128, 256, 512), (512, 1024, 2048, 4096, 8192, 16384))
    dtype = context.size(torch.float32, torch.bfloat16)
    curve = []
    for length in lengths:
        shape = (3, 1, heads, length, width)
        query, key, value = torch.randn(shape, device=context.device, dtype=dtype).unbind()
        query.requires_grad_()

        def attend(q: torch.Tensor = query, k: torch.Tensor = key, v: torch.Tensor = value) -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        flops = 3 * 2 * 2 * heads * length**2 * width / 2  # 2 products forward, 4 backward
        curve.append((float(length), flops / _seconds(device, attend)))
    yield Figure("attention at the greatest length", curve[-1][1], "FLOP/s")
    yield Picture(
        "Causal attention, forward and backward",
        "curves",
        "FLOP/s",
        {"attention": curve},
        across="tokens of a sequence",
    )
