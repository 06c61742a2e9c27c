"""The constants of the cost model's formulas, fitted to measured curves.

    product      launch + flops / (peak * e(m) * e(n) * e(k) * efficiency),  e(x) = x / (x + half)
    collective   launches + hops * latency + sent bytes / (bandwidth * gain)

`autopar.cost_model.compute` and `.collectives` have the same formulas; gain is 1 except for all-to-all and send. Both
fits minimize the sum of squares of predicted / measured - 1. A point of a microsecond therefore counts as much as one
of a second. A point that a disturbance made ten times slower hardly counts, because its ratio is close to 0 for any
fit. Reports show the mean of the absolute values of these errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from autopar.calibrate.measure import Message, Product
from autopar.cost_model import CPU_GLOO, Link, collective_seconds

RINGS = ("all_reduce", "all_gather", "reduce_scatter")  # what latency and bandwidth are fitted to
ROUNDING = 1e-12  # of a sum of squared relative errors


@dataclass(frozen=True)
class LinkFit:
    """A link, and the mean relative error of each collective's points."""

    link: Link
    errors: Mapping[str, float]


@dataclass(frozen=True)
class ProductFit:
    """Matrix products of one number format.

    Attributes:
        peak_flops: FLOP/s of a product of infinite extents, or of a measured one that was faster.
        efficiency: fraction of `peak_flops` that a product of infinite extents reaches.
        half_size: extent of one dim at which the rate is half of that.
        error: mean relative error of the products that are not bound by memory.
    """

    peak_flops: float
    efficiency: float
    half_size: float
    error: float


# --- links


def message_seconds(message: Message, link: Link, launch_seconds: float) -> float:
    """Seconds that the cost model predicts for the collective of a message."""
    whole, part = message.bytes, message.bytes // message.ranks
    before, after = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(
        message.collective, (whole, whole)
    )
    return collective_seconds(
        message.collective,
        before_bytes=before,
        after_bytes=after,
        ranks=message.ranks,
        link=link,
        hardware=dataclasses.replace(CPU_GLOO, launch_seconds=launch_seconds),
    )


def fit_link(messages: Sequence[Message], launch_seconds: float) -> LinkFit:
    """The link that all these messages crossed.

    Latency and bandwidth are fitted to the collectives in `RINGS`. The gains of all-to-all and send are fitted
    afterwards.
    """
    rings = [_terms(m, launch_seconds) for m in messages if m.collective in RINGS]
    latency, per_byte = fit_two(*([getattr(t, f) for t in rings] for f in _Terms._fields))
    if not per_byte:  # nothing grew with size: the largest message bounds it
        largest = max(rings, key=lambda term: term.sent_bytes)
        per_byte = largest.seconds / largest.sent_bytes
    gains = {
        name: per_byte / _own_per_byte(own, latency)
        for collective, name in (("all_to_all", "exchange_gain"), ("send", "send_gain"))
        if (own := [_terms(m, launch_seconds) for m in messages if m.collective == collective])
    }
    link = Link(1 / per_byte, latency, **gains)
    errors = {
        name: _error([(message_seconds(m, link, launch_seconds), m.seconds) for m in group])
        for name in dict.fromkeys(m.collective for m in messages)
        if (group := [m for m in messages if m.collective == name])
    }
    return LinkFit(link, MappingProxyType(errors))


class _Terms(NamedTuple):
    """One message in the linear formula: seconds = hops * latency + sent bytes / bandwidth."""

    hops: float
    sent_bytes: float
    seconds: float


def _terms(message: Message, launch_seconds: float) -> _Terms:
    """Reads the coefficients off the cost model's formula; the launch is taken from the time."""
    fixed = message_seconds(message, Link(math.inf, 0.0), launch_seconds)
    hops = message_seconds(message, Link(math.inf, 1.0), launch_seconds) - fixed
    sent_bytes = message_seconds(message, Link(1.0, 0.0), launch_seconds) - fixed
    return _Terms(hops, sent_bytes, _without(fixed, message.seconds))


