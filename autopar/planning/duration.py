"""About how long a search takes, which is known before it begins.

The time grows with the ops that are not alike (`fold`) and with the axes that are open, and hardly with the ranks:

    seconds = classes of ops * axes^2 / 50             the mesh is searched, over at most 6 axes
    seconds = classes of ops * axes^2 / 100            the mesh is named
            + kinds of parameters * 8^axes / 8,000     and its recipe is open: the ways to store each

where a mesh that is searched has as many axes as its ranks have prime factors. Searches of two seconds and more took
0.46 to 1.5 times as long (`benchmarks/results/questions.md`); `explain` and `compile` may search more than once.
"""

from __future__ import annotations

from autopar.ir import Graph, Mesh
from autopar.search.exact.fold import fold
from autopar.search.request.recipes import is_open
from autopar.search.request.request import Request
from autopar.units import format_seconds

LONG_SECONDS = 60.0
_MOST_AXES = 6  # of a mesh that is searched: 1,024 ranks take no longer than 64


def search_seconds(classes: int, ranks: int, mesh: Mesh | None, kinds: int = 0) -> float:
    """Seconds of one core that a search takes, by the number of different ops; see the head of this file.

    `kinds` are the different parameters that the recipe leaves open.

    >>> search_seconds(50, 8, None), search_seconds(50, 8, Mesh.parse("dp=2,tp=4"), 25)
    (9.0, 2.2)
    """
    if mesh is not None:
        return classes * len(mesh.axes) ** 2 / 100 + kinds * 8 ** len(mesh.axes) / 8_000
    return classes * min(_prime_factors(ranks), _MOST_AXES) ** 2 / 50


def words_if_long(graph: Graph, request: Request) -> str:
    """A sentence about a search that takes more than a minute, with a mesh that takes least; "" for others."""
    assert request.ranks is not None, "a search has ranks"
    classes = len(fold(graph).classes)
    kinds = {(graph.tensors[name].dims, graph.layer_count.get(name, 1)) for name in graph.parameters.values()}
    seconds = search_seconds(classes, request.ranks, request.mesh, len(kinds) if is_open(request.inside) else 0)
    if seconds <= LONG_SECONDS:
        return ""
    mesh, flat = request.mesh or f"searched for {request.ranks} ranks", Mesh.of({"dp": request.ranks})
    flat_seconds = search_seconds(classes, request.ranks, flat)
    return (
        f"The search may take about {format_seconds(seconds)}, since the model has {classes} different ops and the "
        f"mesh is {mesh}. On the mesh {flat} it takes about {format_seconds(flat_seconds)}."
    )


def _prime_factors(number: int) -> int:
    """The number of prime factors, each as often as it divides."""
    found, factor = 0, 2
    while factor * factor <= number:
        while number % factor == 0:
            number, found = number // factor, found + 1
        factor += 1
    return found + (number > 1)
