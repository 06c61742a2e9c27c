"""Ops: the nodes of the graph that the search sees, with their choices, work and collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.ir.choice import DEEPER, Choice, Labels, owner_of, plain
from autopar.ir.layout import Layout, O
from autopar.ir.mesh import Mesh


class Leaf(NamedTuple):
    """One factor of an op's iteration space.

    Attributes:
        label: label that a choice splitting this factor has, or would have if the op offered one.
        factor: name of the factor in the whole graph.
        size: number of elements.
    """

    label: str
    factor: str
    size: int


class Moved(NamedTuple):
    """A tensor that a kernel inside an op reads or writes: its factors, and the bytes for one element."""

    leaves: tuple[Leaf, ...]
    itemsize_bytes: float


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one loop nest: `coefficient` times the product of the sizes of all leaves.

    In a matrix product, `rows` are the factors of the first operand and the result, `columns` those of the second
    operand and the result, `inner` those of both operands (they are summed over), and `batch` those of all three. Any
    other work has only rows. The nests of an op run as one kernel, but for those of an op that is a body of several:
    each of these says what it moves, and in which format it computes.

    Attributes:
        groups: factors of the second operand that count matrices, of which each row meets one; they are no leaves.
        itemsize_bytes: bytes of one number in the arithmetic; None for that of the op's results.
        gradients: number of kernels of this size in backward; those of other ops follow from their operands.
        moved: tensors that the kernel reads and writes; () where the op is one kernel.
    """

    coefficient: float
    rows: tuple[Leaf, ...] = ()
    columns: tuple[Leaf, ...] = ()
    inner: tuple[Leaf, ...] = ()
    batch: tuple[Leaf, ...] = ()
    groups: tuple[Leaf, ...] = ()
    itemsize_bytes: int | None = None
    gradients: int = 0
    moved: tuple[Moved, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.batch, *self.rows, *self.columns, *self.inner)

    @property
    def is_product(self) -> bool:
        """Whether this loop nest multiplies matrices."""
        return bool(self.inner)

    @property
    def flops(self) -> float:
        return self.coefficient * math.prod(leaf.size for leaf in self.leaves)


@dataclass(frozen=True)
class OwnCollective:
    """A collective that a split op runs as part of its computation, such as the exchange of rows between experts.

    Attributes:
        labels: labels of the choices that need this collective; it runs along each axis whose choice is among them.
        forward: name of the collective in forward, as in `autopar.ir.conversion`; "" for none.
        backward: name of the collective that runs on the gradient; "" for none.
        itemsize_bytes: bytes of one element of the message.
        leaves: factors of the message; the product of their sizes is its number of elements.
        stretch: elements of the rank that sends or gets most of them, over the mean.
    """

    labels: frozenset[str]
    forward: str
    backward: str
    itemsize_bytes: int
    leaves: tuple[Leaf, ...] = ()
    stretch: float = 1.0


@dataclass(frozen=True)
class Op:
    """A node of the graph.

    Attributes:
        name: name of the node in the captured graph, which is unique.
        kind: the operator, such as `aten.linear`.
        operands: names of the tensor operands; a name may occur twice.
        results: names of the tensor results, ending with those in `hidden`.
        choices: the ways to run the op along one mesh axis; the first is always `-`, which splits nothing.
        flops: forward floating-point operations of the whole op; an element-wise op counts one per element.
        saved: names of the operands and results that autograd keeps for backward.
        hidden: names of results that only the op's own backward uses: masks, statistics, copies.
        is_view: whether the op copies no data: its results share the memory of its first operand.
        module: path of the module that called the op, "" for the model itself.
        has_rule: whether the op has a rule that says how it can be split; without one it runs replicated.
        guess: why nobody has shown that its rule holds; "" where it was written or proved.
        work: the loop nests to which the `flops` belong.
        collectives: collectives inside the op, each with the choices under which it runs.
        product_itemsize_bytes: bytes of one number in the op's products, where it rounds its operands for them; None
            where products have the format of the operands.
        draws: whether the op draws random numbers; all ranks then run it, so that they draw in step.
        looks_up: factors of the indices by which the op looks up rows (along dim 0) of its first operand; None for an
            op of another kind. The gradient of that operand is zero in all other rows.
        transient: whether the op's operands and their gradients take memory only while it runs.
    """

    name: str
    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    choices: tuple[Choice, ...]
    flops: int = 0
    saved: tuple[str, ...] = ()
    is_view: bool = False
    module: str = ""
    has_rule: bool = True
    guess: str = ""
    work: tuple[Work, ...] = ()
    hidden: tuple[str, ...] = ()
    collectives: tuple[OwnCollective, ...] = ()
    product_itemsize_bytes: int | None = None
    draws: bool = False
    looks_up: tuple[Leaf, ...] | None = None
    transient: bool = False

    def choice(self, label: str) -> Choice:
        """The choice with this label; the caller guarantees that it exists.

        Every op has the choices `@0`, `@1`, ..., and its choices at a depth, such as `k^1`. These are not among
        `choices`: a search does not try them.
        """
        found = self._by_label.get(label)
        return self._other(label) if found is None else found

    def _other(self, label: str) -> Choice:
        base, deeper, depth = label.partition(DEEPER)
        return self.choice(base).at_depth(int(depth)) if deeper else self._owned(label)

    def _owned(self, label: str) -> Choice:
        owner = owner_of(label)
        assert owner is not None, f"{self.name} has no choice {label!r}"
        return Choice(label, (O(owner),) * len(self.operands), (O(owner),) * len(self.results))

    @cached_property
    def _by_label(self) -> Mapping[str, Choice]:
        return {choice.label: choice for choice in self.choices}


def operand_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout that each tensor operand of `op` must have, given the op's choice on every axis."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.operands[i] for c in chosen) for i in range(len(op.operands)))


def result_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout of each tensor result of `op`, given the op's choice on every axis."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.results[i] for c in chosen) for i in range(len(op.results)))


def split_counts(op: Op, labels: Labels, mesh: Mesh) -> list[tuple[Choice, int]]:
    """Every choice that splits a factor of an op, once, with the number of parts in which all axes together cut it."""
    found: dict[str, tuple[Choice, int]] = {}
    for label, size in zip(labels, mesh.sizes, strict=True):
        choice = op.choice(plain(label))
        if choice.splits:
            found[plain(label)] = choice, found.get(plain(label), (choice, 1))[1] * size
    return [*found.values()]


def parts_fit(op: Op, labels: Labels, mesh: Mesh) -> bool:
    """Whether an op is right on the parts in which the axes cut its factors."""
    counts = split_counts(op, labels, mesh)
    return not any(choice.needs_equal and choice.size % count for choice, count in counts)


# Collectives inside an op that the ranks beside its owner can skip together: all others move rows or blocks whose
# place in the op a rank without the op does not know. "" is not a collective.
_WITHIN_AN_OP = frozenset({"", "all_reduce", "all_gather", "reduce_scatter"})


def why_not_alone(op: Op, labels: Labels, mesh: Mesh) -> str:
    """The reason why an op cannot run under labels such as `@1`; "" if it can."""
    for label, (axis, size) in zip(labels, mesh.axes, strict=True):
        owner = owner_of(label)
        if owner is not None and owner >= size:
            return f"the axis {axis} has {size} ranks, counted from 0"
    if op.draws:
        return "it draws random numbers, which all ranks must do together"
    exchanges = (each for each in op.collectives if {each.forward, each.backward} - _WITHIN_AN_OP)
    if any(plain(label) in each.labels for each in exchanges for label in labels):
        return "ranks exchange rows inside of it"
    return ""
