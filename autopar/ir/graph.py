"""The model as the search sees it: tensors with factored dims, ops with choices, and stacks of repeated layers.

This module does not import torch. `autopar.analysis.factors` makes a `Graph` from a captured model. The search picks
one `Choice` per op and mesh axis, and one storage layout per parameter. `autopar.passes` then rewrites the model's
graph into the program of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.ir.choice import Choice, Labels, go_together, is_least_deep, runs_alone
from autopar.ir.files import is_count
from autopar.ir.layout import Dims, Layout, R, nested, shape_of
from autopar.ir.mesh import Mesh
from autopar.ir.op import Leaf, Op, operand_layouts, parts_fit, result_layouts, why_not_alone
from autopar.ir.precision import MixedPrecision
from autopar.ir.uneven import can_split, reaches_all


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
        return replace(self, itemsize_bytes=itemsize_bytes, stored_itemsize_bytes=None, gradient_itemsize_bytes=None)

    @property
    def formats(self) -> tuple[int, int | None, int | None]:
        """Bytes of one element in use, in storage and of the gradient; None has the meaning given for the fields."""
        return self.itemsize_bytes, self.stored_itemsize_bytes, self.gradient_itemsize_bytes


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
        return int(number) if not head and is_count(number) else None

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
        position = next((i for i, name in enumerate(names) if is_count(name)), None)
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
        stacks: lists of repeated layers; one captured layer may stand for many, see `layer_count`.
        precision: mixed-precision policy of the capture; None where ops use parameters in their stored dtype.
        loss_tile_bytes: bytes of logits of a tile of the loss; None without tiles.
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
    loss_tile_bytes: int | None = None
    whole_outputs: bool = False
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def delivered(self, layout: Layout) -> Layout:
        """The layout in which the program returns a result that the op computing it leaves in `layout`.

        Partial sums are reduced, the results of one rank are broadcast, and with `whole_outputs` split results are
        gathered. Axes nest in the order of the mesh, as in DTensor.
        """
        states = [R if self.whole_outputs or s.kind in "PO" else s for s in layout]
        return nested(states, range(len(states)))

    def stack_of(self, name: str) -> tuple[Stack, int] | None:
        """The stack and captured layer that a module or parameter of this name belongs to."""
        known = self._stacks_of
        if name not in known:
            found = ((stack, stack.index(name)) for stack in self.stacks)
            known[name] = next(((s, index) for s, index in found if index is not None), None)
        return known[name]

    @cached_property
    def _stacks_of(self) -> dict[str, tuple[Stack, int] | None]:
        """Cached answers of `stack_of`: pricing asks for the same names hundreds of thousands of times."""
        return {}

    @cached_property
    def layer_count(self) -> Mapping[str, int]:
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
    def lookups(self) -> Mapping[str, tuple[tuple[Leaf, ...], ...]]:
        """Name of a parameter's tensor of which ops only look up rows -> for each of these ops the factors of its
        indices. A parameter with another use has no entry: its gradient may be nonzero in every row.
        """
        users: dict[str, list[Op]] = {tensor: [] for tensor in self.parameters.values()}
        for op in self.ops:
            for name in op.operands:
                users.get(name, []).append(op)
        return {
            tensor: tuple(op.looks_up or () for op in ops)
            for tensor, ops in users.items()
            if ops and all(op.looks_up is not None and op.operands[0] == tensor for op in ops)
        }

    @cached_property
    def edge_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of inputs and parameters, by keys such as `input tokens` and `parameter up.weight`."""
        edges = [(f"input {name}", tensor) for name, tensor in self.inputs.items()]
        edges += [(f"parameter {name}", tensor) for name, tensor in self.parameters.items()]
        return {name: tuple(self.tensors[tensor].shape) for name, tensor in edges}

    @cached_property
    def batch(self) -> frozenset[str]:
        """Names of the factors that are the batch: those of the largest size among the batch dims of inputs.

        An input such as a table of positions has a smaller leading dim, which is not the batch.
        """
        of_inputs = {f for name in self.inputs.values() for dim in self.tensors[name].factors for f in dim}
        named = {name: f.size for name, f in self.factors.items() if "batch" in f.roles and name in of_inputs}
        largest = max(named.values(), default=0)
        return frozenset(name for name, size in named.items() if size == largest)

    def can_cut(self, choice: Choice, count: int) -> bool:
        """Whether axes of so many ranks in all can split the factor of a choice."""
        if choice.needs_equal or not choice.size:
            return choice.size % count == 0
        return reaches_all(choice.size, count) or (choice.size > 1 and choice.factor in self.batch)

    def can_take(self, name: str, layout: Layout, mesh: Mesh) -> bool:
        """Whether a layout is legal for a tensor: for the ops that read or write it, and as an input of a rank."""
        tensor = self.tensors[name]
        return can_split(tensor.dims, tensor.factors, layout, mesh, self.batch)

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """Tensor name -> the op that computes it; inputs, parameters and buffers have no entry."""
        return {name: op for op in self.ops for name in op.results}


def is_legal(graph: Graph, op: Op, labels: Labels, mesh: Mesh) -> bool:
    """Whether an op can run under these choices on the mesh.

    The choices must go together, their depths must be the least, every size that they split must divide by the number
    of parts or be one that they can split in parts of different sizes, and one rank must be able to run the op alone
    where a label says so (`why_not_alone`).
    """
    if not (go_together(labels) and is_least_deep(labels)) or (runs_alone(labels) and why_not_alone(op, labels, mesh)):
        return False
    names = (*op.operands, *op.results)
    layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
    takes = all(graph.can_take(name, layout, mesh) for name, layout in zip(names, layouts, strict=True))
    return takes and parts_fit(op, labels, mesh)
