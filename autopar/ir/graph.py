"""The model as the search sees it: tensors with factored dims, and ops with choices.

This module does not import torch. `autopar.analysis.factors` makes a `Graph` from a captured model. The search picks
one `Choice` per op and mesh axis, and one storage layout per parameter. `autopar.passes` then rewrites the model's
graph into the program of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar.ir.layout import Dims, Layout, O, R, State, divides, shape_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import MixedPrecision

UNSPLIT = "-"  # label of the choice that splits nothing: operands and results are in R
VARIED = "~"  # label of the choice with operands and results in V: every rank does all the work
PARTIAL = "+"  # first letter of the labels of choices that pass P through a linear op
EXCHANGED = ">"  # separates the two factors of labels such as `t>e`, see `Choice`
OWNED = "@"  # first letter of labels such as `@1`, of an op that rank 1 of the axis runs alone


@dataclass(frozen=True)
class Tensor:
    """A tensor of the captured graph, with its global (unsplit) sizes.

    Attributes:
        name: name of the tensor, unique in the graph.
        dims: for every dim the sizes of its factors, most significant first (see `autopar.ir.layout`).
        factors: names of the factors, one for each size in `dims`; "" for a factor without a name.
        itemsize_bytes: bytes of one element.
        needs_grad: whether backward computes a gradient of the tensor.
        stored_itemsize_bytes: bytes of one element of a parameter between steps; None for `itemsize_bytes`.
        gradient_itemsize_bytes: bytes of one element of a parameter's gradient while it is accumulated and
            reduced; None for `itemsize_bytes`.
    """

    name: str
    dims: Dims
    factors: tuple[tuple[str, ...], ...]
    itemsize_bytes: int
    needs_grad: bool
    stored_itemsize_bytes: int | None = None
    gradient_itemsize_bytes: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.dims)

    @property
    def is_cast(self) -> bool:
        """Whether ops use a parameter in another dtype than the one in which it is stored."""
        return self.at_rest is not self

    @cached_property
    def at_rest(self) -> Tensor:
        """This tensor with the element size that it has between steps."""
        return self._in_format(self.stored_itemsize_bytes)

    @cached_property
    def gradient(self) -> Tensor:
        """This tensor's gradient: the same dims, with the element size that the gradient has while it is reduced.

        Only the gradient of a parameter can have another element size than the tensor itself.
        """
        return self._in_format(self.gradient_itemsize_bytes)

    @property
    def gradient_scale(self) -> float:
        """Bytes of the gradient for each byte of the tensor."""
        return self.gradient.itemsize_bytes / self.itemsize_bytes

    def _in_format(self, itemsize_bytes: int | None) -> Tensor:
        if itemsize_bytes is None:
            return self
        return replace(
            self, itemsize_bytes=itemsize_bytes, stored_itemsize_bytes=None,
            gradient_itemsize_bytes=None,
        )  # fmt: skip

    @property
    def formats(self) -> tuple[int, int | None, int | None]:
        """Bytes of one element in use, in storage and of the gradient; None means what it means in the fields."""
        return self.itemsize_bytes, self.stored_itemsize_bytes, self.gradient_itemsize_bytes


@dataclass(frozen=True)
class Choice:
    """One way to run an op along one mesh axis.

    Attributes:
        label: `-` (splits nothing), `~` (splits nothing, operands and results in V), a factor of the op's rule such
            as `k` or `k.1`, `+...` (a linear op applied to partial sums, P), or `t>e`: operands and results are split
            by the factor `t`, and inside the op ranks exchange rows so that the work is split by `e`. `@i`: rank i of
            the axis runs the op alone, with operands and results in O(i).
        operands: the state that each tensor operand must be in, in the order of `Op.operands`.
        results: the state in which the op leaves each tensor result, in the order of `Op.results`.
        size: size of the factor that is split, which the axis size must divide; for `t>e` the size of `e`; 0 where
            nothing is split.
        factor: name of the split factor in the whole graph; "" where nothing is split.
        stretch: imbalance of the work: the work of the busiest rank, divided by the mean over the ranks.
    """

    label: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int = 0
    factor: str = ""
    stretch: float = 1.0

    @property
    def splits(self) -> bool:
        """Whether the work of the op is divided among the ranks of the axis."""
        return self.size > 0


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


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one loop nest: `coefficient` times the product of the sizes of all leaves.

    In a matrix product, `rows` are the factors of the first operand and the result, `columns` those of the second
    operand and the result, `inner` those of both operands (they are summed over), and `batch` those of all three. Any
    other work has only rows.
    """

    coefficient: float
    rows: tuple[Leaf, ...] = ()
    columns: tuple[Leaf, ...] = ()
    inner: tuple[Leaf, ...] = ()
    batch: tuple[Leaf, ...] = ()

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
    """

    labels: frozenset[str]
    forward: str
    backward: str
    itemsize_bytes: int
    leaves: tuple[Leaf, ...] = ()


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
        work: the loop nests to which the `flops` belong.
        collectives: collectives inside the op, each with the choices under which it runs.
        product_itemsize_bytes: bytes of one number in the op's products, where it rounds its operands for them; None
            where products have the format of the operands.
        draws: whether the op draws random numbers; all ranks then run it, so that they draw in step.
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
    work: tuple[Work, ...] = ()
    hidden: tuple[str, ...] = ()
    collectives: tuple[OwnCollective, ...] = ()
    product_itemsize_bytes: int | None = None
    draws: bool = False

    def choice(self, label: str) -> Choice:
        """The choice with this label; the caller guarantees that it exists.

        Every op has the choices `@0`, `@1`, ..., which are not among `choices`: a search does not try them.
        """
        found = self._by_label.get(label)
        return self._owned(label) if found is None else found

    def _owned(self, label: str) -> Choice:
        owner = owner_of(label)
        assert owner is not None, f"{self.name} has no choice {label!r}"
        return Choice(label, (O(owner),) * len(self.operands), (O(owner),) * len(self.results))

    @cached_property
    def _by_label(self) -> Mapping[str, Choice]:
        return {choice.label: choice for choice in self.choices}


@dataclass(frozen=True)
class Factor:
    """A named model dimension that runs through many tensors.

    Attributes:
        name: name such as `batch`, `seq` or `mlp.up.out`.
        size: number of elements.
        roles: words for where the factor occurs. "batch": the leading dim of an input, a dim over which ops treat
            samples separately, or a concatenation of such dims. "input": any other dim of an input, except attention
            heads. "parameter": a dim of a parameter. "normalized": a dim over which some op normalizes. "expert": the
            dim that counts the experts of a mixture of experts.
    """

    name: str
    size: int
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stack:
    """Layers that repeat: the modules `path.0`, `path.1` ... of one kind.

    Attributes:
        path: qualified name of the list of layers.
        layers: number of layers in the model.
        captured: number of layers in the graph; where it is smaller, the middle layer stands for those left out.
    """

    path: str
    layers: int
    captured: int

    def index(self, name: str) -> int | None:
        """The captured layer that a module, or a parameter, of this name belongs to."""
        head, _, rest = name.partition(self.path + ".")
        number = rest.partition(".")[0]
        return int(number) if not head and number.isdigit() else None

    @property
    def middle(self) -> int:
        """The captured layer that stands for all that were left out."""
        return self.captured // 2


def find_stacks(ops: Iterable[Op]) -> tuple[Stack, ...]:
    """The lists of layers (`path.0`, `path.1` ...) of a graph in which every layer is captured and has ops.

    The layers of a list need not be alike. Of nested lists only the outermost is found.
    """
    found: dict[str, set[int]] = {}
    for op in ops:
        names = op.module.split(".")
        position = next((i for i, name in enumerate(names) if name.isdigit()), None)
        if position:
            found.setdefault(".".join(names[:position]), set()).add(int(names[position]))
    return tuple(
        Stack(path, len(indices), len(indices))
        for path, indices in found.items()
        if len(indices) > 1 and indices == set(range(len(indices)))
    )


@dataclass(frozen=True)
class Graph:
    """A captured model.

    Attributes:
        tensors: every tensor by name.
        ops: every op, in topological order.
        parameters: qualified parameter name -> tensor name. Tied parameters share one tensor and occur here once, under
            the first of their names.
        buffers: qualified buffer name -> tensor name; buffers are stored replicated.
        inputs: input name -> tensor name. A rank can take any part of an input without communication.
        outputs: names of the result tensors; see `delivered`.
        factors: factor name -> factor.
        stacks: lists of repeated layers; one captured layer may stand for many, see `stands_for`.
        precision: mixed-precision policy of the capture; None where ops use parameters in their stored dtype.
        whole_outputs: whether every rank returns every result unsplit.
        copies: name of an op, parameter or buffer -> its names in the whole model, one for every layer that it stands
            for; empty where the graph has all layers.
    """

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    factors: Mapping[str, Factor] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()
    precision: MixedPrecision | None = None
    whole_outputs: bool = False
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def delivered(self, layout: Layout) -> Layout:
        """The layout in which the program returns a result that the op computing it leaves in `layout`.

        Partial sums are reduced, the results of one rank are broadcast, and with `whole_outputs` split results are
        gathered.
        """
        return tuple(R if self.whole_outputs or s.kind in "PO" else s for s in layout)

    def stack_of(self, name: str) -> tuple[Stack, int] | None:
        """The stack and captured layer that a module or parameter of this name belongs to."""
        for stack in self.stacks:
            index = stack.index(name)
            if index is not None:
                return stack, index
        return None

    @cached_property
    def stands_for(self) -> Mapping[str, int]:
        """Op, tensor or parameter name -> number of layers for which it stands; names that stand for one are absent."""
        modules = {op.name: op.module for op in self.ops}
        modules |= {name: op.module for op in self.ops for name in op.results}
        modules |= {name: name for name in self.parameters}
        modules |= {tensor: name for name, tensor in self.parameters.items()}
        found = {name: self.stack_of(module) for name, module in modules.items()}
        return {
            name: stack.layers - stack.captured + 1
            for name, place in found.items()
            if place is not None
            for stack, index in [place]
            if index == stack.middle and stack.layers > stack.captured
        }

    @cached_property
    def edge_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of inputs and parameters, by keys such as `input tokens` and `parameter up.weight`."""
        edges = [(f"input {name}", tensor) for name, tensor in self.inputs.items()]
        edges += [(f"parameter {name}", tensor) for name, tensor in self.parameters.items()]
        return {name: tuple(self.tensors[tensor].shape) for name, tensor in edges}

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """Tensor name -> the op that computes it; inputs, parameters and buffers have no entry."""
        return {name: op for op in self.ops for name in op.results}


