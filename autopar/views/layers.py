"""A layered drawing of an acyclic graph: the layer of every vertex, and its position in the layer.

The four steps of Sugiyama, Tagawa, Toda (1981), each in its plainest form: layers by longest path,
a bend in every layer that an edge crosses, orders by the mean of the neighbours, and places as near
to the mean of the neighbours as their widths allow (least squares by pooling adjacent violators).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Vertex: TypeAlias = "str | Bend"
SWEEPS, SETTLING = 12, 80  # passes over the rows that find orders, and places


@dataclass(frozen=True)
class Bend:
    """The point at which all edges of `source` cross a layer."""

    source: str
    layer: int


@dataclass(frozen=True)
class Placed:
    """The positions of a layered drawing; a vertex is a box, or a `Bend` at which an edge crosses a layer.

    Attributes:
        layers: vertices of every layer from left to right; the layers from top to bottom.
        middle: x coordinate of the centre of every vertex; the left border of the drawing is x = 0.
        routes: edge (source, target) -> the source, the bends of the edge, the target.
        width: x coordinate of the right border, in the unit of the widths that `place` is given.
    """

    layers: tuple[tuple[Vertex, ...], ...]
    middle: Mapping[Vertex, float]
    routes: Mapping[tuple[str, str], tuple[Vertex, ...]]
    width: float


def place(widths: Mapping[str, float], edges: Sequence[tuple[str, str]], *, gap: float, bend: float) -> Placed:
    """Places vertices of these widths, listed in topological order, with `gap` between them.

    Bends are `bend` wide.
    """
    layer = _layers(tuple(widths), edges)
    routes = {edge: _route(edge, layer) for edge in dict.fromkeys(edges)}
    rows = _rows(tuple(widths), layer, routes)
    links = list(dict.fromkeys(pair for r in routes.values() for pair in itertools.pairwise(r)))
    before, after = _neighbours(links)
    for sweep in range(SWEEPS):
        _order(rows, before if sweep % 2 == 0 else after)
    wide = {v: widths.get(v, bend) if isinstance(v, str) else bend for row in rows for v in row}
    middle = _places(rows, wide, before, after, gap)
    left = min((middle[v] - wide[v] / 2 for v in middle), default=0.0)
    middle = {v: x - left for v, x in middle.items()}
    right = max((middle[v] + wide[v] / 2 for v in middle), default=0.0)
    return Placed(tuple(map(tuple, rows)), middle, routes, right)


def _layers(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The layer of every vertex: below all its sources; a vertex without sources is just above its first target."""
    layer = dict.fromkeys(names, 0)
    place_of = {name: i for i, name in enumerate(names)}
    for source, target in sorted(edges, key=lambda e: place_of[e[1]]):
        assert place_of[source] < place_of[target], f"{source} -> {target} is not in order"
        layer[target] = max(layer[target], layer[source] + 1)
    fed = {target for _, target in edges}
    for name in names:
        targets = [layer[t] for s, t in edges if s == name]
        if name not in fed and targets:
            layer[name] = min(targets) - 1
    return layer


def _route(edge: tuple[str, str], layer: Mapping[str, int]) -> tuple[Vertex, ...]:
    source, target = edge
    bends = (Bend(source, i) for i in range(layer[source] + 1, layer[target]))
    return (source, *bends, target)


