"""Pictures of what each rank keeps: owners, rings, tiers, and blocks of a product over one, two and three axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

import autopar
from autopar.ir import Layout, Mesh, parse_layout
from autopar.ir.op import operand_layouts, result_layouts
from autopar.ops.ring_place import RingPlace, runs
from autopar.ops.sharding import shard
from autopar.search.request.recipe_rows import RECIPES
from autopar.views.markup import Markup
from autopar.views.svg import line, rect, text
from benchmarks.accuracy.tensor_dims import Layers, mean_square
from benchmarks.site.drawing import COLOURS, LINE, MARGIN, WIDTH, arrow, centred, grid, picture

RANKS = 4
SIDE = 4  # cells of a matrix along each dim
_LEFT, _STEP = 104.0, 78.0  # of the first rank's column, and from one column to the next
_PALE = 0.32  # opacity of what a rank has for a moment


def _heads(y: float) -> Iterator[Markup]:
    for rank in range(RANKS):
        yield centred(_middle(rank), y, f"rank {rank}", "strong")


def _middle(rank: int) -> float:
    return _LEFT + _STEP * rank + 35


# --- owners


OWNED = {"A": "O(0)@dp", "B": "O(3)@dp"}  # parameter -> its layout between steps


def owners() -> str:
    """The worked example of the page: two matrices, four ranks."""
    every = dict.fromkeys(OWNED, "V@dp")
    rows = (
        ("stored", OWNED, "each owner broadcasts its matrix"),
        ("in a step", every, "backward: from each rank's rows of the batch"),
        ("gradients", every, "a reduce sums them on the owner"),
        ("summed", OWNED, ""),
    )
    parts, y = [*_heads(24)], 36.0
    for title, layouts, then in rows:
        parts += [text(MARGIN, y + 20, title, class_="strong"), *_owned(layouts, y)]
        if then:
            middle = (_middle(0) + _middle(RANKS - 1)) / 2
            parts += [arrow(_LEFT - 10, y + 38, _LEFT - 10, y + 60)]
            parts += [centred(middle, y + 52, then)]
        y += 66
    parts.append(centred(WIDTH / 2, y - 12, "the optimizer updates A on rank 0 and B on rank 3"))
    label = (
        "Rank 0 of four owns the matrix A, rank 3 the matrix B. Each owner broadcasts its matrix at the start of a "
        "step; every rank has gradients of both; a reduce sums them on the owner, which has the optimizer's states"
    )
    return picture(label, y + 2, *parts)


def _owned(layouts: dict[str, str], y: float) -> Iterator[Markup]:
    """A box for every matrix on every rank, empty where the rank has nothing of it."""
    mesh = Mesh.parse(f"dp={RANKS}")
    for rank in range(RANKS):
        for n, (name, words) in enumerate(layouts.items()):
            x, colour = _LEFT + _STEP * rank + 36 * n, COLOURS[n]
            held = shard(torch.ones(4, 4), ((4,), (4,)), parse_layout(words, mesh), mesh, rank)
            if not held.numel():
                yield rect(x, y, 32, 32, rx=4, class_="empty")
                continue
            yield rect(x, y, 32, 32, rx=4, class_="cell", fill=colour.fill)
            yield centred(x + 16, y + 21, name, "strong", fill=colour.ink)


# --- rings


def chunks(rank: int) -> tuple[int, ...]:
    """The chunks of the sequence that a rank is dealt.

    >>> [chunks(rank) for rank in range(RANKS)]
    [(0, 7), (1, 6), (2, 5), (3, 4)]
    """
    return tuple(run.first for run in runs(rank, 2, RANKS, dealt=True))


def stops(rank: int) -> tuple[int, ...]:
    """Owners of the keys and values that reach a rank, one after the other.

    >>> stops(1)
    (1, 0, 3, 2)
    """
    return tuple(block for block, _ in RingPlace((RANKS,), (True,), (rank,)).stops())


def rings() -> str:
    parts, y = [*_heads(24)], 36.0
    parts.append(text(MARGIN, y + 20, "queries of", class_="strong"))
    for rank in range(RANKS):
        parts += _block(rank, rank, y)
    parts.append(centred(_middle(1) + _STEP / 2, y + 50, "attend to the keys and values of"))
    y += 62
    for step in range(RANKS):
        parts.append(text(MARGIN, y + 20, f"step {step + 1}", class_="strong"))
        for rank in range(RANKS):
            parts += _block(rank, stops(rank)[step], y)
            if step + 1 < RANKS:
                parts += _to_next(rank, y + 32)
        y += 56
    lines = (
        "numbers: chunks of the sequence, dealt out so that under",
        "a causal mask all ranks have as much to compute",
    )
    parts += [text(MARGIN, y + 4 + LINE * n, words, class_="small") for n, words in enumerate(lines)]
    label = (
        "Ring attention on four ranks: each keeps the queries of its two chunks of the sequence, while the keys and "
        "values of all ranks go from rank to rank; after four steps every query has met every key"
    )
    return picture(label, y + 34, *parts)


def _block(column: int, owner: int, y: float) -> Iterator[Markup]:
    colour, x = COLOURS[owner], _LEFT + _STEP * column
    yield rect(x, y, 70, 30, rx=4, class_="cell", fill=colour.fill)
    words = " and ".join(map(str, chunks(owner)))
    yield centred(x + 35, y + 20, words, "", fill=colour.ink)


def _to_next(rank: int, y: float) -> Iterator[Markup]:
    """A line to the next rank's block in the next row; from the last rank it leaves, and enters at the first."""
    start, middle = _middle(rank), y + 11
    if rank + 1 < RANKS:
        yield line(start, y, start + _STEP, y + 22, class_="edge")
        return
    yield line(start, y, start + _STEP / 2, middle, class_="edge")
    yield line(_middle(0) - _STEP / 2, middle, _middle(0), y + 22, class_="edge")


