"""The roofline: what ops reach, under what the device could give them; both scales logarithmic.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar import units
from autopar.views.markup import Markup, join, tag
from autopar.views.page import RooflinePoint
from autopar.views.palette import PALETTE
from autopar.views.svg import Labels, Log, at_two_widths, bounds, drawing, line, text

LEFT, MARGIN, TOP, BOTTOM = 92.0, 30.0, 16.0, 400.0
COMPUTE_BOUND, MEMORY_BOUND = PALETTE[0], PALETTE[3]
NAMED = 12  # points, largest first, that get a label


def roof(intensity: float, peak_flops: float, memory_bytes_per_second: float) -> float:
    """FLOP/s that an op of this many FLOPs a byte can reach."""
    return min(peak_flops, intensity * memory_bytes_per_second)


def roofline(points: Sequence[RooflinePoint], peak_flops: float, memory_bytes_per_second: float) -> Markup:
    """Ops as dots whose areas are their seconds; empty where no op does arithmetic."""
    shown = [p for p in points if p.flops_per_byte > 0 and p.flops_per_second > 0]
    if not shown or peak_flops <= 0 or memory_bytes_per_second <= 0:
        return Markup("")
    shown.sort(key=lambda p: -p.seconds)
    dots = at_two_widths(lambda width: _picture(shown, peak_flops, memory_bytes_per_second, width))
    return join((dots, _table(shown, peak_flops, peak_flops / memory_bytes_per_second)))


def _picture(shown: Sequence[RooflinePoint], peak_flops: float, memory_bytes_per_second: float, width: float) -> Markup:
    ridge = peak_flops / memory_bytes_per_second
    low, high = bounds((ridge, *(p.flops_per_byte for p in shown)))
    across = Log(_below(low), 4 * high, LEFT, width - MARGIN)
    least = min(p.flops_per_second for p in shown)
    up = Log(_below(least), 4 * peak_flops, BOTTOM, TOP)
    children = (
        *_axes(across, up),
        *_roof_lines(across, up, peak_flops, memory_bytes_per_second),
        *_dots(shown, across, up, peak_flops, ridge),
    )
    return drawing("Roofline", BOTTOM + 48, *children, width=width)


def _below(value: float) -> float:
    return 10.0 ** math.floor(math.log10(value) - 0.1)


def _axes(across: Log, up: Log) -> Iterator[Markup]:
    for value in across.ticks():
        x = across(value)
        yield line(x, TOP, x, BOTTOM, class_="grid")
        yield text(x, BOTTOM + 18, f"{value:g}", class_="small", text_anchor="middle")
    for value in up.ticks():
        y = up(value)
        yield line(LEFT, y, across.stop, y, class_="grid")
        words = units.format_flops(value)
        yield text(LEFT - 8, y + 4, words, class_="small", text_anchor="end")
    words = "FLOPs per byte of device memory"
    yield text((LEFT + across.stop) / 2, BOTTOM + 40, words, class_="small", text_anchor="middle")


def _roof_lines(across: Log, up: Log, peak: float, bandwidth: float) -> Iterator[Markup]:
    ridge = peak / bandwidth
    start = max(across.low, up.low / bandwidth)
    x, y = across(ridge), up(peak)
    yield line(across(start), up(start * bandwidth), x, y, class_="roof")
    yield line(x, y, across.stop, y, class_="roof")
    words = f"peak {units.format_flops(peak)}"
    yield text(x - 10, y + 4, words, class_="small strong", text_anchor="end")
    words = f"memory {units.format_rate(bandwidth)}"
    middle = math.sqrt(start * ridge)
    yield text(across(middle) - 10, up(middle * bandwidth) - 6, words, class_="small strong", text_anchor="end")


def _dots(points: Sequence[RooflinePoint], across: Log, up: Log, peak: float, ridge: float) -> Iterator[Markup]:
    largest = max(point.seconds for point in points) or 1.0
    placed = [
        (p, across(p.flops_per_byte), up(p.flops_per_second), 4 + 10 * math.sqrt(p.seconds / largest)) for p in points
    ]
    labels = Labels((LEFT, TOP, across.stop, BOTTOM))
    for step in range(200):  # the roof is a line that labels stay off
        intensity = across.low * (across.high / across.low) ** (step / 200)
        labels.block(across(intensity), up(max(up.low, roof(intensity, peak, peak / ridge))), 4)
    for _, x, y, radius in placed:
        labels.block(x, y, radius * 0.8)
    for point, x, y, radius in placed:
        colour = COMPUTE_BOUND if point.flops_per_byte >= ridge else MEMORY_BOUND
        title = tag("title", _title(point))
        yield tag("circle", title, cx=x, cy=y, r=radius, fill=colour.fill, class_="dot")
    for point, x, y, radius in placed[:NAMED]:
        label = labels.place(x, y, radius, point.name)
        if label is not None:
            yield label


def _title(point: RooflinePoint) -> str:
    rate, seconds = units.format_flops(point.flops_per_second), units.format_seconds(point.seconds)
    return f"{point.name}: {point.flops_per_byte:.3g} FLOPs a byte, {rate}, {seconds}"


def _table(points: Sequence[RooflinePoint], peak: float, ridge: float) -> Markup:
    """The points of the roofline as a table, for readers who cannot see the dots or want exact numbers."""
    head = ("op", "FLOPs per byte", "reaches", "of the roof", "time in a step", "bound by")
    rows = (_table_row(p, peak, ridge) for p in points)
    header = tag("tr", *(tag("th", words, scope="col") for words in head))
    table = tag("table", tag("thead", header), tag("tbody", join(rows)))
    return tag("details", tag("summary", "The ops as numbers"), tag("div", table, class_="scroll"))


def _table_row(point: RooflinePoint, peak: float, ridge: float) -> Markup:
    ceiling = roof(point.flops_per_byte, peak, peak / ridge)
    figures = (
        f"{point.flops_per_byte:.3g}",
        units.format_flops(point.flops_per_second),
        units.format_share(point.flops_per_second, ceiling),
        units.format_seconds(point.seconds),
    )
    cells = (tag("td", words, class_="number") for words in figures)
    binds = "arithmetic" if point.flops_per_byte >= ridge else "memory"
    return tag("tr", tag("td", point.name), *cells, tag("td", binds))
