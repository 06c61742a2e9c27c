"""Which names belong together, given pairs of names that do."""

from __future__ import annotations

from collections.abc import Iterable


def connected(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The connected components of a graph with these nodes and edges, in the order of their first nodes.

    >>> [sorted(group) for group in connected("abcd", [("a", "c"), ("d", "c")])]
    [['a', 'c', 'd'], ['b']]
    """
    group_of = {name: {name} for name in names}
    for first, second in pairs:
        smaller, larger = sorted((group_of[first], group_of[second]), key=len)
        if smaller is not larger:
            larger |= smaller
            group_of |= dict.fromkeys(smaller, larger)
    return list({id(group): group for group in group_of.values()}.values())