# --- tiers


TIERS = {"device": "device", "host": "host", "nvme": "disk"}
STORED = ("zero3", "zero-offload", "zero3-offload", "zero-infinity", "zero-infinity-nvme")


def tiers() -> str:
    left, step = 164.0, 84.0
    at = {tier: left + step * n for n, tier in enumerate(TIERS)}
    parts = [centred(at[tier] + 38, 24, words, "strong") for tier, words in TIERS.items()]
    y = 36.0
    for name in STORED:
        recipe = RECIPES[name]
        parts.append(text(MARGIN, y + 26, name, class_="strong"))
        parts += [rect(x, y, 76, 42, rx=6, class_="box") for x in at.values()]
        stored, used = at[recipe.tier], at[recipe.resident_tier]
        parts += [
            rect(stored + 7, y + 8, 26, 26, rx=4, fill=COLOURS[0].fill),
            rect(used + 43, y + 8, 26, 26, rx=4, fill=COLOURS[1].fill),
        ]
        if stored > used:
            parts.append(arrow(stored + 5, y + 21, used + 71, y + 21))
        y += 52
    for fill, words in (
        (COLOURS[0].fill, "between steps: parameter, gradient, optimizer states"),
        (COLOURS[1].fill, "during a step; from the host it is copied for each use"),
    ):
        parts += [rect(MARGIN, y + 4, 14, 14, rx=3, fill=fill), text(MARGIN + 22, y + 16, words, class_="small")]
        y += 22
    label = (
        "Where five recipes keep parameters: zero3 on the device; zero-offload and zero3-offload on the host between "
        "steps and on the device during a step; zero-infinity on the host, and with nvme in files between steps"
    )
    return picture(label, y + 8, *parts)


# --- blocks of a product


class Product(NamedTuple):
    """Layouts of A, B and C of a product C = A B, whose shapes are (m, k), (k, n) and (m, n).

    Attributes:
        mesh: the ranks.
        kept: layouts between forward and backward.
        used: layouts in the product itself.
    """

    mesh: Mesh
    kept: tuple[Layout, ...]
    used: tuple[Layout, ...]


