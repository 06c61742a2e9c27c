"""Turns measurements into `Hardware` for the cost model, and writes its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from autopar.calibrate.devices import ABSENT, FORMATS, LIKE, MAIN_FORMAT, NOTES
from autopar.calibrate.fit import (
    RINGS,
    LinkFit,
    ProductFit,
    fit_link,
    fit_peak,
    fit_products,
    message_seconds,
    product_seconds,
)
from autopar.calibrate.measure import LINKS, Measurements, Product
from autopar.cost_model import Hardware, Link, Source, find_hardware
from autopar.cost_model.machines.hardware import Host
from autopar.cost_model.machines.hardware_writing import format_hardware
from autopar.errors import AutoparError
from autopar.ir.files import check_output

DIGITS = 4  # of a figure in the file; noise begins before
Row = Mapping[str, str | float]


@dataclass(frozen=True)
class Fits:
    """The cost model's constants for what was measured."""

    found: Measurements

    @cached_property
    def memory_bytes_per_second(self) -> float:
        """Bandwidth of the fastest element-wise kernel."""
        return max(rate for _, rate in self.found.rates)

    @cached_property
    def memory_efficiency(self) -> float:
        """Fraction of this bandwidth that the kernels reach on average (the harmonic mean of their rates)."""
        average = len(self.found.rates) / sum(1 / rate for _, rate in self.found.rates)
        return average / self.memory_bytes_per_second

    @cached_property
    def kernel_bytes_per_second(self) -> float:
        """Bytes per second that the cost model assumes for element-wise kernels."""
        return self.memory_bytes_per_second * self.memory_efficiency

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The number formats that were measured, in the order of FORMATS."""
        measured = {p.number_format for p in self.found.products}
        return tuple(name for name in FORMATS if name in measured)

    @cached_property
    def main_format(self) -> str:
        """The number format whose shape curve stands for all."""
        usual = MAIN_FORMAT[self.found.kind]
        return usual if usual in self.formats else self.formats[0]

    @cached_property
    def products(self) -> ProductFit:
        """The fit of the matrix products in the main format."""
        return fit_products(
            self._of(self.main_format),
            launch_seconds=self.found.launch_seconds,
            memory_bytes_per_second=self.kernel_bytes_per_second,
        )

    @cached_property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s by number format."""
        launch_seconds = self.found.launch_seconds
        peaks = {name: fit_peak(self._of(name), self.products, launch_seconds=launch_seconds) for name in self.formats}
        return peaks | {self.main_format: self.products.peak_flops}

    @cached_property
    def links(self) -> Mapping[str, LinkFit]:
        """The links that were measured."""
        by_link = {link: [m for m in self.found.messages if m.link == link] for link in LINKS}
        return {link: fit_link(messages, self.found.launch_seconds) for link, messages in by_link.items() if messages}

    def _of(self, name: str) -> list[Product]:
        return [p for p in self.found.products if p.number_format == name]


def to_hardware(found: Measurements, name: str) -> Hardware:
    """The measured machine, every figure with its source."""
    fits = Fits(found)
    flops = {n: _rounded(peak) for n, peak in fits.peaks.items()}
    by_itemsize: dict[int, float] = {}
    for number_format in (n for n in flops if n != "tf32" or "float32" not in flops):
        by_itemsize.setdefault(FORMATS[number_format].itemsize, flops[number_format])
    return Hardware(
        name=name,
        peak_flops=tuple(by_itemsize.items()),
        memory_bytes_per_second=_rounded(fits.memory_bytes_per_second),
        memory_bytes=found.memory_bytes,
        launch_seconds=_rounded(found.launch_seconds),
        devices_per_node=found.devices_per_node,
        inside_node=_link(fits, "inside_node"),
        across_nodes=_link(fits, "across_nodes"),
        matmul_efficiency=_rounded(fits.products.efficiency),
        matmul_half_size=_rounded(fits.products.half_size),
        memory_efficiency=_rounded(fits.memory_efficiency),
        host_seconds=_rounded(found.host_seconds),
        reserved_bytes=found.reserved_bytes,
        dtype_flops=tuple(flops.items()),
        host=find_hardware(LIKE[found.kind]).host,
        sources=tuple(_Sources(fits).all()),
        **_taken(found),
    )


def _taken(found: Measurements) -> dict[str, Any]:
    """Figures that are not measured, from the machine of the catalogue that is most like it, where that states them."""
    like = find_hardware(LIKE[found.kind])
    stated = {figure for figure, _ in like.sources}
    names = ("attention_efficiency", "hides")
    return {name: getattr(like, name) for name in names if name in stated}


