"""Pictures of tensors on ranks: layouts, rules, storage, checkpoints, the choices of a search, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from autopar.ir import Graph, Layout, Mesh, calls, parse_layout
from autopar.ir.choice import Choice
from autopar.ir.op import Op
from autopar.ops.sharding import shard
from autopar.planning.planning import prepare_step
from autopar.views.markup import Markup, join
from autopar.views.svg import line, rect, text
from benchmarks.site.drawing import COLOURS, MARGIN, WIDTH, arrow, centred, grid, picture

SIDE = 4  # cells of a picture's matrix along each dim
BLUE, YELLOW, GREEN, RED, PURPLE = (colour.fill for colour in COLOURS[:5])


def held(layout: Layout, mesh: Mesh, rank: int, side: int = SIDE) -> set[int]:
    """Numbers of the cells of a square matrix that a rank holds."""
    cells = torch.arange(side * side).reshape(side, side)
    return set(shard(cells, ((side,), (side,)), layout, mesh, rank).flatten().tolist())


def _only(cells: set[int], fill: str) -> Callable[[int], str | None]:
    return lambda number: fill if number in cells else None


# --- layouts


def layouts() -> str:
    mesh, size, left = Mesh.parse("dp=2,tp=2"), 15.0, 128.0
    step = (WIDTH - left) / mesh.size
    parts = [centred(left + step * r + 30, 24, f"rank {r}", "strong") for r in range(mesh.size)]
    for rank in range(mesh.size):
        dp, tp = mesh.coordinates(rank)
        parts.append(centred(left + step * rank + 30, 40, f"dp {dp}, tp {tp}"))
    y = 52.0
    for words in ("R", "S(0)@dp", "S(1)@tp", "S(0)@dp S(1)@tp", "S(0)@dp S(0)@tp"):
        layout = parse_layout(words, mesh)
        parts += [text(MARGIN, y + 26 + 17 * n, w, class_="strong") for n, w in enumerate(words.split())]
        for rank in range(mesh.size):
            fill = _only(held(layout, mesh, rank), COLOURS[rank].fill)
            parts.append(grid(left + step * rank, y, (SIDE, SIDE), size, fill))
        y += SIDE * size + 12
    label = "What each of four ranks of the mesh dp=2,tp=2 holds of a matrix of 4 x 4 under five layouts"
    return picture(label, y + 4, *parts)


# --- plans


STORED = {  # stage -> layouts between steps, during a step, and of gradients
    "data parallel": ("R", "R", "R"),
    "ZeRO-1": ("S(0)@dp", "R", "R"),
    "ZeRO-2": ("S(0)@dp", "R", "S(0)@dp"),
    "ZeRO-3": ("S(0)@dp", "S(0)@dp", "S(0)@dp"),
}


def plans() -> str:
    mesh, size, left, step = Mesh.parse("dp=4"), 15.0, 120.0, 100.0
    heads = ("stored", "in a step", "gradients")
    parts = [centred(left + step * n + 30, 24, head, "strong") for n, head in enumerate(heads)]
    y = 36.0
    for stage, row in STORED.items():
        parts.append(text(MARGIN, y + 34, stage, class_="strong"))
        for n, words in enumerate(row):
            fill = _only(held(parse_layout(words, mesh), mesh, rank=1), COLOURS[n].fill)
            parts.append(grid(left + step * n, y, (SIDE, SIDE), size, fill))
        y += SIDE * size + 12
    label = (
        "What rank 1 of 4 data-parallel ranks holds of a parameter between steps and during a step, and of its "
        "gradient between micro-batches, under data parallelism and the three ZeRO stages"
    )
    return picture(label, y + 4, *parts)


# --- checkpoints


def checkpoints() -> str:
    """Cells keep the colour of the rank that saved them."""
    size = 17.0
    before, after = Mesh.parse("dp=4"), Mesh.parse("dp=2,tp=2")
    owner = {c: r for r in range(4) for c in held(parse_layout("S(0)@dp", before), before, r)}
    parts = []
    rows = ((before, "S(0)@dp", "saved by 4 ranks, dp=4"), (after, "S(1)@tp", "loaded by 4 ranks, dp=2,tp=2"))
    for y, (mesh, words, title) in zip((20.0, 250.0), rows, strict=True):
        parts.append(text(MARGIN, y + 6, f"{title}: {words}", class_="strong"))
        for rank in range(mesh.size):
            x = MARGIN + 12 + 98 * rank
            cells = held(parse_layout(words, mesh), mesh, rank)
            fills = {c: COLOURS[owner[c]].fill for c in cells}
            parts += [grid(x, y + 16, (SIDE, SIDE), size, fills.get), centred(x + 34, y + 102, f"rank {rank}")]
    middle, whole = WIDTH / 2, {c: COLOURS[r].fill for c, r in owner.items()}
    parts += [
        arrow(middle, 130, middle, 146),
        rect(MARGIN, 150, WIDTH - 2 * MARGIN, 78, rx=6, class_="box"),
        grid(MARGIN + 12, 155, (SIDE, SIDE), size, whole.get),
        text(MARGIN + 94, 182, "the checkpoint", class_="strong"),
        text(MARGIN + 94, 202, "names and shapes of the single-device model", class_="small"),
        arrow(middle, 230, middle, 244),
    ]
    label = (
        "Four ranks save the rows of a matrix; the checkpoint has the whole matrix by its name; ranks of "
        "another mesh load its columns. Each cell keeps the colour of the rank that saved it"
    )
    return picture(label, 366, *parts)


# --- rules and search, from the choices of a captured model


class _TwoProducts(nn.Module):
    """`relu(x @ A) @ B`, the worked example of the pages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).sum()


