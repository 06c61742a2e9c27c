"""Elements and bytes that one rank holds: as numbers for a search, as symbols for a formula."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from autopar.cost_model.arith import Quantity
from autopar.ir import (
    Dims,
    Labels,
    Layout,
    Leaf,
    Mesh,
    Op,
    Tensor,
    Work,
    local_elements,
    split_factors,
)


class Sizes:
    """Local sizes of tensors on one mesh, remembered, because a search asks again and again."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._elements: dict[tuple[Dims, Layout], int] = {}

    def elements(self, dims: Dims, layout: Layout) -> int:
        """Elements of a tensor of these dims that one rank holds. Raises LayoutError."""
        key = (dims, layout)
        found = self._elements.get(key)
        if found is None:
            found = self._elements[key] = local_elements(dims, layout, self.mesh)
        return found

    def bytes(self, tensor: Tensor, layout: Layout) -> Quantity:
        """Bytes of `tensor` that one rank holds."""
        return self.elements(tensor.dims, layout) * tensor.itemsize_bytes

    def count(self, tensor: Tensor, layout: Layout) -> Quantity:
        """Elements of `tensor` that one rank holds, as numbers for a decision, where bytes may be a formula."""
        return self.elements(tensor.dims, layout)

    def axis(self, position: int) -> Quantity:
        """Ranks along a mesh axis."""
        return self.mesh.sizes[position]

    def factor(self, leaf: Leaf) -> Quantity:
        """Elements of a factor on a single device."""
        return leaf.size

    def extent(self, leaves: Sequence[Leaf], labels: Labels) -> Quantity:
        """Points of the product of `leaves` that one rank runs over under these labels."""
        whole = math.prod((self.factor(leaf) for leaf in leaves), start=1)
        parts = math.prod(
            (
                self.axis(axis)
                for axis, label in enumerate(labels)
                if any(leaf.label in split_factors(label) for leaf in leaves)
            ),
            start=1,
        )
        return whole / parts

    def flops(self, op: Op, work: Work, labels: Labels) -> Quantity:
        """Floating-point operations of a loop nest of `op` on one rank: split axes share the work."""
        whole = math.prod((self.factor(leaf) for leaf in work.leaves), start=work.coefficient)
        parts = math.prod(
            (self.axis(axis) for axis, label in enumerate(labels) if op.choice(label).splits),
            start=1,
        )
        return whole / parts


class SymbolicSizes(Sizes):
    """The same with a symbol for every factor and every axis.

    Args:
        mesh: gives the number of axes; its sizes are not used.
        factors: factor name -> symbol; a factor that is missing keeps its number.
        axes: a symbol for every axis.
    """

    def __init__(
        self, mesh: Mesh, factors: Mapping[str, sympy.Expr], axes: Sequence[sympy.Expr]
    ) -> None:
        super().__init__(mesh)
        self._factors, self._axes = factors, tuple(axes)
        self._bytes: dict[tuple[object, Layout], sympy.Expr] = {}

    def bytes(self, tensor: Tensor, layout: Layout) -> Quantity:
        key = ((tensor.factors, tensor.dims, tensor.itemsize_bytes), layout)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = self._local_bytes(tensor, layout)
        return found

    def axis(self, position: int) -> Quantity:
        return self._axes[position]

    def factor(self, leaf: Leaf) -> Quantity:
        return self._factors.get(leaf.factor, leaf.size)

    def _local_bytes(self, tensor: Tensor, layout: Layout) -> sympy.Expr:
        whole = [
            self._factors.get(name, size)
            for names, sizes in zip(tensor.factors, tensor.dims, strict=True)
            for name, size in zip(names, sizes, strict=True)
        ]
        parts = [self._axes[axis] for axis, state in enumerate(layout) if state.kind == "S"]
        return sympy.Mul(tensor.itemsize_bytes, *whole) / sympy.Mul(*parts)