def _rows(
    names: Sequence[str], layer: Mapping[str, int], routes: Mapping[tuple[str, str], tuple[Vertex, ...]]
) -> list[list[Vertex]]:
    rows: list[list[Vertex]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for name in names:
        rows[layer[name]].append(name)
    for each in dict.fromkeys(v for route in routes.values() for v in route[1:-1]):
        assert isinstance(each, Bend)
        rows[each.layer].append(each)
    return rows


Neighbours: TypeAlias = "dict[Vertex, list[Vertex]]"


def _neighbours(links: Sequence[tuple[Vertex, Vertex]]) -> tuple[Neighbours, Neighbours]:
    before: Neighbours = {}
    after: Neighbours = {}
    for above, below in links:
        before.setdefault(below, []).append(above)
        after.setdefault(above, []).append(below)
    return before, after


def _order(rows: list[list[Vertex]], towards: Neighbours) -> None:
    """Sorts every row by the mean position of the neighbours; a vertex without neighbours keeps its position."""
    at = {v: (i - (len(row) - 1) / 2) for row in rows for i, v in enumerate(row)}
    for row in rows:
        row.sort(key=lambda v: _mean([at[n] for n in towards.get(v, ())], at[v]))
        at.update({v: i - (len(row) - 1) / 2 for i, v in enumerate(row)})


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _places(
    rows: list[list[Vertex]], wide: Mapping[Vertex, float], before: Neighbours, after: Neighbours, gap: float
) -> dict[Vertex, float]:
    """Boxes settle near boxes, bends near the ends of their edges; then edges are straightened."""
    middle: dict[Vertex, float] = {v: 0.0 for row in rows for v in row}
    around = {v: before.get(v, []) + after.get(v, []) for v in middle}
    chains = _chains(rows)
    ends = {source: _ends(source, chain, around) for source, chain in chains.items()}
    for sweep in range(SETTLING):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [_wanted(v, around[v], ends, middle) for v in row]
            middle.update(zip(row, _spread(wanted, _apart(row, wide, gap)), strict=True))
    for source, chain in chains.items():
        home = _mean([middle[v] for v in ends[source]], 0.0)
        _straighten(chain, home, rows, wide, middle, gap)
    return middle


def _chains(rows: Sequence[Sequence[Vertex]]) -> dict[str, list[Bend]]:
    """Source -> all the bends of its edges."""
    chains: dict[str, list[Bend]] = {}
    for row in rows:
        for v in row:
            if isinstance(v, Bend):
                chains.setdefault(v.source, []).append(v)
    return chains


def _ends(source: str, chain: Sequence[Bend], around: Mapping[Vertex, list[Vertex]]) -> set[str]:
    """The boxes that a chain of bends joins."""
    return {source} | {v for bend in chain for v in around[bend] if isinstance(v, str)}


def _wanted(v: Vertex, around: Sequence[Vertex], ends: Mapping[str, set[str]], middle: Mapping[Vertex, float]) -> float:
    if isinstance(v, Bend):
        return _mean([middle[end] for end in sorted(ends[v.source])], middle[v])
    boxes = [middle[n] for n in around if isinstance(n, str)]
    return _mean(boxes or [middle[n] for n in around], middle[v])


def _apart(row: Sequence[Vertex], wide: Mapping[Vertex, float], gap: float) -> list[float]:
    return [(wide[a] + wide[b]) / 2 + gap for a, b in itertools.pairwise(row)]


def _straighten(
    chain: Sequence[Bend],
    home: float,
    rows: Sequence[Sequence[Vertex]],
    wide: Mapping[Vertex, float],
    middle: dict[Vertex, float],
    gap: float,
) -> None:
    """Gives all bends of a chain one place, the nearest to home that is free in every layer."""
    for x in sorted({middle[bend] for bend in chain}, key=lambda x: (abs(x - home), x)):
        if all(_is_free(x, bend, rows[bend.layer], wide, middle, gap) for bend in chain):
            middle.update(dict.fromkeys(chain, x))
            return


def _is_free(
    x: float,
    bend: Bend,
    row: Sequence[Vertex],
    wide: Mapping[Vertex, float],
    middle: Mapping[Vertex, float],
    gap: float,
) -> bool:
    return all(abs(x - middle[v]) >= (wide[v] + wide[bend]) / 2 + gap - 1e-6 for v in row if v != bend)


def _spread(wanted: Sequence[float], apart: Sequence[float]) -> list[float]:
    """The positions nearest to the wanted ones in least squares, with a distance of at least `apart`."""
    offsets = [0.0]
    for distance in apart:
        offsets.append(offsets[-1] + distance)
    pools: list[tuple[float, int]] = []  # mean, members
    for want, offset in zip(wanted, offsets, strict=True):
        mean, members = want - offset, 1
        while pools and pools[-1][0] >= mean:
            other, more = pools.pop()
            mean = (mean * members + other * more) / (members + more)
            members += more
        pools.append((mean, members))
    flat = [mean for mean, members in pools for _ in range(members)]
    return [x + offset for x, offset in zip(flat, offsets, strict=True)]
