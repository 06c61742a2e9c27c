"""The ways to split an op, as data: letters on the dims of its operands and results.

A `Spec` is the expanded form of one line such as `b.. k, j k, +j -> b.. j | sum k` for one node. A dim
is a tuple of letters, most significant first, so that a view is a rule like any other: merging dims
of sizes 4 and 16 is `b, s -> b s` with one dim `(b, s)` in the result. Dims of size 1 have no letter.

A spec determines the choices (`autopar.analysis.factors`), the cost (the product of its letters' sizes), the tensors
saved for backward, and how the op runs on local shards (`localize`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import fx

from autopar._torch import storage_key
from autopar.ir.share import Share
from autopar.ops.nodes import bound_arguments, is_operator, named_arguments, tensor_operands, tensor_results

T = TypeVar("T")
Dim = tuple[str, ...]
Letters = tuple[Dim, ...]  # one tensor


def aten_ops(entry: T, names: str) -> dict[str, T]:
    """One entry of a table for several ops of ATen, whose names have spaces between them.

    >>> aten_ops("y0", "exp tanh")
    {'aten.exp': 'y0', 'aten.tanh': 'y0'}
    """
    return {f"aten.{name}": entry for name in names.split()}


class Local(Protocol):
    """The node being lowered, as a localizer sees it (implemented by autopar.passes.partition)."""

    node: fx.Node
    args: tuple[Any, ...]  # arguments with the converted local operands in place
    kwargs: dict[str, Any]
    result_shapes: tuple[tuple[int, ...], ...]  # local shapes of the results
    tile: int | None  # number of the run of rows whose calls are added, which backward computes again; None for none

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call to the local graph."""
        ...

    def axes(self, letter: str) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes along which `letter` is split, major first."""
        ...

    def is_even(self, letters: Iterable[str]) -> bool:
        """Whether the parts of each of these letters have one size."""
        ...

    def part(self, letter: str) -> int:
        """Size of this rank's part of a letter; 1 for a letter that the op lacks."""
        ...

    def first(self, letter: str) -> int:
        """Where this rank's part of a letter begins, of which the most significant factor alone is split."""
        ...

    def exchanges(self, letter: str) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes along which the op exchanges rows (`Spec.exchanges`)."""
        ...


class RuleDoesNotApply(Exception):
    """Raised by a rule for a call that it does not cover; the op then runs replicated."""


Localizer = Callable[[Local], fx.Node | tuple[fx.Node, ...]]  # a tuple for an op of several results


def run_as_is(local: Local) -> fx.Node:
    """The op on local operands with the arguments of the original call."""
    return local.emit(local.node.target, *local.args, **local.kwargs)


def parts(local: Local, letters: Sequence[str]) -> int:
    """Number of parts into which these letters together are cut."""
    return math.prod(size for letter in letters for _, size in local.axes(letter))


class Hidden(NamedTuple):
    """A tensor that an op computes only for its own backward: a mask, statistics, a copy of an operand.

    Attributes:
        name: name of the tensor, unique in the op.
        letters: letters of its dims, among those of the op.
        dtype: element type.
        times: number of such tensors, where no letter counts them.
    """

    name: str
    letters: Letters
    dtype: torch.dtype
    times: int = 1


class StatedCollective(NamedTuple):
    """A collective inside an op: the parts of a split op send each other messages while it runs.

    Attributes:
        over: letters; there is one such collective along every mesh axis that splits one of them. `t>e` stands for an
            axis along which rows are exchanged (`Spec.exchanges`).
        forward: name of the collective in forward, as in `autopar.ir.conversion`; "" for none.
        backward: name of the collective that runs on the gradient; "" for none.
        letters: letters of the message that a rank sends; splitting one of them cuts the message.
        itemsize_bytes: bytes of the message for one point of its letters.
    """

    over: frozenset[str]
    forward: str
    backward: str
    letters: tuple[str, ...]
    itemsize_bytes: int


class Nest(NamedTuple):
    """A loop nest of an op by letters, as `autopar.ir.Work` has it by factors.

    Attributes:
        times: FLOPs for each point of all letters but those of `groups`.
        rows, columns, inner, batch, groups, itemsize_bytes, gradients: see `autopar.ir.Work`.
        moved: letters of the tensors that the kernel reads and writes, each with the bytes for one element.
    """

    times: float
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    itemsize_bytes: int | None = None
    gradients: int = 0
    moved: tuple[tuple[tuple[str, ...], float], ...] = ()

    @classmethod
    def of(cls, times: float, letters: Sequence[str], left: Set[str], right: Set[str], result: Set[str]) -> Nest:
        """The nest of a product of two tensors with these letters; all are rows where nothing is summed.

        >>> Nest.of(2, "brkj", {*"brk"}, {*"bkj"}, {*"brj"})[1:5]
        (('r',), ('j',), ('k',), ('b',))
        """
        places = {x: _GROUP.get((x in left, x in right, x in result), "rows") for x in letters}

        def at(place: str) -> tuple[str, ...]:
            return tuple(x for x in letters if places[x] == place)

        inner = at("inner")
        return cls(times, at("rows"), at("columns"), inner, at("batch")) if inner else cls(times, tuple(letters))

    def flops(self, sizes: Mapping[str, int]) -> float:
        """FLOPs of the whole nest, with these sizes of letters."""
        letters = (*self.rows, *self.columns, *self.inner, *self.batch)
        return self.times * math.prod(sizes[letter] for letter in letters)


# Whether a letter is one of the left operand, of the right one, and of the result of a product -> what it counts.
_GROUP = {
    (True, False, True): "rows",
    (False, True, True): "columns",
    (True, True, False): "inner",
    (True, True, True): "batch",
}


class Kept(NamedTuple):
    """The tensors that an op keeps for backward: positions of operands and results, and hidden tensors."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    hidden: tuple[Hidden, ...] = ()


