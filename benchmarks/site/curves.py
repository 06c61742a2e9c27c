"""Pictures of measured curves, from the files that benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.views.markup import Markup, tag
from autopar.views.svg import Linear, bounds, line, text
from benchmarks.site.drawing import COLOURS, MARGIN, WIDTH, centred, picture

_BENCHMARKS = Path(__file__).parents[1]
_HEIGHT, _LEFT, _TOP, _BOTTOM = 300.0, 44.0, 44.0, 40.0
_LETTER = 7.0  # width of a letter of the key
_DASHES = ("", "", "5 4", "")  # the third curve of local steps lies on the second
_SECOND = "2 3"  # dashes of curves whose colour comes again
_KEY_LINE = 18.0  # height of a further line of the key


def local_steps() -> str:
    """The loss of a small GPT by step, under data parallelism and for replicas that synchronise every 8 steps."""
    return _losses(
        "local_steps",
        "step",
        "loss in nats per byte, mean over the replicas",
        "Loss of a byte-level GPT on four ranks over {} steps: data parallelism, and replicas that synchronise every "
        "eight steps; all end below the entropy of single bytes",
    )


def async_server() -> str:
    """The loss of a small GPT by step, under data parallelism and with an asynchronous server."""
    return _losses(
        "async_server",
        "step",
        "loss in nats per byte, mean over the replicas",
        "Loss of a byte-level GPT on four ranks over {} steps: data parallelism, and replicas that exchange with an "
        "asynchronous server, up to 0 and 2 exchanges ahead; all end below the entropy of single bytes",
    )


def versions() -> str:
    """The loss of a small GPT by update, under 1F1B with a flush at every update and under schedules without."""
    return _losses(
        "versions",
        "update",
        "loss in nats per byte, mean over the rows of 32 updates",
        "Loss of a byte-level GPT in four stages over {} updates: 1F1B with a flush at every update, and schedules "
        "without a flush; all end below the entropy of single bytes",
    )


def delays() -> str:
    """The loss of a small GPT by update, under everything that delays gradients."""
    return _losses(
        "delays",
        "update",
        "loss in nats per byte, mean over the rows of 32 updates",
        "Loss of a byte-level GPT on four ranks over {} updates: 1F1B with a flush at every update, schedules without "
        "one, and replicas that synchronise every four steps or exchange with a server; all end below the entropy of "
        "single bytes",
    )


def soak() -> str:
    """The resident memory of four ranks by minute, over lives that end when a rank is killed."""
    document = json.loads((_BENCHMARKS / "soak" / "memory.json").read_text())
    ranks: dict[str, list[list[list[float]]]] = document["megabytes"]
    points = [point for lives in ranks.values() for life in lives for point in life]
    across = Linear(0, max(minute for minute, _ in points), _LEFT, WIDTH - MARGIN)
    down = Linear(0, 1.2 * max(size for _, size in points), _HEIGHT - _BOTTOM, _TOP)
    kills = document["kills_minutes"]
    below = f"resident memory in MB; grey lines: {len(kills)} kills"
    return picture(
        document["label"],
        _HEIGHT,
        *_axes(across, down, "minute", below),
        *(line(across(x), _TOP, across(x), _HEIGHT - _BOTTOM, class_="pale") for x in kills),
        *_lives(ranks, across, down),
    )


def _lives(ranks: dict[str, list[list[list[float]]]], across: Linear, down: Linear) -> Iterator[Markup]:
    x = _LEFT
    for number, (name, lives) in enumerate(ranks.items()):
        colour = COLOURS[number].fill
        for life in lives:
            yield _curve([(across(minute), down(size)) for minute, size in life], colour, "")
        yield _curve([(x, 22), (x + 20, 22)], colour, "")
        yield text(x + 26, 26, name, class_="small")
        x += 43 + _LETTER * len(name)


def _losses(folder: str, unit: str, below: str, label: str) -> str:
    """The curves that a benchmark wrote.

    Args:
        folder: name of the benchmark's folder.
        unit: what the curves go by.
        below: words under the picture.
        label: words for who cannot see it, with a place for the number of units.
    """
    document = json.loads((_BENCHMARKS / folder / "losses.json").read_text())
    curves: dict[str, list[float]] = document["losses_nats"]
    entropy, steps = document["entropy_nats"], document["steps_of_a_point"]
    low, high = bounds([entropy, *(loss for curve in curves.values() for loss in curve)])
    count = max(map(len, curves.values()))
    across = Linear(0, count * steps, _LEFT, WIDTH - MARGIN)
    key = list(_key(list(curves)))
    further = key[-1][1] - key[0][1]
    down = Linear(low, high, _HEIGHT + further - _BOTTOM, _TOP + further)
    return picture(
        label.format(count * steps),
        _HEIGHT + further,
        *_axes(across, down, unit, below, further),
        line(_LEFT, down(entropy), WIDTH - MARGIN, down(entropy), class_="pale"),
        text(WIDTH - MARGIN, down(entropy) - 5, "entropy of single bytes", class_="small", text_anchor="end"),
        *_drawn(curves, across, down, steps, key),
    )


def _key(names: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Where the words of the key stand, from left to right and then in the next line."""
    x, y = _LEFT, 26.0
    for name in names:
        width = 43 + _LETTER * len(name)
        if x + width > WIDTH + 17:  # the gap after the last may be cut off
            x, y = _LEFT, y + _KEY_LINE
        yield x, y
        x += width


def _axes(across: Linear, down: Linear, unit: str, below: str, further: float = 0.0) -> Iterator[Markup]:
    """The axes of a picture that is higher than usual by so much."""
    height = _HEIGHT + further
    yield line(_LEFT, _TOP + further, _LEFT, height - _BOTTOM, class_="edge")
    yield line(_LEFT, height - _BOTTOM, WIDTH - MARGIN, height - _BOTTOM, class_="edge")
    for tick in across.ticks(5)[:-1]:
        yield centred(across(tick), height - _BOTTOM + 16, f"{tick:g}")
    for tick in down.ticks(5):
        yield text(_LEFT - 6, down(tick) + 4, f"{tick:g}", class_="small", text_anchor="end")
    yield text(WIDTH - MARGIN, height - _BOTTOM + 16, unit, class_="small", text_anchor="end")
    yield text(MARGIN, height - 8, below, class_="small")


def _drawn(
    curves: dict[str, list[float]], across: Linear, down: Linear, steps: int, key: Sequence[tuple[float, float]]
) -> Iterator[Markup]:
    for number, ((name, losses), (x, y)) in enumerate(zip(curves.items(), key, strict=True)):
        colour = COLOURS[number % len(COLOURS)].fill
        dashes = _DASHES[number % len(_DASHES)] if number < len(COLOURS) else _SECOND
        middles = [(across((i + 0.5) * steps), down(loss)) for i, loss in enumerate(losses)]
        yield _curve(middles, colour, dashes)
        yield _curve([(x, y - 4), (x + 20, y - 4)], colour, dashes)
        yield text(x + 26, y, name, class_="small")


def _curve(points: Sequence[tuple[float, float]], colour: str, dashes: str) -> Markup:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = {"stroke_dasharray": dashes} if dashes else {}
    return tag("polyline", points=places, fill="none", stroke=colour, stroke_width=2, **style)