RECIPE_OF = {"1d": ("tp=4", "tp:tp"), "2d": ("x=2,y=2", "x,y:2d"), "3d": ("x=2,y=2,z=2", "x,y,z:3d")}
_CUBE = ((2,), (2,), (SIDE,))  # batch and sequence, which are the rows of A and C, and features
_SQUARE = ((SIDE,), (SIDE,))


@functools.cache
def product(name: str) -> Product:
    """The second product of a feed-forward layer in the plan that a recipe gives."""
    mesh, recipe = RECIPE_OF[name]
    with torch.device("meta"):
        model, x = Layers(64, 1), torch.zeros(4, 4, 64)
    e = autopar.explain(model, (x,), loss_fn=mean_square, mesh=mesh, recipe=recipe, recompute="none", micro_batches=1)
    plan = e.plan
    down, add = (e.graph.by_name[op] for op in ("linear_1", "add"))
    used = (*operand_layouts(down, plan.ops["linear_1"]), *result_layouts(down, plan.ops["linear_1"]))
    slices = [how.split for name, how in plan.saved.items() if ".down" in name]
    stored = plan.parameters["layers.0.down.weight"].storage
    taken = operand_layouts(add, plan.ops["add"])[1]
    return Product(plan.mesh, (_sliced(used[0], slices), stored, taken), used)


def _sliced(layout: Layout, slices: Sequence[Layout]) -> Layout:
    """The layout of what is saved of an operand: its slice along axes of which a plan has one."""
    for split in slices:
        layout = tuple(new if new.kind == "S" else old for old, new in zip(layout, split, strict=True))
    return layout


def blocks(layouts: Sequence[Layout], mesh: Mesh, rank: int) -> list[set[int]]:
    """Numbers of the cells of A, B and C, of 4 x 4 cells each, that a rank holds.

    >>> [len(cells) for cells in blocks(product("2d").kept, product("2d").mesh, 0)]
    [4, 4, 4]
    """
    cells = torch.arange(SIDE * SIDE)
    a, c = (shard(cells.reshape(2, 2, SIDE), _CUBE, layouts[n], mesh, rank).flatten() for n in (0, 2))
    weight = cells.reshape(SIDE, SIDE).T.contiguous()  # a linear layer stores B transposed
    b = shard(weight, _SQUARE, layouts[1], mesh, rank).flatten()
    return [set(each.tolist()) for each in (a, b, c)]


def tensor_dims() -> str:
    size, left, step, y = 15.0, 122.0, 98.0, 36.0
    parts = [centred(left + step * n + 30, 24, head, "strong") for n, head in enumerate(("A", "B", "C = A B"))]
    for name, (words, _) in RECIPE_OF.items():
        parts.append(text(MARGIN, y + 24, name, class_="strong"))
        parts.append(text(MARGIN, y + 42, words, class_="small"))
        found = product(name)
        kept, used = (blocks(each, found.mesh, 0) for each in (found.kept, found.used))
        for n, (own, whole) in enumerate(zip(kept, used, strict=True)):
            x, fill = left + step * n, COLOURS[n].fill
            parts.append(grid(x, y, (SIDE, SIDE), size, _only(own, fill)))
            parts += [_faint(x, y, size, cell, fill) for cell in sorted(whole - own)]
        y += SIDE * size + 14
    x = MARGIN
    for opacity, words in ((1.0, "rank 0 keeps"), (_PALE, "and has while it multiplies")):
        parts += [
            rect(x, y, 14, 14, fill=COLOURS[0].fill, opacity=opacity),
            text(x + 20, y + 12, words, class_="small"),
        ]
        x += 130
    label = (
        "What rank 0 keeps of the matrices of a product, and what it gathers while it multiplies: under tensor "
        "parallelism along one axis C is whole on every rank; over two and three axes A, B and C all lie in blocks"
    )
    return picture(label, y + 28, *parts)


def _faint(x: float, y: float, size: float, cell: int, fill: str) -> Markup:
    left, top = x + cell % SIDE * size, y + cell // SIDE * size
    return rect(left, top, size, size, class_="cell", fill=fill, fill_opacity=_PALE)


def _only(cells: set[int], fill: str) -> Callable[[int], str | None]:
    return lambda number: fill if number in cells else None