def _link(fits: Fits, link: str) -> Link:
    if link in fits.links:
        fitted = vars(fits.links[link].link)
        return Link(**{name: _rounded(value) for name, value in fitted.items()})
    if link == "inside_node" and fits.links:  # nodes of one rank
        return _link(fits, "across_nodes")
    return ABSENT[fits.found.kind][link][0]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class _Sources:
    """Where every figure comes from, in the order of the file: one text for one machine and software."""

    def __init__(self, fits: Fits) -> None:
        self.fits, self.found = fits, fits.found
        self.median = f"median of {self.found.samples}"
        self.where = f"autopar calibrate on {self.found.machine}, torch {torch.__version__}, {self._ranks()}"

    def all(self) -> Iterator[tuple[str, Source]]:
        """Pairs (figure, source)."""
        notes = NOTES[self.found.kind]
        kernels = ", ".join(name for name, _ in self.found.rates)
        yield "devices_per_node", self._measured(notes["devices_per_node"])
        yield "memory_bytes", self._measured(notes["memory_bytes"])
        yield "memory_bytes_per_second", self._measured(f"best of {kernels}, {self.median}")
        yield "launch_seconds", self._measured("x + 1 on 8 elements, one after the other")
        for figure in ("matmul_efficiency", "matmul_half_size"):
            yield figure, self._product()
        yield "memory_efficiency", self._measured(f"average of {kernels} over the best")
        yield from self._taken("attention_efficiency")
        yield "host_seconds", self._measured(notes["host_seconds"])
        yield from self._taken("hides")
        yield "reserved_bytes", self._measured("held besides tensors")
        for name in self.fits.peaks:
            yield f"peak_flops.{name}", self._peak(name)
        for link in LINKS:
            yield from self._link(link)
        for each in dataclasses.fields(Host):
            yield f"host.{each.name}", self._as_catalogue()

    def _taken(self, figure: str) -> Iterator[tuple[str, Source]]:
        if figure in _taken(self.found):
            yield figure, self._as_catalogue()

    def _as_catalogue(self) -> Source:
        return Source("guess", f"not measured; copied from {LIKE[self.found.kind]} of the catalogue")

    def _measured(self, text: str) -> Source:
        return Source("measured", f"{text}; {self.where}")

    def _product(self) -> Source:
        error = f"mean error {100 * self.fits.products.error:.1f} %"
        return Source("fitted", f"products in {self.fits.main_format}, {self.median}, {error}; {self.where}")

    def _peak(self, name: str) -> Source:
        if name == self.fits.main_format:
            return self._product()
        curve = f"the larger products, with the shape curve of {self.fits.main_format}"
        return Source("fitted", f"{curve}; {self.where}")

    def _link(self, link: str) -> Iterator[tuple[str, Source]]:
        fit = self.fits.links.get(link)
        figures = {"bandwidth_bytes_per_second": RINGS, "latency_seconds": RINGS}
        if fit is None:
            for figure in figures:
                yield f"{link}.{figure}", self._guess(link)
            return
        gains = {"exchange_gain": ("all_to_all",), "send_gain": ("send",)}
        for figure, collectives in (figures | gains).items():
            errors = ", ".join(f"{c} {100 * fit.errors[c]:.1f} %" for c in collectives)
            yield (f"{link}.{figure}", Source("fitted", f"{self.median}, mean error of {errors}; {self.where}"))

    def _guess(self, link: str) -> Source:
        """The source of a link that was not measured: why it was not, and which link's figures it has."""
        if link == "inside_node" and self.fits.links:
            return Source("guess", "a node of the run had one rank; as across_nodes")
        told = ABSENT[self.found.kind][link][1]
        lack = "one rank" if self.found.local_ranks * self.found.nodes == 1 else "one node"
        return Source("guess", f"not measured, because the run had {lack}; assumed: {told}")

    def _ranks(self) -> str:
        count, nodes = self.found.local_ranks * self.found.nodes, self.found.nodes
        where = f" in {nodes} nodes" if nodes > 1 else ""
        return f"{count} {self.found.backend} ranks{where} at once" if count > 1 else "1 rank"


def curves(found: Measurements) -> dict[str, list[Row]]:
    """The measured points behind the figures, each with the prediction of the fitted formulas."""
    fits = Fits(found)
    return {"matmul": list(_matmul_rows(fits)), "collective": list(_collective_rows(fits))}


def _matmul_rows(fits: Fits) -> Iterator[Row]:
    for p in fits.found.products:
        predicted = product_seconds(
            p,
            replace(fits.products, peak_flops=fits.peaks[p.number_format]),
            launch_seconds=fits.found.launch_seconds,
            memory_bytes_per_second=fits.kernel_bytes_per_second,
        )
        yield {
            "dtype": p.number_format,
            "rows": p.m,
            "columns": p.n,
            "inner": p.k,
            "seconds": _rounded(p.seconds),
            "predicted_seconds": _rounded(predicted),
        }


def _collective_rows(fits: Fits) -> Iterator[Row]:
    for m in fits.found.messages:
        predicted = message_seconds(m, fits.links[m.link].link, fits.found.launch_seconds)
        yield {
            "name": m.collective,
            "link": m.link,
            "ranks": m.ranks,
            "bytes": m.bytes,
            "seconds": _rounded(m.seconds),
            "predicted_seconds": _rounded(predicted),
        }


def to_toml(found: Measurements, name: str) -> str:
    """The text of the hardware file."""
    return format_hardware(to_hardware(found, name), nodes=found.nodes, curves=curves(found))


# --- the file


def check_hardware_output(path: Path) -> None:
    """Raises AutoparError where the file could not be written, before anything is measured."""
    if path.suffix != ".toml" or not path.stem.isprintable():
        raise AutoparError(f"A hardware file is called NAME.toml, not {path.name!r}.")
    check_output(path)
