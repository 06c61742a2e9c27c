"""Elements and bytes of tensors on one rank: as numbers for the search, as symbols for formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import sympy

from autopar.cost_model.arith import Quantity
from autopar.ir import (
    Dims,
    Labels,
    Layout,
    LayoutStep,
    Leaf,
    Mesh,
    Op,
    Tensor,
    Work,
    local_elements,
    split_counts,
    split_factors,
    steps_of,
    stretch_of,
    uneven_axes,
)


class Sizes:
    """Sizes of local tensors on one mesh, cached because a search asks for the same ones many times."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._elements: dict[tuple[Dims, Layout], int] = {}

    def elements(self, dims: Dims, layout: Layout) -> int:
        """Number of elements of a tensor on one rank. Raises LayoutError where the layout does not divide its dims."""
        key = (dims, layout)
        found = self._elements.get(key)
        if found is None:
            found = self._elements[key] = local_elements(dims, layout, self.mesh)
        return found

    def bytes(self, tensor: Tensor, layout: Layout) -> Quantity:
        """Bytes of `tensor` on one rank."""
        return self.elements(tensor.dims, layout) * tensor.itemsize_bytes

    def count(self, tensor: Tensor, layout: Layout) -> Quantity:
        """Number of elements of `tensor` on one rank. It is a number even where `bytes` gives a formula."""
        return self.elements(tensor.dims, layout)

    def axis(self, position: int) -> Quantity:
        """Number of ranks along a mesh axis."""
        return self.mesh.sizes[position]

    def steps(self, tensor: Tensor, source: Layout, target: Layout) -> Iterator[tuple[LayoutStep, Quantity, Quantity]]:
        """Yields the steps of a conversion, each with the bytes of its collective on one rank, before and after it.

        The padding of parts of different sizes counts, see [Note: uneven parts] in autopar/ir/uneven.py.
        """
        layout, before = list(source), self.bytes(tensor, source)
        leaves, enters = (uneven_axes(tensor.dims, each, self.mesh) for each in (source, target))
        for step in steps_of(tensor.dims, source, target, self.mesh):
            layout[step.axis] = step.target
            after = self.bytes(tensor, tuple(layout))
            gathered = before * self.axis(step.axis) if step.axis in leaves else after
            yield step, after * self.axis(step.axis) if step.axis in enters else before, gathered
            before = after

    def factor(self, leaf: Leaf) -> Quantity:
        """Size of a factor on a single device."""
        return leaf.size

    def extent(self, leaves: Sequence[Leaf], labels: Labels) -> Quantity:
        """Product of the sizes of `leaves` on one rank, if the op runs under these labels."""
        whole = math.prod((self.factor(leaf) for leaf in leaves), start=1)
        along = [
            (axis, leaf)
            for axis, label in enumerate(labels)
            if (leaf := next((x for x in leaves if x.label in split_factors(label)), None))
        ]
        parts = math.prod((self.axis(axis) for axis, _ in along), start=1)
        counts: dict[Leaf, int] = {}
        for axis, leaf in along:
            counts[leaf] = counts.get(leaf, 1) * self.mesh.sizes[axis]
        return whole / parts * math.prod(self.busiest(leaf.size, count) for leaf, count in counts.items())

    def flops(self, op: Op, work: Work, labels: Labels) -> Quantity:
        """Floating-point operations of a loop nest of `op` on the busiest rank; axes that split `op` share the work."""
        whole = math.prod((self.factor(leaf) for leaf in work.leaves), start=work.coefficient)
        parts = math.prod((self.axis(axis) for axis, label in enumerate(labels) if op.choice(label).splits), start=1)
        counts = split_counts(op, labels, self.mesh)
        return whole / parts * math.prod(self.busiest(choice.size, count) for choice, count in counts)

    def busiest(self, size: int, count: int) -> Quantity:
        """The largest of so many parts of a size over the mean of all parts: 1 where all are equal."""
        return -(-size // count) * count / size if size % count else 1


class SymbolicSizes(Sizes):
    """Sizes of local tensors as formulas, with a symbol for every factor and every axis.

    Args:
        mesh: mesh with the right number of axes; the symbols in `axes` replace their sizes.
        factors: factor name -> symbol of its size; a factor without a symbol keeps its number.
        axes: symbol for the number of ranks along every axis.
    """

    def __init__(self, mesh: Mesh, factors: Mapping[str, sympy.Expr], axes: Sequence[sympy.Expr]) -> None:
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
        found = sympy.Mul(tensor.itemsize_bytes, *whole) / sympy.Mul(*parts)
        return found * _largest_share(tensor.dims, layout, self.mesh)


def _largest_share(dims: Dims, layout: Layout, mesh: Mesh) -> sympy.Rational:
    """The largest part of a tensor, over the mean of all parts: 1 where the axes divide what they split.

    A formula takes it as it is on this mesh, so that it has a slope everywhere.
    """
    if not uneven_axes(dims, layout, mesh) and stretch_of(layout) == 1:
        return sympy.Integer(1)
    parts = math.prod(size for state, size in zip(layout, mesh.sizes, strict=True) if state.kind == "S")
    return sympy.Rational(local_elements(dims, layout, mesh) * parts, math.prod(map(math.prod, dims)))
