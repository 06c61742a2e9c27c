"""Pictures of bytes and of time lines: optimizers, segments of memory, communication that hides, an executor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.cost_model.items import TrainingState
from autopar.cost_model.optimizers import OPTIMIZERS
from autopar.cost_model.sizes import Sizes
from autopar.ir import Mesh, R, Tensor
from autopar.passes.cut_regions import cut_regions
from autopar.views.markup import Markup
from autopar.views.svg import Linear, rect, text
from benchmarks.accuracy.caching_allocator import LARGE_SEGMENT_BYTES, MIB, CachingAllocator
from benchmarks.site.drawing import COLOURS, LINE, MARGIN, WIDTH, arrow, centred, picture

# --- optimizers

SIDE = 1024  # of the matrix whose bytes are counted


def bytes_of_an_element(name: str) -> tuple[float, float, float]:
    """Bytes of the parameter, of its gradient and of the optimizer's states, for an element of a float32 matrix.

    >>> bytes_of_an_element("adamw")
    (4.0, 4.0, 8.0)
    """
    matrix = Tensor("w", ((SIDE,), (SIDE,)), (("",), ("",)), itemsize_bytes=4, needs_grad=True)
    sizes = Sizes(Mesh.of({"dp": 1}))
    states = TrainingState.parse(name).optimizer_bytes(matrix, (R,), sizes)
    return 4.0, 4.0, float(states) / SIDE**2


def optimizers() -> str:
    longest = max(sum(bytes_of_an_element(name)) for name in OPTIMIZERS)
    scale = Linear(0, longest, 134, WIDTH - 50)
    parts, y = [], 40.0
    for n, words in enumerate(("parameter", "gradient", "states")):
        x = 134 + 92 * n
        parts += [rect(x, 16, 13, 13, fill=COLOURS[n].fill), text(x + 18, 27, words, class_="small")]
    for name in OPTIMIZERS:
        parts.append(text(MARGIN, y + 17, name, class_="strong"))
        start = 0.0
        for n, size in enumerate(bytes_of_an_element(name)):
            width = scale(start + size) - scale(start)
            parts.append(rect(scale(start), y + 2, width, 22, class_="cell", fill=COLOURS[n].fill))
            start += size
        parts.append(text(scale(start) + 6, y + 17, f"{start:.3g}", class_="small"))
        y += 30
    parts.append(text(MARGIN, y + 16, "bytes of an element of a float32 matrix between steps", class_="small"))
    label = (
        "Bytes that training keeps for an element of a float32 matrix of 1,024 x 1,024: parameter and gradient take 4 "
        "each, the optimizer's states 8 under AdamW, about 2 in eight bits, about 1 in four bits, and none under SGD"
    )
    return picture(label, y + 30, *parts)


# --- reserved memory


def fragments() -> list[tuple[str, int, dict[str, tuple[int, int]]]]:
    """What torch's caching allocator has after each of three steps, by the model of it.

    Returns:
        Words for the step, MiB that are reserved, and for each tensor in use its address and size in MiB.
    """
    allocator, blocks, found = CachingAllocator(), dict[str, Any](), list[Any]()
    for words, freed, wanted in (
        ("A, B and C of 6 MiB", "", {"A": 6, "B": 6, "C": 6}),
        ("B is freed", "B", {}),
        ("D of 8 MiB", "", {"D": 8}),
    ):
        if freed:
            allocator.free(blocks.pop(freed))
        blocks |= {name: allocator.allocate(size * MIB) for name, size in wanted.items()}
        places = {name: (b.address // MIB, b.size_bytes // MIB) for name, b in blocks.items()}
        found.append((words, allocator.reserved_bytes // MIB, places))
    return found


def reserved_memory() -> str:
    steps = fragments()
    segment, most = LARGE_SEGMENT_BYTES // MIB, max(reserved for _, reserved, _ in steps)
    scale = Linear(0, most, MARGIN, WIDTH - MARGIN)
    parts, y = [], MARGIN
    for words, reserved, places in steps:
        used = sum(size for _, size in places.values())
        says = f"{used} MiB allocated, {reserved} MiB reserved"
        parts += [
            text(MARGIN, y + 12, words, class_="strong"),
            text(WIDTH - MARGIN, y + 12, says, class_="small", text_anchor="end"),
        ]
        for start in range(0, reserved, segment):
            x = scale(start) + 1
            parts.append(rect(x, y + 20, scale(start + segment) - x - 1, 34, rx=4, class_="box"))
        for name, (start, size) in places.items():
            x, colour = scale(start) + 3, COLOURS["ABCD".index(name)]
            parts.append(rect(x, y + 24, scale(start + size) - x - 1, 26, rx=3, fill=colour.fill))
            parts.append(centred(scale(start + size / 2), y + 42, name, "strong", fill=colour.ink))
        y += 70
    parts.append(text(MARGIN, y + 4, "frames are segments of 20 MiB; D does not fit into the gap", class_="small"))
    label = (
        "Three tensors of 6 MiB lie in a segment of 20 MiB; one is freed; a tensor of 8 MiB does not fit into the gap "
        "and takes a second segment, so that 40 MiB are reserved for 20 MiB allocated"
    )
    return picture(label, y + 18, *parts)


# --- communication that hides


class Span(NamedTuple):
    """A piece of work on a time line.

    Attributes:
        lane: 0 for compute, 1 for the network.
        start: when it begins.
        length: how long it takes.
        colour: number of its colour.
    """

    lane: int
    start: float
    length: float
    colour: int


LAYERS, PIECES = 4, 4
COMPUTE, SENDING = 3.0, 2.0  # seconds of a layer's work and of its messages


def gathers() -> list[Span]:
    """Layers whose parameters are gathered while the layer before runs."""
    spans = [Span(1, 0.0, SENDING, 0), Span(0, SENDING, COMPUTE, 0)]
    for layer in range(1, LAYERS):
        begun = spans[-1].start
        start = begun + max(COMPUTE, SENDING)
        spans += [Span(1, begun, SENDING, layer), Span(0, start, COMPUTE, layer)]
    return spans


def reductions() -> list[Span]:
    """Backward of layers, each of whose gradients are sent as soon as they are complete."""
    spans, free = [], 0.0
    for layer in range(LAYERS):
        end = (layer + 1) * COMPUTE
        free = max(free, end)
        spans += [Span(0, end - COMPUTE, COMPUTE, layer), Span(1, free, SENDING, layer)]
        free += SENDING
    return spans


def pieces(compute: float, sending: float) -> list[Span]:
    """A product of gathered rows in pieces: the own rows at once, the others as they arrive.

    >>> spans = pieces(12.0, 6.0)
    >>> max(span.start + span.length for span in spans) == max(12.0, 12.0 / PIECES + 6.0)
    True
    """
    own, each = compute / PIECES, sending / (PIECES - 1)
    spans, free = [Span(0, 0.0, own, 0)], own
    for n in range(1, PIECES):
        start = max(free, n * each)
        spans += [Span(1, (n - 1) * each, each, n), Span(0, start, own, n)]
        free = start + own
    return spans


def overlap() -> str:
    whole = [Span(1, 0.0, 3 * SENDING, 0), Span(0, 3 * SENDING, LAYERS * COMPUTE, 0)]
    rows: tuple[tuple[str, Sequence[Span]], ...] = (
        ("parameters are gathered one layer ahead", gathers()),
        ("gradients leave while backward goes on", reductions()),
        ("a product waits for its whole operand: nothing hides", whole),
        ("the same product in pieces: decompose=", pieces(LAYERS * COMPUTE, 3 * SENDING)),
    )
    scale = Linear(0, max(s.start + s.length for _, row in rows for s in row), 92, WIDTH - MARGIN)
    parts, y = [], MARGIN
    for title, spans in rows:
        parts.append(text(MARGIN, y + 12, title, class_="strong"))
        for lane, words in enumerate(("compute", "network")):
            parts.append(text(MARGIN, y + 34 + 22 * lane, words, class_="small"))
        for span in spans:
            x, colour = scale(span.start), COLOURS[span.colour]
            place = (x, y + 20 + 22 * span.lane, scale(span.start + span.length) - x, 19)
            parts.append(rect(*place, class_="cell", fill=colour.fill))
        y += 82
    words = "a colour is a layer; in the last line, a part of the rows"
    label = (
        "Time lines of compute and network: parameters gathered one layer ahead, gradients that leave during backward, "
        "a product that waits for its whole operand, and the same product in pieces, which ends earlier"
    )
    return picture(label, y + 12, *parts, text(MARGIN, y, words, class_="small"))


# --- executors


class _Gather(nn.Module):
    """Stands for the gather of a layer's parameters, which is a Python object."""