def _own_per_byte(terms: Sequence[_Terms], latency: float) -> float:
    """Seconds per byte of messages whose latency is given: by the larger half, where it matters less."""
    larger = sorted(terms, key=lambda term: term.sent_bytes)[len(terms) // 2 :]
    ratios = np.array([t.sent_bytes / _without(t.hops * latency, t.seconds) for t in larger])
    return float(ratios.sum() / (ratios**2).sum())


def _without(part: float, seconds: float) -> float:
    """The rest of a time; at least a tenth, where noise makes the part look like all of it."""
    return max(seconds - part, 0.1 * seconds)


def fit_two(u: Sequence[float], v: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of (a u + b v) / seconds - 1, with neither a nor b below zero."""
    columns = np.array([u, v], dtype=float) / np.array(seconds, dtype=float)  # 2 rows
    scale = columns.max(axis=1, keepdims=True)
    both, *_ = np.linalg.lstsq((columns / scale).T, np.ones(len(seconds)), rcond=None)
    if (both >= 0).all():
        a, b = both / scale[:, 0]
        return float(a), float(b)
    alone = columns.sum(axis=1) / (columns**2).sum(axis=1)
    left = ((alone[:, None] * columns - 1) ** 2).sum(axis=1)
    return (float(alone[0]), 0.0) if left[0] < left[1] else (0.0, float(alone[1]))


# --- matrix products


def product_seconds(
    product: Product, fit: ProductFit, *, launch_seconds: float, memory_bytes_per_second: float
) -> float:
    """Predicted seconds of a product of this shape."""
    reached = fit.peak_flops * fit.efficiency / _slowdown(product, fit.half_size)
    return launch_seconds + max(product.flops / reached, product.traffic_bytes / memory_bytes_per_second)


def fit_products(products: Sequence[Product], *, launch_seconds: float, memory_bytes_per_second: float) -> ProductFit:
    """The peak and the shape curve of one number format."""
    bound = [p for p in products if _is_bound_by_work(p, launch_seconds, memory_bytes_per_second)]
    bound = bound or list(products)

    def loss(half: float) -> float:
        rates = _exact_rates(half, bound, launch_seconds)
        return float(((rates / _best_rate(rates) - 1) ** 2).sum())

    half = minimise(loss)
    endless = _best_rate(_exact_rates(half, bound, launch_seconds))
    peak = max(endless, _fastest(products))
    fit = ProductFit(peak, endless / peak, half, 0.0)
    pairs = [
        (
            product_seconds(p, fit, launch_seconds=launch_seconds, memory_bytes_per_second=memory_bytes_per_second),
            p.seconds,
        )
        for p in bound
    ]
    return dataclasses.replace(fit, error=_error(pairs))


def fit_peak(products: Sequence[Product], like: ProductFit, *, launch_seconds: float) -> float:
    """The peak of another number format, with the efficiency and the shape curve of `like`."""
    larger = _larger(products)
    return _best_rate(_exact_rates(like.half_size, larger, launch_seconds)) / like.efficiency


def _exact_rates(half: float, products: Sequence[Product], launch_seconds: float) -> np.ndarray:
    """The FLOP/s of endless extents at which each product would be predicted exactly."""
    return np.array([p.flops * _slowdown(p, half) / _without(launch_seconds, p.seconds) for p in products])


def _best_rate(rates: np.ndarray) -> float:
    """The FLOP/s r of the least squares of rates / r - 1."""
    return float((rates**2).sum() / rates.sum())


def _fastest(products: Sequence[Product]) -> float:
    return max(p.flops / p.seconds for p in _larger(products))


def _larger(products: Sequence[Product]) -> list[Product]:
    """The products with at least an eighth of the largest one's work."""
    largest = max(product.flops for product in products)
    return [p for p in products if 8 * p.flops >= largest]


def _slowdown(product: Product, half: float) -> float:
    return math.prod(1 + half / extent for extent in (product.m, product.n, product.k))


def _is_bound_by_work(product: Product, launch_seconds: float, bandwidth: float) -> bool:
    """Whether neither its launch nor its memory traffic can be most of its time."""
    return max(2 * launch_seconds, 2 * product.traffic_bytes / bandwidth) < product.seconds


def minimise(loss: Callable[[float], float], largest: float = 1e5) -> float:
    """The x in [0, largest] with the least loss: the best point of a geometric grid, refined by golden section.

    If several points of the grid have the least loss, the smallest of them is refined.
    """
    grid = [0.0, *(float(x) for x in np.geomspace(1e-3, largest, 161))]
    losses = [loss(x) for x in grid]
    place = next(i for i, each in enumerate(losses) if each <= min(losses) + ROUNDING)
    low, high = grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(100):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return min((grid[place], (low + high) / 2), key=loss)


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean([abs(predicted / measured - 1) for predicted, measured in pairs]))