@dataclass(frozen=True)
class Spec:
    """The rule of one node.

    Attributes:
        operands: letters of every tensor operand, in the order they occur in the arguments.
        results: letters of every tensor result.
        sizes: elements of each letter.
        sums: letters summed away; splitting one leaves the results in P.
        whole: letters that cannot be split.
        agreed: letters over whose parts collectives inside the op compute one result; results without such a letter
            are in V.
        collectives: every collective that `localize` emits where letters are split.
        contiguous: letters of which only the most significant factor can be split, because the op counts positions
            from the rank's first one.
        additive: positions of operands that are added to the result, and so must be in P when a
            letter is summed over a split (a bias is added once, not once per rank).
        linear: sets of operand positions; with these in P and the others in V, the results are in P.
        flops: forward floating-point operations of the whole op.
        nests: the same by loop nest; () where `flops` is a multiple of the product of all letters, or of one tensor's.
        kept: what autograd keeps for backward; `autopar.rules.kept` fills it in.
        stated_kept: the same, where the rule says it; None leaves it to `autopar.rules.kept`.
        guess: why nobody has shown that the rule holds; "" where it was written or proved.
        is_view: whether the results lie in the memory of the first operand.
        normalized: letters the op normalizes over.
        batch: letters over samples that do not meet in the op: N of torch's documentation.
        joins: letter of a result -> letters of the operands that the op concatenates along it.
        experts: letters that count the experts of a mixture.
        exchanges: pairs of letters, such as `("t", "e")`. Along an axis, operands and results with the first letter can
            be split by it, and the others by the second. The op then sends rows to the ranks that have their part
            of the second letter, and sends results back.
        linear_backward: whether backward is linear in the gradient of the result.
        product_itemsize_bytes: bytes of one number in the op's products, where it rounds its operands for them; None
            where products have the format of the operands.
        looks_up: letters of the indices by which the op looks up rows (along dim 0) of its first operand; None for an
            op of another kind.
        transient: whether the op's operands and their gradients take memory only while it runs, as the logits of a loss
            that keeps log-probabilities instead.
        stretch: letter -> factor by which a part computes more than its share of the whole op, for letters with such
            parts; `t>e` for a split with an exchange.
        equal: letters of which the parts must have one size, for the op to be right on them.
        localize: function that writes the op on local shards into a rank's graph.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    sizes: Mapping[str, int]
    sums: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    agreed: frozenset[str] = frozenset()
    collectives: tuple[StatedCollective, ...] = ()
    contiguous: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    flops: int = 0
    nests: tuple[Nest, ...] = ()
    kept: Kept = field(default_factory=Kept)
    stated_kept: Kept | None = None
    guess: str = ""
    is_view: bool = False
    normalized: frozenset[str] = frozenset()
    batch: frozenset[str] = frozenset()
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    exchanges: tuple[tuple[str, str], ...] = ()
    linear_backward: bool = True
    product_itemsize_bytes: int | None = None
    looks_up: tuple[str, ...] | None = None
    transient: bool = False
    stretch: Mapping[str, float] = field(default_factory=dict)
    equal: frozenset[str] = frozenset()
    localize: Localizer = field(default=run_as_is, compare=False)

    @property
    def points(self) -> int:
        """Size of the iteration space: the product of all letters."""
        return math.prod(self.sizes.values())

    def splittable(self, letter: str) -> bool:
        """Whether the op can run with `letter` split."""
        if letter in self.whole or any(_count(t, letter) > 1 for t in self.operands + self.results):
            return False
        return letter in self.sums | self.agreed or all(_count(t, letter) for t in self.results)


def _count(tensor: Letters, letter: str) -> int:
    return sum(dim.count(letter) for dim in tensor)


class Call:
    """A node of the captured graph as a rule sees it: arguments by name, tensors by position.

    Args:
        node: the call.
        wanted: positions of the operands whose gradient is wanted; None for all that can have one.
    """

    def __init__(self, node: fx.Node, wanted: Iterable[int] | None = None) -> None:
        self.node = node
        self.operand_nodes = tensor_operands(node)
        self.operands: list[torch.Tensor] = [n.meta["val"] for n in self.operand_nodes]
        self.results: list[torch.Tensor] = tensor_results(node)
        self.arguments = bound_arguments(node) if is_operator(node) else {}
        floating = [i for i, x in enumerate(self.operands) if x.is_floating_point()]
        self.wanted = frozenset(floating if wanted is None else wanted)

    def __getitem__(self, name: str) -> Any:
        """The argument called `name` in the op's schema, its default where it was not given."""
        return self.arguments[name]

    def dim(self, value: int, operand: int = 0) -> int:
        """A dimension argument made non-negative for this operand."""
        return value % max(self.operands[operand].ndim, 1)

    def dims(self, value: int | Sequence[int] | None) -> tuple[int, ...]:
        """A list of dimensions of the first operand; None and () mean all."""
        if value is None or value == [] or value == ():
            return tuple(range(self.operands[0].ndim))
        return tuple(self.dim(d) for d in ([value] if isinstance(value, int) else value))


