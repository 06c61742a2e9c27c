"""Pictures of time and machines: schedules, stages, cuts, a roofline, what backward keeps, nodes and axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autopar import units
from autopar.cost_model import find_hardware
from autopar.cost_model.machines.hardware import Hardware
from autopar.ir import Mesh, Pipeline
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.views.gantt import KINDS
from autopar.views.markup import Markup, tag
from autopar.views.svg import Linear, line, rect, text
from benchmarks.site.drawing import COLOURS, MARGIN, WIDTH, Box, arrow, centred, columns, picture

FORWARD, BACKWARD = 1.0, 2.0  # seconds of a rank's layers


# --- schedules


def simulated(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> Simulation:
    """A step of equal stages whose backward takes twice as long as their forward."""
    cuts = tuple(f"op{n}" for n in range(ranks * chunks - 1))
    stages = Pipeline(ranks, schedule, cuts)
    each = StageCosts(FORWARD / chunks, BACKWARD / chunks, BACKWARD / chunks / 2, saved_bytes=1 / chunks)
    return simulate(actions(stages, micro_batches), [each] * stages.stages)


def schedules() -> str:
    rows = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1))
    found = [(name, simulated(name, 4, 8, chunks)) for name, chunks in rows]
    longest = max(each.step_seconds for _, each in found)
    parts, y = [], MARGIN
    for name, each in found:
        idle = f"idle {100 * each.bubble_fraction:.0f} %, in flight {max(each.peak_bytes):g}"
        parts += [text(MARGIN, y + 12, name, class_="strong"), text(120, y + 12, idle, class_="small")]
        parts += _bars(each, y + 20, Linear(0, longest, MARGIN, WIDTH - MARGIN))
        y += 20 + each.ranks * 13 + 14
    kinds = {span.kind for _, each in found for span in each.spans}
    x = MARGIN
    for kind, (words, colour) in KINDS.items():
        if kind in kinds:
            parts += [rect(x, y, 12, 12, fill=colour.fill), text(x + 16, y + 11, words, class_="small")]
            x += 30 + 7 * len(words)
            if x > WIDTH / 2:
                x, y = MARGIN, y + 20
    label = (
        "Four ranks run eight micro-batches under the schedules gpipe, 1f1b, interleaved (two chunks) and zb: a row is "
        "a rank, a bar a forward or a backward, and gaps are idle time"
    )
    return picture(label, y + 24, *parts)


def _bars(each: Simulation, y: float, scale: Linear) -> Iterator[Markup]:
    for span in sorted(each.spans, key=lambda span: (span.rank, span.begin_seconds)):
        if span.kind in KINDS:
            x, stop = scale(span.begin_seconds), scale(span.end_seconds)
            yield rect(x, y + span.rank * 13, stop - x, 11, class_="cell", fill=KINDS[span.kind][1].fill)


# --- pipeline stages


def pipeline() -> str:
    mesh = Mesh.parse("pp=2,dp=2,tp=2")
    parts, size = [], 54.0
    for stage in range(2):
        left = MARGIN + stage * 214
        parts += [
            rect(left, MARGIN, 178, 176, rx=6, class_="box"),
            centred(left + 89, MARGIN + 20, f"stage {stage}", "strong"),
            centred(left + 89, MARGIN + 38, "its mesh: dp=2,tp=2"),
        ]
    for rank in range(mesh.size):
        pp, dp, tp = mesh.coordinates(rank)
        x, y = MARGIN + 30 + pp * 214 + tp * 64, MARGIN + 50 + dp * 62
        parts.append(rect(x, y, size, size, rx=5, fill=COLOURS[pp].fill))
        parts.append(centred(x + size / 2, y + 33, f"rank {rank}", "", fill=COLOURS[pp].ink))
    for dp in range(2):
        y = MARGIN + 50 + dp * 62 + 27
        parts.append(arrow(MARGIN + 180, y, MARGIN + 212, y))
    parts.append(centred(WIDTH / 2, 210, "equal coordinates on dp and tp send to each other"))
    label = (
        "Eight ranks of the mesh pp=2,dp=2,tp=2: every stage has a mesh of its own, and ranks with equal "
        "coordinates on dp and tp send activations to each other"
    )
    return picture(label, 224, *parts)


# --- cuts


BLOCKS = (1.0, *(3.0,) * 9, 8.0)  # seconds of an embedding, nine layers, and a head with its loss


def _slowest(cuts: Sequence[int]) -> float:
    return max(sum(part) for part in _parts(cuts))


def _parts(cuts: Sequence[int]) -> list[tuple[float, ...]]:
    bounds = (0, *cuts, len(BLOCKS))
    return [BLOCKS[a:b] for a, b in itertools.pairwise(bounds)]


def balanced(stages: int) -> tuple[int, ...]:
    """The cuts whose slowest stage is the fastest, by trying them all.

    >>> balanced(3)
    (4, 8)
    """
    every = itertools.combinations(range(1, len(BLOCKS)), stages - 1)
    return min(every, key=_slowest)


def pipeline_search() -> str:
    rows = (("three layers each", (4, 7)), ("balanced", balanced(3)))
    parts, y = [], MARGIN
    widest = sum(BLOCKS) + 2
    for title, cuts in rows:
        step = _step_seconds(cuts)
        slowest = f"slowest stage {_slowest(cuts):g} s, a step of 8 micro-batches {step:g} s"
        parts += [text(MARGIN, y + 12, title, class_="strong"), text(MARGIN, y + 30, slowest, class_="small")]
        x, scale = MARGIN, (WIDTH - 2 * MARGIN) / widest
        for number, stage in enumerate(_parts(cuts)):
            for seconds in stage:
                width = seconds * scale
                parts.append(rect(x, y + 40, width, 34, class_="cell", fill=COLOURS[number].fill))
                x += width
            x += scale
        y += 96
    label = (
        "An embedding, nine layers and a head cut into three stages: with three layers each the last stage is the "
        "slowest by its head; balanced cuts make the step shorter"
    )
    return picture(label, y, *parts)


def _step_seconds(cuts: Sequence[int]) -> float:
    costs = [StageCosts(sum(stage) / 3, sum(stage) * 2 / 3, 0.0) for stage in _parts(cuts)]
    named = Pipeline(len(costs), "1f1b", tuple(f"op{n}" for n in cuts))
    return round(simulate(actions(named, 8), costs).step_seconds, 1)


# --- the cost model


def cost_model() -> str:
    """The roof of one device, and the worked example of the page as a dot."""
    hardware = find_hardware("h100")
    peak, memory = hardware.flops_per_second(2), hardware.memory_bytes_per_second
    flops = 2 * 8192 * 4096 * 14336 / 8
    moved_bytes = 2 * (8192 * 4096 + 4096 * 1792 + 8192 * 1792)
    left, right, top, bottom = 60.0, WIDTH - 30, 36.0, 210.0
    x, y = Linear(0, 4, left, right), Linear(12, 15.2, bottom, top)  # powers of ten
    knee = peak / memory
    roof = [(1.0, memory), (knee, peak), (1e4, peak)]
    places = " ".join(f"{x(math.log10(a)):.1f},{y(math.log10(b)):.1f}" for a, b in roof)
    dot = flops / moved_bytes
    parts = [
        tag("polyline", points=places, class_="bold"),
        *_ticks(x, y, left, bottom),
        centred(x(3.2), y(math.log10(peak)) - 10, units.format_flops(peak)),
        text(x(1.0) - 54, y(13.4) - 26, units.format_rate(memory), class_="small"),
        tag("circle", cx=x(math.log10(dot)), cy=y(math.log10(peak)), r=6, fill=COLOURS[0].fill),
        centred(x(math.log10(dot)), y(math.log10(peak)) + 24, "mlp.up", "strong"),
        centred(x(math.log10(dot)), y(math.log10(peak)) + 40, _seconds(flops, hardware)),
        text(MARGIN, 22, "FLOP/s", class_="small"),
        centred((left + right) / 2, bottom + 38, "FLOPs per byte of memory moved"),
    ]
    label = (
        f"The roofline of an H100: below {knee:.0f} FLOPs per byte an op is bound by memory, above by arithmetic. The "
        "worked example, mlp.up of Llama-3 8B, lies far to the right, bound by arithmetic"
    )
    return picture(label, bottom + 50, *parts)


def _seconds(flops: float, hardware: Hardware) -> str:
    return f"at least {units.format_seconds(flops / hardware.flops_per_second(2))}"


def _ticks(x: Linear, y: Linear, left: float, bottom: float) -> Iterator[Markup]:
    yield line(left, bottom, x(4), bottom, class_="edge")
    yield line(left, bottom, left, y(15.2), class_="edge")
    for power in range(5):
        yield centred(x(power), bottom + 18, f"{10**power:,}")
    for power in (12, 13, 14, 15):
        words = units.format_flops(10.0**power).replace("FLOP/s", "").replace(".00", "")
        yield text(left - 6, y(power) + 4, words, class_="small", text_anchor="end")


# --- recomputation


CHAIN = ("norm", "up", "gelu", "down")  # ops; op i reads tensor i and makes tensor i + 1
TENSORS = ("x", "n", "h", "g")
SAVED = (True, True, True, True)  # each is read by the backward of the op behind it


def kept(recomputed: frozenset[str]) -> tuple[bool, ...]:
    """Whether each tensor of the chain stays in memory until backward.

    A tensor that a recomputed op makes is never kept; any other is, if an op saves it or a recomputed op reads it.

    >>> kept(frozenset({"gelu"}))
    (True, True, True, False)
    """
    made = (False, *(op in recomputed for op in CHAIN[:-1]))
    read = tuple(op in recomputed for op in CHAIN)
    everything = recomputed == frozenset(CHAIN)
    return tuple(not made[n] and (read[n] or (SAVED[n] and not (everything and n > 0))) for n in range(len(TENSORS)))


def recomputation() -> str:
    rows = ((), ("gelu",), ("norm", "gelu"), CHAIN)
    left, step, y = 128.0, 72.0, 78.0
    parts = [
        text(MARGIN, 58, "recomputed", class_="small"),
        centred(left + step * 1.5, 24, "kept for backward", "strong"),
    ]
    for n, name in enumerate(TENSORS):
        parts.append(centred(left + step * n, 58, name, "strong"))
        if n + 1 < len(TENSORS):
            parts.append(arrow(left + step * n + 12, 54, left + step * (n + 1) - 12, 54))
            parts.append(centred(left + step * (n + 0.5), 46, CHAIN[n]))
    for ops in rows:
        words = "all ops" if ops == CHAIN else ", ".join(ops) or "nothing"
        parts.append(text(MARGIN, y + 18, words, class_="strong"))
        for n, stays in enumerate(kept(frozenset(ops))):
            fill = {"fill": COLOURS[2].fill, "class_": "cell"} if stays else {"class_": "empty"}
            parts.append(rect(left + step * n - 24, y, 48, 26, rx=4, **fill))
        y += 38
    label = (
        "Which of the tensors x, n, h and g of the chain norm, up, gelu, down stay in memory until backward, where "
        "nothing, gelu, norm and gelu, or all ops are recomputed"
    )
    return picture(label, y + 4, *parts)


# --- hardware


def hardware() -> str:
    """Two nodes of four GPUs under dp=2,tp=4: the last axis lies inside a node."""
    mesh, size = Mesh.parse("dp=2,tp=4"), 84.0
    parts = []
    for node in range(2):
        y = 40.0 + 118 * node
        parts.append(rect(MARGIN, y, WIDTH - 2 * MARGIN, 84, rx=6, class_="box"))
        parts.append(text(MARGIN + 10, y + 18, f"node {node}", class_="strong"))
        parts.append(centred(WIDTH / 2 + 20, y + 18, "tp: one group of four, over NVLink"))
    for rank in range(mesh.size):
        dp, tp = mesh.coordinates(rank)
        x, y = MARGIN + 20 + tp * (size + 8), 66.0 + 118 * dp
        colour = COLOURS[tp]
        parts.append(rect(x, y, size, 44, rx=5, fill=colour.fill))
        parts.append(centred(x + size / 2, y + 27, f"rank {rank}", "", fill=colour.ink))
        if dp == 0:
            parts.append(line(x + size / 2, y + 58, x + size / 2, y + 92, class_="edge"))
    parts.append(centred(WIDTH / 2, 24, "dp=2,tp=4 on two nodes of four GPUs", "strong"))
    boxes = (Box("dp: four groups of two, over the NICs", ("each rank's own NIC or share of one",)),)
    drawn, bottom = columns(boxes, 256)
    label = (
        "Ranks 0 to 7 of the mesh dp=2,tp=4 on two nodes: groups of the last axis, tp, lie inside a node, and each "
        "group of dp has one rank in every node"
    )
    return picture(label, bottom + MARGIN, *parts, drawn)