OPS = 4  # of a layer


def program(layers: int) -> fx.GraphModule:
    """A chain of ops of several layers, before each of which a Python object gathers its parameters."""
    graph, module = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    for layer in range(layers):
        module.add_module(f"gather_{layer}", _Gather())
        weight = graph.call_module(f"gather_{layer}")
        for n in range(OPS):
            op = torch.ops.aten.mul.Tensor if n % 2 else torch.ops.aten.add.Tensor
            x = graph.call_function(op, (x, weight))
            x.meta["block"] = layer
    graph.output(x)
    return fx.GraphModule(module, graph)


def calls(module: fx.GraphModule) -> list[tuple[str, str]]:
    """Kind (op, gather or region) of every call of a graph, and the code of a region."""
    found = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            kind = "region" if target.startswith("region") else "gather"
            inside = getattr(module, target)
            found.append((kind, inside.code if kind == "region" else ""))
        elif node.op == "call_function" and "getitem" not in target:
            found.append(("op", ""))
    return found


def executors() -> str:
    eager, cut = program(3), cut_regions(program(3), lambda region: region)
    parts, y = [], MARGIN
    for title, module in (("eager: op by op", eager), ("inductor: by regions", cut)):
        parts.append(text(MARGIN, y + 14, title, class_="strong"))
        parts += _row(calls(module), y + 24)
        y += 86
        if module is eager:
            parts += [arrow(WIDTH / 2, y - 20, WIDTH / 2, y - 2)]
            parts += [text(WIDTH / 2 + 12, y - 8, "cut where Python is called", class_="small")]
            y += 8
    lines = (
        "G: a gather of the layer's parameters, a call of Python",
        "regions of equal layers have equal code, compiled once",
    )
    parts += [text(MARGIN, y + LINE * n, words, class_="small") for n, words in enumerate(lines)]
    label = (
        "Three layers of four ops, each with a gather of its parameters before it: eager runs op by op; a compiling "
        "executor runs one compiled region a layer, with the gathers between them, and compiles equal layers once"
    )
    return picture(label, y + 26, *parts)


def _row(found: Sequence[tuple[str, str]], y: float) -> Iterator[Markup]:
    """Boxes from left to right; a region is as wide as its ops were."""
    unit = (WIDTH - 2 * MARGIN) / (3 * (OPS + 1))
    x = MARGIN
    layers = itertools.count()
    layer = 0
    for kind, _ in found:
        width = unit * (OPS if kind == "region" else 1)
        if kind == "gather":
            layer = next(layers)
            yield rect(x + 2, y, width - 4, 36, rx=4, class_="plain")
            yield centred(x + width / 2, y + 23, "G", "strong")
        else:
            colour = COLOURS[2 if kind == "region" else 0]
            yield rect(x + 2, y, width - 4, 36, rx=4, fill=colour.fill)
            if kind == "region":
                yield centred(x + width / 2, y + 23, f"layer {layer}", "", fill=colour.ink)
        x += width