def local_arguments(local: Local) -> dict[str, Any]:
    """The local arguments by their names in the schema, in its order, with defaults."""
    return bound_arguments(local.node) | named_arguments(local.node, local.args) | local.kwargs


def flattens(tensor: torch.Tensor, *shapes: Sequence[int]) -> bool:
    """Whether a tensor can be expanded to the first shape, and then viewed in the last, without a copy."""
    same = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    expanded = same.expand(shapes[0]) if len(shapes) > 1 else same
    return storage_key(expanded.reshape(shapes[-1])) == storage_key(same)


def plain(shape: Sequence[int], prefix: str = "d") -> tuple[Letters, dict[str, int]]:
    """Letters for a tensor that a rule treats dim by dim, and their sizes; a dim of size 1 gets no letter.

    >>> plain((8, 1, 4))
    ((('d0',), (), ('d2',)), {'d0': 8, 'd2': 4})
    """
    letters = tuple((f"{prefix}{i}",) if size != 1 else () for i, size in enumerate(shape))
    return letters, {f"{prefix}{i}": size for i, size in enumerate(shape) if size != 1}


def needs_a_row(rule: Callable[[Call], Spec]) -> Callable[[Call], Spec]:
    """The rule of an op that torch does not run, forward or backward, on a tensor without rows."""

    def ruled(call: Call) -> Spec:
        spec = rule(call)
        return replace(spec, localize=functools.partial(_run_on_a_row, spec))

    return ruled


def _run_on_a_row(spec: Spec, local: Local) -> fx.Node:
    """The op as it is; on a rank without rows of the first operand on one of zeros, whose result is dropped."""
    sizes = dict(zip(spec.results[0], local.result_shapes[0], strict=True))
    lacking = {dim: size for dim, size in sizes.items() if isinstance(size, Share) and 0 in size.by_rank}
    x, *rest = local.args
    for d, dim in enumerate(reversed(spec.operands[0])):
        if dim in lacking:
            more = Share.of(int(size == 0) for size in lacking[dim].by_rank)
            x = local.emit(torch.ops.aten.constant_pad_nd.default, x, [0, 0] * d + [0, more])
    found = local.emit(local.node.target, x, *rest, **local.kwargs)
    for d, dim in enumerate(spec.results[0]):
        if dim in lacking:
            found = local.emit(torch.ops.aten.slice.Tensor, found, d, 0, lacking[dim])
    return found