@functools.cache
def _captured() -> Graph:
    return prepare_step(_TwoProducts(), (torch.ones(SIDE, SIDE),)).analysis.graph


def rules() -> str:
    op = _captured().ops[0]
    parts = [centred(40 + 105 * n + 60, 24, head, "strong") for n, head in enumerate(("operand x", "weight", "result"))]
    y = 36.0
    for choice in op.choices:
        if not choice.label[0].isalpha() and choice.label != "-":
            continue
        parts.append(text(MARGIN, y + 36, choice.label, class_="strong"))
        states = (*choice.operands[:2], choice.results[0])
        for n, state in enumerate(states):
            x = 40 + 105 * n + 30
            parts += [_two_ranks(x, y, (state,)), centred(x + 30, y + 76, str(state))]
        y += 90
    parts.append(_key(y + 4))
    label = (
        "The choices of a matrix product along an axis of two ranks: which part of both operands each rank needs, "
        "and which part of the result it then has"
    )
    return picture(label, y + 36, *parts)


def _two_ranks(x: float, y: float, layout: Layout) -> Markup:
    """A matrix with the colour of the rank that holds a cell, and cells of both ranks in two halves."""
    mesh = Mesh.parse("x=2")
    size = 15.0
    first, second = held(layout, mesh, 0), held(layout, mesh, 1)
    both = join(
        rect(x + n % SIDE * size, y + n // SIDE * size, size / 2, size, fill=BLUE) for n in sorted(first & second)
    )
    summed = layout[0].kind == "P"
    fills = {n: BLUE for n in first - second} | {n: YELLOW for n in second}
    sign = centred(x + 30, y + 36, "+", "strong", fill="#ffffff", font_size=26) if summed else None
    return join((grid(x, y, (SIDE, SIDE), size, fills.get), both, sign))


def _key(y: float) -> Markup:
    parts, x = [], MARGIN
    for fill, words in ((BLUE, "rank 0"), (YELLOW, "rank 1")):
        parts += [rect(x, y, 14, 14, fill=fill), text(x + 20, y + 12, words, class_="small")]
        x += 80
    words = "+ each has a part of the sum"
    return join((*parts, text(x, y + 12, words, class_="small")))


_NAMES = {"linear": "x @ A", "relu": "relu", "linear_1": "· @ B"}
_WAYS = ("by rows", "by columns", "by the sum", "unsplit")


def _way(op: Op, choice: Choice) -> str | None:
    """The row of a choice in the picture; None where it has none."""
    if choice.label == "-":
        return "unsplit"
    if not choice.splits:
        return None
    result = choice.results[0]
    return "by the sum" if result.kind == "P" else ("by rows", "by columns")[result.dim]


def _nodes(op: Op) -> dict[str, Choice]:
    named = ((_way(op, choice), choice) for choice in op.choices)
    return {way: choice for way, choice in named if way is not None}


def _conversions(before: Choice, after: Choice) -> tuple[str, ...]:
    """Collectives between two choices, forward and backward."""
    found = calls(((SIDE,), (SIDE,)), before.results[:1], after.operands[:1], Mesh.parse("x=2"))
    return tuple(name for call in found for name in (call.name, call.backward))


def _is_free(names: tuple[str, ...]) -> bool:
    return not {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"} & set(names)


def search() -> str:
    """A column for every op, a box for every choice; a line is strong where the conversion sends nothing."""
    ops = [op for op in _captured().ops if op.name in _NAMES]
    found = [_nodes(op) for op in ops]
    xs, ys = (76.0, 210.0, 344.0), {way: 62.0 + 52 * n for n, way in enumerate(_WAYS)}
    parts: list[Markup] = list(_edges(found, xs, ys))
    for op, nodes, x in zip(ops, found, xs, strict=True):
        parts.append(centred(x, 28, _NAMES[op.name], "strong"))
        for way in nodes:
            parts.append(rect(x - 44, ys[way] - 14, 88, 28, rx=6, class_="box"))
            parts.append(centred(x, ys[way] + 4, way))
    y = max(ys.values()) + 40
    parts += [line(MARGIN, y, 44, y, class_="bold"), text(52, y + 4, "sends nothing", class_="small")]
    parts += [line(170, y, 200, y, class_="pale"), text(208, y + 4, "needs a collective", class_="small")]
    label = (
        "The choices of three ops, relu(x @ A) @ B, along one axis. Strong lines join choices that need no "
        "collective between them, dashed lines those that do; the search takes the cheapest path"
    )
    return picture(label, y + 18, *parts)


def _edges(found: list[dict[str, Choice]], xs: tuple[float, ...], ys: dict[str, float]) -> Iterator[Markup]:
    for column in range(len(found) - 1):
        for way, before in found[column].items():
            for then, after in found[column + 1].items():
                free = _is_free(_conversions(before, after))
                yield line(xs[column] + 44, ys[way], xs[column + 1] - 44, ys[then], class_="bold" if free else "pale")


# --- experts


def experts() -> str:
    """Rows of two ranks, coloured by the expert that they go to; more go to the second rank than to the first."""
    wanted = (0, 2, 1, 2), (3, 0, 2, 2)  # expert of every row, by rank
    size, parts = 22.0, []
    for rank, rows in enumerate(wanted):
        mid = MARGIN + 98 + 206 * rank
        arrived = sorted(e for row in wanted for e in row if e in (2 * rank, 2 * rank + 1))
        four, there = ([COLOURS[e].fill for e in each] for each in (rows, arrived))
        parts += [
            centred(mid, 26, f"rank {rank}", "strong"),
            grid(mid - 2 * size, 38, (1, 4), size, four.__getitem__),
            centred(mid, 76, "its rows, by expert"),
            arrow(mid, 84, mid, 116),
            grid(mid - len(there) / 2 * size, 122, (1, len(there)), size, there.__getitem__),
            centred(mid, 160, f"its experts {2 * rank} and {2 * rank + 1} run"),
            centred(mid, 176, "what has arrived"),
            arrow(mid, 184, mid, 216),
            grid(mid - 2 * size, 222, (1, 4), size, four.__getitem__),
            centred(mid, 260, "its rows again"),
        ]
    parts += [centred(WIDTH / 2, 104, "dispatch"), centred(WIDTH / 2, 204, "combine")]
    label = (
        "Expert parallelism on two ranks: every row goes to the rank of its expert, which runs what has arrived, and "
        "its result comes back to the rank that the row came from"
    )
    return picture(label, 274, *parts)
