"""The model as the search sees it: tensors with factored dims, and ops with choices.

Nothing here knows torch. `autopar.analysis.factors` makes a `Graph` of a captured model; the search picks one
`Choice` per op and mesh axis, and one storage per parameter; `autopar.passes` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar.ir.layout import Dims, Layout, R, State, divides, shape_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import MixedPrecision

UNSPLIT = "-"  # label of the choice that splits nothing: operands and results are in R
VARIED = (
    "~"  # label of the choice that takes and gives V: the same work everywhere, for different uses
)
PARTIAL = "+"  # first letter of the labels of choices that pass P through a linear op
EXCHANGED = ">"  # `t>e`: split by `t` outside the op and by `e` inside it, see `Choice`


@dataclass(frozen=True)
class Tensor:
    """A tensor of the captured graph, with its global (unsplit) sizes.

    Attributes:
        name: unique in the graph.
        dims: factor sizes of each dim, most significant first.
        factors: names of those factors, of the same structure; "" for a factor nobody named.
        itemsize_bytes: bytes of one element.
        needs_grad: whether a gradient flows back through it.
        stored_itemsize_bytes: bytes of one element of a parameter at rest, None where it is used in the
            format that it is stored in.
        gradient_itemsize_bytes: bytes of one element of a parameter's gradient while it is added up and
            reduced, None for those of the parameter in use.
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
        """Whether a parameter is used in another format than it is stored in."""
        return self.at_rest is not self

    @cached_property
    def at_rest(self) -> Tensor:
        """A parameter as it lies between steps."""
        return self._in_format(self.stored_itemsize_bytes)

    @cached_property
    def gradient(self) -> Tensor:
        """A parameter's gradient while it is added up and reduced; that of an activation is like itself."""
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
        """The item sizes that a price depends on."""
        return self.itemsize_bytes, self.stored_itemsize_bytes, self.gradient_itemsize_bytes


@dataclass(frozen=True)
class Choice:
    """One way to run an op along one mesh axis.

    Attributes:
        label: `-` (split nothing), `~` (split nothing, V in and out), a factor of the op's rule such
            as `k` or `k.1`, `+...` (pass P), or `t>e`: rows come and go split by the factor `t`, and change hands
            inside the op, where the work is split by `e`.
        operands: the state each tensor operand must be in, in the order of `Op.operands`.
        results: the state each tensor result is then in.
        size: size of the factor that is split, of `t>e` that of `e`; the axis size must divide it. 0 where nothing is
            split.
        factor: the name of that factor in the whole graph, "" where nothing is split.
        stretch: arithmetic of the slowest part, as a multiple of its share of the op's.
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
        label: label of the choice that splits it, whether or not the op offers that choice.
        factor: its name in the whole graph.
        size: elements.
    """

    label: str
    factor: str
    size: int


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one loop nest: `coefficient` times the product of all leaves.

    For a product of matrices `rows` are of the first operand and the result, `columns` of the second
    and the result, `inner` summed away, and `batch` in all three. Any other work has rows only.
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
        """Whether it multiplies matrices."""
        return bool(self.inner)

    @property
    def flops(self) -> float:
        return self.coefficient * math.prod(leaf.size for leaf in self.leaves)


