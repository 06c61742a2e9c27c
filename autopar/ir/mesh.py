"""The device mesh as data: named axes with sizes, their order, and their placement on the machine.

Two questions are answered apart. The *order* of the axes decides what a rank holds: where several axes split one
factor, the earlier axis is the major one. The *placement* decides which links an axis uses: ranks are numbered
row-major over the placed axes, so that the ranks of the last placed axis are neighbours. A mesh that names its axes
once, such as `dp=2,tp=4`, has the same order and placement, as in `torch.distributed.init_device_mesh`.

A mesh is a grid of places with a rank at each. The last places may be *vacant*: `ps=2,dp=3 of 4` has six places and
four ranks, three at the positions 0 to 2 of the first row and one at position 0 of the second. Plans whose ops and
tensors need nobody at the vacant places can run on it, see `autopar.ir.vacancy`.

Grammar of the text:  mesh = axis "=" size {"," axis "=" size} [" of " ranks | " order " axis {"," axis}]

The axes before `order` are in the order of their placement. Unlike `torch.distributed.DeviceMesh` a mesh needs
neither devices nor process groups, so that plans can be made anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import MeshError
from autopar.ir.files import is_count

PIPELINE_AXIS = "pp"
_ORDER = " order "  # stands between the placed axes and their order in the text of a mesh


@dataclass(frozen=True)
class Mesh:
    """Axes of a device mesh, the major one first.

    Attributes:
        axes: pairs (name, size), in the order in which they nest where several split one factor.
        placement: names of the axes from the one whose ranks lie farthest apart to the one whose ranks are
            neighbours; () where this is the order of `axes`.
        occupied: number of places, counted from the first, that have a rank; None for all.

    >>> mesh = Mesh.of({"dp": 2, "tp": 4})
    >>> str(mesh), mesh.size
    ('dp=2,tp=4', 8)
    >>> mesh = Mesh.of("ps=2,dp=3 of 4")
    >>> mesh.size, mesh.ranks, mesh.filled.ranks
    (6, 4, 6)
    """

    axes: tuple[tuple[str, int], ...]
    placement: tuple[str, ...] = ()
    occupied: int | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("A mesh needs at least one axis, for example {'dp': 2}.")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"The axis names {list(self.names)} repeat; name each axis once.")
        for name, size in self.axes:
            if not name.isidentifier():
                raise MeshError(f"The axis name {name!r} is not an identifier such as 'dp' or 'tp'.")
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"Axis {name!r} has size {size!r}; a size is a positive integer.")
        if self.placement and sorted(self.placement) != sorted(self.names):
            raise MeshError(
                f"The axes {', '.join(self.placement)} are placed, but the order names {', '.join(self.names)}; "
                "name each axis once in both."
            )
        # Equal meshes are equal values.
        if self.placement == self.names:
            object.__setattr__(self, "placement", ())
        if self.occupied == self.size:
            object.__setattr__(self, "occupied", None)
        self._check_occupied()

    def _check_occupied(self) -> None:
        if self.occupied is None:
            return
        if not 1 <= self.occupied <= self.size:
            raise MeshError(
                f"The mesh {self} has {self.occupied} ranks for {self.size} places; it takes 1 to {self.size}."
            )
        if PIPELINE_AXIS in self.names:
            raise MeshError(
                f"The mesh {self} has vacant places and the axis {PIPELINE_AXIS}, but so far every stage needs all of "
                f"its ranks. Leave out ' of {self.occupied}', or the axis."
            )
        if self.placement:
            raise MeshError(
                f"The mesh {self} has vacant places and an order of its axes, which cannot be combined "
                "yet: with vacant places, the order of the axes is that of the placement. Leave out one of the two."
            )

    @classmethod
    def of(cls, axes: Mesh | Mapping[str, int] | str) -> Mesh:
        """Makes a mesh from a mapping of axis names to sizes, or from its text; a mesh is returned as it is.

        Raises MeshError for anything else.
        """
        if isinstance(axes, str):
            return cls.parse(axes)
        if not isinstance(axes, Mesh | Mapping):
            raise MeshError(f"A mesh names its axes, as in {{'dp': 2, 'tp': 4}}; {axes!r} does not.")
        return axes if isinstance(axes, Mesh) else cls(tuple(axes.items()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads `dp=2,tp=4`, `dp=2,tp=4 order tp,dp` or `ps=2,dp=3 of 4`, the inverse of `str`.

        >>> Mesh.parse("dp=2,tp=4").sizes, Mesh.parse("dp=2,tp=4 order tp,dp").sizes
        ((2, 4), (4, 2))
        """
        axes = []
        placed, has_order, order = text.partition(_ORDER)
        grid, of, occupied = (piece.strip() for piece in placed.partition(" of "))
        if of and not is_count(occupied):
            raise MeshError(
                f"Cannot read {occupied!r} in the mesh {text!r}: after 'of' comes the number of ranks; write "
                "ps=2,dp=3 of 4."
            )
        for part in grid.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not is_count(size):
                raise MeshError(
                    f"Cannot read {part.strip()!r} in the mesh {text!r}; write dp=2,tp=4, or dp=2,tp=4 order tp,dp."
                )
            axes.append((name, int(size)))
        mesh = cls(tuple(axes), occupied=int(occupied) if of else None)
        names = [name.strip() for name in order.split(",")]
        if has_order and not all(names):
            raise MeshError(
                f"Cannot read {order.strip()!r} in the mesh {text!r}: after 'order' come the axes; write "
                f"{mesh.placed} order {','.join(reversed(mesh.placed.names))}."
            )
        return mesh.ordered(names) if has_order else mesh

    def ordered(self, names: Sequence[str]) -> Mesh:
        """The mesh with the same placement and another order of its axes.

        Raises MeshError unless `names` has each axis once.

        >>> str(Mesh.parse("dp=2,tp=4").ordered(["tp", "dp"]))
        'dp=2,tp=4 order tp,dp'
        """
        if sorted(names) != sorted(self.names):
            raise MeshError(
                f"The order {','.join(names)} does not fit the mesh {self.placed}; name each of its axes once: "
                f"{', '.join(self.names)}."
            )
        sizes = dict(self.axes)
        axes = tuple((name, sizes[name]) for name in names)
        return Mesh(axes, self.placed.names, self.occupied)

    @cached_property
    def placed(self) -> Mesh:
        """The mesh whose order is this one's placement."""
        return Mesh(self._placed_axes, occupied=self.occupied)

    @property
    def _placed_axes(self) -> tuple[tuple[str, int], ...]:
        sizes = dict(self.axes)
        return tuple((name, sizes[name]) for name in self.placement or self.names)

    def with_axis(self, name: str, size: int, position: int) -> Mesh:
        """The mesh with one more axis, at this position of the order and of the placement."""
        axes, placement = list(self.axes), list(self.placed.names)
        axes.insert(position, (name, size))
        placement.insert(position, name)
        return Mesh(tuple(axes), tuple(placement), self.occupied)

    def with_split_axis(self, name: str, inner: str, ranks: int) -> Mesh:
        """The mesh with two axes in place of the axis `name`: itself, and inside of it `inner` with this many ranks."""

        def parts(each: str) -> list[str]:
            return [each, inner] if each == name else [each]

        whole = dict(self.axes)
        sizes = {**whole, name: whole[name] // ranks, inner: ranks}
        order = [part for each in self.names for part in parts(each)]
        placement = [part for each in self.placed.names for part in parts(each)]
        axes = tuple((each, sizes[each]) for each in order)
        return Mesh(axes, tuple(placement), self.occupied)

    def without_axis(self, name: str) -> Mesh | None:
        """The mesh without an axis; None if it has no other."""
        axes = tuple(axis for axis in self.axes if axis[0] != name)
        placement = tuple(other for other in self.placed.names if other != name)
        return Mesh(axes, placement, self.occupied) if axes else None

    @cached_property
    def used(self) -> Mesh | None:
        """The mesh without its axes of one rank; None if it has no other.

        >>> str(Mesh.parse("pp=1,dp=2,tp=4").used)
        'dp=2,tp=4'
        """
        mesh: Mesh | None = self
        for name, size in self.axes:
            mesh = mesh.without_axis(name) if mesh and size == 1 else mesh
        return mesh

    def admits(self, other: Mesh) -> bool:
        """Whether the other mesh has these axes, placed alike, and this order if it differs from the placement.

        An axis of one rank may be placed anywhere.

        >>> ordered = Mesh.parse("dp=2,tp=4 order tp,dp")
        >>> Mesh.parse("dp=2,tp=4").admits(ordered), ordered.admits(Mesh.parse("dp=2,tp=4"))
        (True, False)
        """
        if dict(self.axes) != dict(other.axes):
            return False
        own, others = self.used, other.used
        return own == others or (own == own.placed == others.placed if own and others else False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of places, which is that of the ranks unless places are vacant."""
        return math.prod(self.sizes)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.occupied or self.size

    @property
    def filled(self) -> Mesh:
        """The same mesh with a rank at every place."""
        return self if self.occupied is None else Mesh(self.axes, self.placement)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """For every axis, the difference between the numbers of two neighbours along it.

        >>> Mesh.parse("dp=2,tp=4").strides, Mesh.parse("dp=2,tp=4 order tp,dp").strides
        ((4, 1), (1, 4))
        """
        after = dict[str, int]()
        ranks = 1
        for name, size in reversed(self.placed.axes):
            after[name], ranks = ranks, ranks * size
        return tuple(after[name] for name in self.names)

    def index(self, name: str) -> int:
        """Position of the axis called `name`. Raises MeshError if there is none."""
        if name not in self.names:
            raise MeshError(f"The mesh {self} has no axis {name!r}.")
        return self.names.index(name)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` along every axis.

        >>> Mesh.parse("dp=2,tp=4").coordinates(6), Mesh.parse("dp=2,tp=4 order tp,dp").coordinates(6)
        ((1, 2), (2, 1))
        """
        assert 0 <= rank < self.size, (rank, self)
        return tuple(rank // stride % size for stride, size in zip(self.strides, self.sizes, strict=True))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Number of the rank at these positions along the axes; the inverse of `coordinates`.

        >>> Mesh.parse("dp=2,tp=4 order tp,dp").rank_at((2, 1))
        6
        """
        return sum(i * stride for i, stride in zip(coordinates, self.strides, strict=True))

    def peers(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks of the group of `rank` along `axis`: those at the same position along every other axis, in order.

        >>> Mesh.parse("dp=2,tp=4").peers(6, axis=0)
        (2, 6)
        """
        stride = self.strides[axis]
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + position * stride for position in range(self.sizes[axis]))

    def __str__(self) -> str:
        placed = [f"{name}={size}" for name, size in self._placed_axes]
        ranks = "" if self.occupied is None else f" of {self.occupied}"
        order = f"{_ORDER}{','.join(self.names)}" if self.placement else ""
        return ",".join(placed) + ranks + order