Labels = tuple[str, ...]  # the label of an op's choice on every mesh axis


def operand_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout that each tensor operand of `op` must have, given the op's choice on every axis."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.operands[i] for c in chosen) for i in range(len(op.operands)))


def result_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout of each tensor result of `op`, given the op's choice on every axis."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.results[i] for c in chosen) for i in range(len(op.results)))


def owner_of(label: str) -> int | None:
    """The rank that runs an op with this label alone, counted from 0 along the axis; None for other labels.

    >>> owner_of("@1"), owner_of("k")
    (1, None)
    """
    number = label.removeprefix(OWNED)
    return int(number) if label.startswith(OWNED) and number.isdecimal() else None


def runs_alone(labels: Labels) -> bool:
    """Whether one rank of some axis runs an op with these labels alone.

    >>> runs_alone(("-", "@1")), runs_alone(("-", "k"))
    (True, False)
    """
    return any(label.startswith(OWNED) for label in labels)


def why_not_alone(op: Op, labels: Labels, mesh: Mesh) -> str:
    """The reason why an op cannot run under labels such as `@1`; "" if it can."""
    for label, (axis, size) in zip(labels, mesh.axes, strict=True):
        owner = owner_of(label)
        if owner is not None and owner >= size:
            return f"the axis {axis} has {size} ranks, counted from 0"
    if op.draws:
        return "it draws random numbers, which all ranks do in step"
    if any(label in each.labels for each in op.collectives for label in labels):
        return "ranks exchange rows inside of it"
    return ""