@dataclass(frozen=True)
class OwnCollective:
    """A collective of an op's own, which its parts run among themselves.

    Attributes:
        labels: along every axis on which the op has one of these there is one such collective.
        forward: its name, as in `autopar.ir.conversion`.
        backward: name of the collective that runs on the gradient, "" where nothing is sent.
        itemsize_bytes: bytes of the message for one point of its leaves.
        leaves: factors of the message that a rank puts in.
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
        name: unique; the name of the node in the captured graph.
        kind: the operator, such as `aten.linear`.
        operands: names of its tensor operands (one may occur twice).
        results: names of its tensor results, those of `hidden` last.
        choices: the ways to run it along one mesh axis; the first is always `-`, which splits nothing.
        flops: forward floating-point operations of the whole op; an element-wise op counts one per element.
        saved: names of the operands and results that autograd keeps for backward.
        hidden: names of the results that only its own backward sees: masks, statistics, copies.
        is_view: whether it moves no data: its results lie in the memory of its first operand.
        module: path of the module it came from, "" at the top.
        has_rule: False for an op without a rule, which therefore runs replicated.
        work: the same operations divided into loop nests; those of all nests add up to `flops`.
        collectives: collectives inside the op itself, each with the choices under which it runs.
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

    def choice(self, label: str) -> Choice:
        """The choice with this label; the caller guarantees that it exists."""
        return self._by_label[label]

    @cached_property
    def _by_label(self) -> Mapping[str, Choice]:
        return {choice.label: choice for choice in self.choices}


@dataclass(frozen=True)
class Factor:
    """A named model dimension that runs through many tensors.

    Attributes:
        name: such as `batch`, `seq` or `mlp.up.out`.
        size: elements.
        roles: among "batch" (leading dim of an input, or that which ops take for their samples, and rows
            joined of it), "input" (any other dim of an input but the heads of attention),
            "parameter" (occurs in a parameter), "normalized" (some op normalizes over it) and "expert"
            (counts matrices of which a row meets some, as those of a mixture of experts).
    """

    name: str
    size: int
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stack:
    """Layers that repeat: the modules `path.0`, `path.1` ... of one kind.

    Attributes:
        path: qualified name of the list of layers.
        layers: how many the model has.
        captured: how many of them the graph has; where fewer, the middle one stands for the rest.
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
    """Lists of modules whose members `path.0`, `path.1` ... all have ops; the outermost of each path.

    Every layer stands for itself: they need not be alike.
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
        parameters: qualified parameter name -> tensor name. Tied parameters share one tensor and
            stand here once, under the first of their names.
        buffers: qualified buffer name -> tensor name; buffers are stored replicated.
        inputs: input name -> tensor name; a rank can take any part of an input for free.
        outputs: names of the result tensors; see `delivered`.
        factors: every named factor.
        stacks: its repeated layers; a captured layer may stand for many, see `stands_for`.
        precision: the policy it was captured under, None where every parameter is used as it is stored.
        whole_outputs: whether every result is delivered whole, on every rank.
        copies: op, parameter or buffer of a graph with few layers -> its names in the whole model, one for
            every layer that it stands for; empty where the graph has all layers.
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
        """The layout in which a result that is made in this one leaves: without P, or whole."""
        return tuple(R if self.whole_outputs or s.kind == "P" else s for s in layout)

    def stack_of(self, name: str) -> tuple[Stack, int] | None:
        """The stack and captured layer that a module or parameter of this name belongs to."""
        for stack in self.stacks:
            index = stack.index(name)
            if index is not None:
                return stack, index
        return None

    @cached_property
    def stands_for(self) -> Mapping[str, int]:
        """Names of ops, tensors and parameters that stand for several -> how many; others for one."""
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
        """Whole shapes of inputs and parameters, by `input tokens` or `parameter up.weight`."""
        edges = [(f"input {name}", tensor) for name, tensor in self.inputs.items()]
        edges += [(f"parameter {name}", tensor) for name, tensor in self.parameters.items()]
        return {name: tuple(self.tensors[tensor].shape) for name, tensor in edges}

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """Tensor name -> the op that makes it; leaves have none."""
        return {name: op for op in self.ops for name in op.results}


Labels = tuple[str, ...]  # the label of an op's choice on every mesh axis


def operand_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout each tensor operand of `op` must have, given its choice on every axis."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.operands[i] for c in chosen) for i in range(len(op.operands)))


def result_layouts(op: Op, labels: Labels) -> tuple[Layout, ...]:
    """The layout each tensor result of `op` then has."""
    chosen = [op.choice(label) for label in labels]
    return tuple(tuple(c.results[i] for c in chosen) for i in range(len(op.results)))


def split_factors(label: str) -> tuple[str, ...]:
    """The factors that a choice of this label splits, each as the label of the choice that splits it alone.

    >>> split_factors("t.0>e"), split_factors("t.0")
    (('t.0', 'e'), ('t.0',))
    """
    return tuple(label.split(EXCHANGED))


def go_together(labels: Labels) -> bool:
    """Whether an op can run by these choices at once: what some axis exchanges rows for, no axis splits in another way.

    >>> go_together(("t.0>e", "t.1>e")), go_together(("t.0>e", "e"))
    (True, False)
    """
    exchanged = {_letter(split_factors(x)[-1]) for x in labels if EXCHANGED in x}
    return all(EXCHANGED in x or _letter(x) not in exchanged for x in labels)


def _letter(label: str) -> str:
    return label.partition(".")[0]


def is_legal(graph: Graph, op: Op, labels: Labels, mesh: Mesh) -> bool:
    """Whether every operand and result of `op` can be cut as these choices ask, and the choices go together."""
    if not go_together(labels):
        return False
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    return all(
        divides(graph.tensors[name].dims, layout, mesh)
        for name, layout in zip(names, layouts, strict=True)
    )
