"""Atoms: the factors of dims while the letters of ops are unified along the edges of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Atom:
    """A factor during unification.

    It has a size. Once it is split, `parts` has its parts; once it is unified, `same` has the factor that it equals.
    """

    __slots__ = ("parts", "same", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.same: Atom | None = None
        self.parts: list[Atom] | None = None

    def root(self) -> Atom:
        atom = self
        while atom.same is not None:
            atom = atom.same
        return atom

    def leaves(self) -> list[Atom]:
        atom = self.root()
        if atom.parts is None:
            return [atom]
        return [leaf for part in atom.parts for leaf in part.leaves()]


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """The factors of a list, each that was split replaced by its parts, in order."""
    return [leaf for atom in atoms for leaf in atom.leaves()]


def unify(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
    """Cuts the factors of two lists, in place, until both lists are the same; False where that is impossible.

    Both lists factor a dim of the same size, most significant first. `[4096]` and `[32, 128]` both become
    `[32, 128]`. `[2, 3]` and `[3, 2]` give False, because neither 2 nor 3 divides the other. Factors that were
    matched before such a pair stay matched.
    """
    a, b = leaves(left)[::-1], leaves(right)[::-1]
    while a and b:
        # An earlier pass through this loop may have split an atom that is still in a list.
        x, y = _front(a), _front(b)
        if x is y:
            continue
        if x.size == y.size:
            y.same = x
        elif min(x.size, y.size) and max(x.size, y.size) % min(x.size, y.size) == 0:
            large, small = (x, y) if x.size > y.size else (y, x)
            rest = Atom(large.size // small.size)
            large.parts = [small, rest]
            (a if large is x else b).append(rest)
        else:
            return False
    if any(atom.size == 0 for atom in (*a, *b)):  # a dim of size 0, which some rule counts as size 1
        return False
    assert not a and not b, "unify needs lists of the same total size"
    return True


def _front(stack: list[Atom]) -> Atom:
    parts = stack.pop().leaves()
    stack.extend(reversed(parts[1:]))
    return parts[0]
