"""Scripts whose loss asks functions that keep their results, and that read or write globals."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tests.support.scripts import Scaled, Script, squares

TABLE: dict[int, float] = {}
SHIFT, COUNT, SCALE, WEIGHT = None, 0, 1.0, 1.0


@functools.cache
def table(n: int) -> float:
    if n not in TABLE:
        TABLE[n] = n / 3
    return TABLE[n]


@functools.lru_cache
def shift() -> float:
    global SHIFT
    if SHIFT is None:
        SHIFT = 2.5
    return SHIFT


@functools.lru_cache
def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT


@functools.lru_cache
def scale() -> float:
    return SCALE


@functools.lru_cache
def weights(n: int) -> Tensor:
    return torch.arange(1.0, n + 1, dtype=torch.float64) * WEIGHT


def by_table(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * table(2)


def by_shift(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * shift()


def by_count(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * count()


def by_scale(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * scale()


def by_weights(out: Tensor, y: Tensor) -> Tensor:
    return squares(out * weights(3), y)


def begin(model: Any, i: int) -> None:
    """Before the first step: as if nothing had been asked."""
    if i == 0:
        TABLE.clear()
        globals().update(SHIFT=None, COUNT=0, SCALE=1.0, WEIGHT=1.0)
        for function in (table, shift, count, scale, weights):
            function.cache_clear()


def overwrite(model: Any, i: int) -> None:
    """Writes into the dict that a function fills, whose result Python keeps."""
    begin(model, i)
    TABLE[2] = 10.0 * i


def rescale(model: Any, i: int) -> None:
    """Changes globals before each step, and empties the caches of what reads them."""
    begin(model, i)
    globals().update(SCALE=1.0 + i % 3, WEIGHT=1.0 + i % 3)
    scale.cache_clear()
    weights.cache_clear()


def rescale_late(model: Any, i: int) -> None:
    """Empties caches before step 1 alone, though the globals change before each step."""
    begin(model, i)
    globals().update(SCALE=1.0 + i, WEIGHT=1.0 + i)
    if i == 1:
        scale.cache_clear()
        weights.cache_clear()


def rescale_back(model: Any, i: int) -> None:
    """Changes globals and empties caches before step 1; gives the globals back without that before step 3."""
    begin(model, i)
    globals().update(SCALE=2.0 if i in (1, 2) else 1.0, WEIGHT=2.0 if i in (1, 2) else 1.0)
    if i == 1:
        scale.cache_clear()
        weights.cache_clear()


def ask_early(model: Any, i: int) -> None:
    """Asks plainly before the first step, after which the global changes."""
    begin(model, i)
    assert scale() == 1.0
    globals().update(SCALE=2.0)


CACHES = {
    "cached function that fills a dict": Script(Scaled, by_table, begin),
    "cached function whose dict is written": Script(Scaled, by_table, overwrite),
    "cached function that sets its own global": Script(Scaled, by_shift, begin),
    "cached function that counts in a global": Script(Scaled, by_count, begin),
    "cached number emptied after each change": Script(Scaled, by_scale, rescale),
    "cached tensor emptied after each change": Script(Scaled, by_weights, rescale),
    "cached number emptied after one change": Script(Scaled, by_scale, rescale_late),
    "cached tensor emptied after one change": Script(Scaled, by_weights, rescale_late),
    "cached number whose global goes back": Script(Scaled, by_scale, rescale_back),
    "cached tensor whose global goes back": Script(Scaled, by_weights, rescale_back),
    "cached number that was asked before": Script(Scaled, by_scale, ask_early),
}