def split_factors(label: str) -> tuple[str, ...]:
    """The labels of a label such as `t.0>e`: the factor that is split outside the op, and the one split inside.

    >>> split_factors("t.0>e"), split_factors("t.0")
    (('t.0', 'e'), ('t.0',))
    """
    return tuple(label.split(EXCHANGED))


def go_together(labels: Labels) -> bool:
    """Whether an op can run under these choices on several axes at once.

    It cannot if one axis has a label such as `t>e` (the op exchanges rows, and its work is split by `e`) and another
    axis splits `e` without an exchange.

    >>> go_together(("t.0>e", "t.1>e")), go_together(("t.0>e", "e"))
    (True, False)
    """
    exchanged = {_letter(split_factors(x)[-1]) for x in labels if EXCHANGED in x}
    return all(EXCHANGED in x or _letter(x) not in exchanged for x in labels)


def _letter(label: str) -> str:
    return label.partition(".")[0]


def is_legal(graph: Graph, op: Op, labels: Labels, mesh: Mesh) -> bool:
    """Whether an op can run under these choices on the mesh.

    The choices must go together, every size that they split must divide by the number of parts, and one rank must be
    able to run the op alone where a label says so (`why_not_alone`).
    """
    if not go_together(labels) or (runs_alone(labels) and why_not_alone(op, labels, mesh)):
        return False
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    return all(
        divides(graph.tensors[name].dims, layout, mesh)
        for name, layout in zip(names, layouts, strict=True)
    )
