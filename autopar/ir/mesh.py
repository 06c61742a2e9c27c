"""The device mesh as data: named axes with sizes. The earlier axis is the major one.

Unlike `torch.distributed.DeviceMesh` it needs neither devices nor process groups, so that plans can be made anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import MeshError

PIPELINE_AXIS = "pp"


@dataclass(frozen=True)
class Mesh:
    """Axes of a device mesh, in order.

    Attributes:
        axes: pairs (name, size); ranks are numbered row-major, as in `torch.distributed.DeviceMesh`.

    >>> mesh = Mesh.of({"dp": 2, "tp": 4})
    >>> str(mesh), mesh.size
    ('dp=2,tp=4', 8)
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("A mesh needs at least one axis, for example {'dp': 2}.")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"The axis names {list(self.names)} repeat; name each axis once.")
        for name, size in self.axes:
            if not name.isidentifier():
                raise MeshError(
                    f"The axis name {name!r} is not an identifier such as 'dp' or 'tp'."
                )
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"Axis {name!r} has size {size!r}; a size is a positive integer.")

    @classmethod
    def of(cls, axes: Mesh | Mapping[str, int] | str) -> Mesh:
        """Makes a mesh from a mapping of axis names to sizes, or from its text; a mesh is returned as it is.

        Raises MeshError for anything else.
        """
        if isinstance(axes, str):
            return cls.parse(axes)
        if not isinstance(axes, Mesh | Mapping):
            raise MeshError(
                f"A mesh names its axes, as in {{'dp': 2, 'tp': 4}}; {axes!r} does not."
            )
        return axes if isinstance(axes, Mesh) else cls(tuple(axes.items()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads `dp=2,tp=4`, the inverse of `str`.

        >>> Mesh.parse("dp=2,tp=4").sizes
        (2, 4)
        """
        axes = []
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not size.isdigit():
                raise MeshError(
                    f"Cannot read {part.strip()!r} in the mesh {text!r}; write dp=2,tp=4."
                )
            axes.append((name, int(size)))
        return cls(tuple(axes))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def index(self, name: str) -> int:
        """Position of the axis called `name`. Raises MeshError if there is none."""
        if name not in self.names:
            raise MeshError(f"The mesh {self} has no axis {name!r}.")
        return self.names.index(name)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` along every axis, row-major.

        >>> Mesh.parse("dp=2,tp=4").coordinates(6)
        (1, 2)
        """
        assert 0 <= rank < self.size, (rank, self)
        result = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            result.append(position)
        return tuple(reversed(result))

    def peers(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks of the group of `rank` along `axis`: those at the same position along every other axis, in order.

        >>> Mesh.parse("dp=2,tp=4").peers(6, axis=0)
        (2, 6)
        """
        stride = math.prod(self.sizes[axis + 1 :])
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + position * stride for position in range(self.sizes[axis]))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)
