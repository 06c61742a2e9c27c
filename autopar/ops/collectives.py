"""The collectives of the graph of one rank, as differentiable custom ops.

All ops have the same signature,

    torch.ops.autopar.NAME(x, dims, size, group, backward) -> Tensor

where `dims` are dimensions of `x`: none, one, or for all-to-all the dim to gather and the dim to split. `size` is the
number of ranks in the group. `group` is the name of a mesh axis; when the graph is bound to process groups it becomes
a c10d group name. `backward` names the transposed op of autopar/ir/conversion.py, which autograd runs on the gradient
with the dims reversed. `dispatch` and `combine` of `autopar.ops.exchange` have no dims, and a table of counts as a
last argument.

`LOCAL` defines every op by the tensors of all ranks of a group. The kernels in `KERNELS`, which run on process groups,
must agree with it. Some ops of `LOCAL`, such as `broadcast`, convert tensors that
one rank owns (the state `O(i)`). They have no kernel, because a rank that has nothing cannot tell the shape from its
local tensor: `autopar.runtime.collectives.alone` binds them together with the shape. Among their `dims` are positions
of owners, see `CollectiveCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar import _torch
from autopar._torch import OpOverload
from autopar.errors import AutoparError, PeerError, first_line
from autopar.ir import CollectiveCall, Mesh
from autopar.ir.conversion import OWNER_COLLECTIVES
from autopar.ops.exchange import EXCHANGES, combined, dispatched, table_of, turned
from autopar.ops.nodes import schema
from autopar.ops.rows import add_rows, rows_of
from autopar.ops.trail import trail

SIGNATURE = "(Tensor x, int[] dims, int size, str group, str backward) -> Tensor"

# --- definitions: local tensors of all ranks of a group, and the position of one rank -> its result


def _keep_first(shards: Sequence[Tensor], position: int) -> Tensor:
    return shards[position] if position == 0 else torch.zeros_like(shards[position])


def _cut(x: Tensor, dim: int, size: int, position: int) -> Tensor:
    width = x.shape[dim] // size
    return x.narrow(dim, position * width, width)


def _widen(x: Tensor, dim: int, size: int, position: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    result = x.new_zeros(shape)
    _cut(result, dim, size, position).copy_(x)
    return result


def _sum(shards: Sequence[Tensor]) -> Tensor:
    result = shards[0]
    for shard in shards[1:]:
        result = result + shard
    return result


def _sum_rows(shards: Sequence[Tensor], owner: int) -> Tensor:
    result = shards[owner].clone()
    for shard in (*shards[:owner], *shards[owner + 1 :]):
        add_rows(result, rows_of(shard))
    return result


def _only_rows(x: Tensor) -> Tensor:
    return add_rows(torch.zeros_like(x), rows_of(x))


def _exchange(shards: Sequence[Tensor], position: int, gathered: int, cut: int) -> Tensor:
    return torch.cat([_cut(x, cut, len(shards), position) for x in shards], gathered)


def nothing(x: Tensor) -> Tensor:
    """The local tensor on a rank that does not own `x`: a tensor without elements, whose dim 0 is 0."""
    return x.new_empty((0, *x.shape[1:]))


def seen(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in another shape; a tensor from `nothing` gets this shape with a dim 0 of 0."""
    if x.shape == shape:
        return x
    if x.numel() == 0 and all(shape):
        return x.reshape((0, *shape[1:]))
    return x.reshape(tuple(shape))


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in another size of some dims, padded with zeros or cut at their end.

    See [Note: uneven parts] in autopar/ir/uneven.py.
    """
    for dim, size in enumerate(shape):
        if x.shape[dim] > size:
            x = x.narrow(dim, 0, size)
        elif x.shape[dim] < size:
            more = (*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :])
            x = torch.cat([x, x.new_zeros(more)], dim)
    return x.contiguous()


def _at_owner(x: Tensor, is_owner: bool) -> Tensor:
    return x if is_owner else nothing(x)


LOCAL: dict[str, Callable[[Sequence[Tensor], int, Sequence[Any]], Tensor]] = {
    "vary": lambda xs, i, dims: xs[i],
    "partial": lambda xs, i, dims: _keep_first(xs, i),
    "all_reduce": lambda xs, i, dims: _sum(xs),
    "all_gather": lambda xs, i, dims: torch.cat(list(xs), dims[0]),
    "reduce_scatter": lambda xs, i, dims: _cut(_sum(xs), dims[0], len(xs), i),
    "shard": lambda xs, i, dims: _cut(xs[i], dims[0], len(xs), i).contiguous(),
    "pad": lambda xs, i, dims: _widen(xs[i], dims[0], len(xs), i),
    "all_to_all": lambda xs, i, dims: _exchange(xs, i, *dims),
    # exchanges of rows, with the tables of counts of all ranks in place of dims
    "dispatch": lambda xs, i, tables: dispatched(xs, tables, i),
    "combine": lambda xs, i, tables: combined(xs, tables, i),
    # conversions of a tensor that one rank owns
    "broadcast": lambda xs, i, owner: xs[owner[0]],
    "reduce": lambda xs, i, owner: _at_owner(_sum(xs), i == owner[0]),
    "keep": lambda xs, i, owner: _at_owner(xs[i], i == owner[0]),
    "fill": lambda xs, i, owner: xs[i] if i == owner[0] else torch.zeros_like(xs[owner[0]]),
    "scatter": lambda xs, i, at: _cut(xs[at[0]], at[1], len(xs), i).contiguous(),
    "gather": lambda xs, i, at: _at_owner(torch.cat(list(xs), at[0]), i == at[1]),
    "send": lambda xs, i, owners: _at_owner(xs[owners[0]], i == owners[1]),
    # the same by rows, which only gradients of parameters do
    "reduce_rows": lambda xs, i, owner: _at_owner(_sum_rows(xs, owner[0]), i == owner[0]),
    "send_rows": lambda xs, i, owners: _at_owner(_only_rows(xs[owners[0]]), i == owners[1]),
}


class Collective(NamedTuple):
    """A collective of a rank's graph, read from its node.

    Attributes:
        name: name of the op in `torch.ops.autopar`.
        x: node of the local tensor.
        dims: dimensions of `x`, as the op takes them.
        size: number of ranks in the group.
        group: name of the mesh axis; in a bound graph, c10d name of the process group.
        backward: name of the transposed op, which autograd runs on the gradient.
        counts: node of the table of row counts, for `dispatch` and `combine`; None for the others.
    """

    name: str
    x: fx.Node
    dims: tuple[int, ...]
    size: int
    group: str
    backward: str
    counts: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Collective | None:
        """The collective that a node calls; None for any other node."""
        if not is_collective(node):
            return None
        x, dims, size, group, backward, *counts = node.args
        assert isinstance(x, fx.Node) and isinstance(dims, Sequence), node.format_node()
        name = schema(node).name.removeprefix("autopar::")
        return cls(name, x, tuple(dims), size, group, backward, *counts)  # type: ignore[arg-type]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the node."""
        counts = () if self.counts is None else (self.counts,)
        return self.x, list(self.dims), self.size, self.group, self.backward, *counts

    def call(self, mesh: Mesh) -> CollectiveCall:
        """The collective as plain data, with the position of its mesh axis; only for a graph that is not bound yet."""
        return CollectiveCall(self.name, self.backward, self.dims, mesh.index(self.group))


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a collective of torch.ops.autopar."""
    target = node.target
    ours = isinstance(target, OpOverload) and target.namespace == "autopar"
    return ours and schema(node).name.removeprefix("autopar::") in _NAMES


# --- the kernels on process groups


def _rank(group: str) -> int:
    return _torch.resolve_group(group).rank()


def _on_bytes(kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a kernel that only moves data, and sends bool as uint8, because backends do not support bool.

    The tensor is converted and not viewed as uint8: Inductor's C++ (torch 2.13) cannot index through such a view.
    """
    if x.dtype is torch.bool:
        return kernel(x.to(torch.uint8)).to(torch.bool)
    return kernel(x)


class _NamingFailures:
    """See `naming_failures`: a generator would take the host 2 microseconds, a third of a small collective."""

    __slots__ = ("collective", "group")

    def __init__(self, collective: str, group: str) -> None:
        self.collective, self.group = collective, group

    def __enter__(self) -> None:
        if (own := trail()) is not None:
            own.note(self.collective, self.group)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        collective, group = self.collective, self.group
        reason = first_line(error)
        message = (
            f"{collective} broke: another rank died, hangs, or runs another program. Its own error is in its own "
            f"log. ({reason})"
        )
        raise PeerError(message, collective=collective, group=group, reason=reason) from error


def naming_failures(collective: str, group: str) -> AbstractContextManager[None]:
    """Context that turns an error of communication in the group with this c10d name into a PeerError."""
    return _NamingFailures(collective, group)


def _group_all_reduce(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    own = x.contiguous()
    with naming_failures("all_reduce", group):
        return _torch.all_reduce(own, group)


def _group_all_gather(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    own = x.contiguous()
    with naming_failures("all_gather", group):
        gathered = _on_bytes(lambda y: _torch.all_gather(y, size, group), own)
    return gathered if dims[0] == 0 else torch.cat(gathered.chunk(size), dims[0])


def _group_reduce_scatter(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    stacked = (x if dims[0] == 0 else torch.cat(x.chunk(size, dims[0]))).contiguous()
    with naming_failures("reduce_scatter", group):
        return _torch.reduce_scatter(stacked, size, group)


def _group_all_to_all(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    gathered, cut = dims
    stacked = torch.cat(x.chunk(size, cut)).contiguous()
    with naming_failures("all_to_all", group):
        received = _on_bytes(lambda y: _torch.all_to_all(y, size, group), stacked)
    return torch.cat(received.chunk(size), gathered)


def _group_shard(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    return _cut(x, dims[0], size, _rank(group)).clone(memory_format=torch.contiguous_format)


def _group_pad(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    return _widen(x, dims[0], size, _rank(group))


def _group_partial(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    own = x if _rank(group) == 0 else torch.zeros_like(x)
    return own.clone(memory_format=torch.contiguous_format)


def _group_vary(x: Tensor, dims: list[int], size: int, group: str) -> Tensor:
    # A compiled graph that returns an alias makes the alias anew outside the graph, without this op's backward.
    return x.clone() if _torch.is_functional(x) else x.view_as(x)


def _group_exchange(name: str, x: Tensor, counts: Tensor, size: int, group: str) -> Tensor:
    """Runs `dispatch` or `combine`. Sent rows are ordered by receiving rank, received rows by sending rank."""
    sent, received = table_of(counts, size)
    if name == "combine":
        x, sent, received = turned(x, received.t()), received, sent
    here, there = sent.sum(1).tolist(), received.sum(1).tolist()
    if sum(here) != len(x):
        raise AutoparError(
            f"{name}: {sum(here)} of {len(x)} rows have an expert from 0 to {sent.numel() - 1}, but all must. Let the "
            "router give every row an expert that exists."
        )
    own = x.contiguous()
    with naming_failures(name, group):
        got = _on_bytes(lambda y: _torch.exchange_rows(y, here, there, group), own)
    return turned(got, received) if name == "dispatch" else got


KERNELS: dict[str, Callable[[Tensor, list[int], int, str], Tensor]] = {
    "vary": _group_vary,
    "partial": _group_partial,
    "all_reduce": _group_all_reduce,
    "all_gather": _group_all_gather,
    "reduce_scatter": _group_reduce_scatter,
    "shard": _group_shard,
    "pad": _group_pad,
    "all_to_all": _group_all_to_all,
}

_NAMES = frozenset({*KERNELS, *EXCHANGES, *OWNER_COLLECTIVES})

# Ops that a compiler may trace into, because their code is the same on every rank. The others stay one op for it.
FUNCTIONAL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


# --- shapes, autograd and registration


def result_shape(name: str, shape: Sequence[int], dims: Sequence[int], size: int) -> list[int]:
    """Shape of an op's result on one rank.

    A rank that does not own the result has a tensor without elements instead, see `nothing`.

    Args:
        name: name of the op, such as "all_gather".
        shape: shape of the rank's local tensor.
        dims: dimensions, as the op takes them.
        size: number of ranks in the group.

    >>> result_shape("all_gather", (4, 6), [0], 2), result_shape("reduce_scatter", (4, 6), [1], 2)
    ([8, 6], [4, 3])
    """
    result = list(shape)
    grows = {"all_gather": dims, "pad": dims, "all_to_all": dims[:1], "gather": dims[:1]}.get(name, ())
    cuts = {"reduce_scatter": dims, "shard": dims, "all_to_all": dims[1:], "scatter": dims[1:]}
    shrinks = cuts.get(name, ())
    for dim in grows:
        result[dim] *= size
    for dim in shrinks:
        assert result[dim] % size == 0, (name, shape, dims, size)
        result[dim] //= size
    return result


# [Note: backward inside forward] A model that calls torch.autograd.grad in its forward (a gradient penalty, a
# physics-informed loss) runs backward inside a frame that Dynamo traces. Dynamo would then compile the backward of a
# collective as if it were the user's code.


class _Transposed(torch.autograd.Function):
    """Runs a collective in forward and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[str, list[int], int, str, str], *counts: Tensor) -> Tensor:
        ctx.call, ctx.counts = call, counts
        name, dims, size, group, backward = call
        with _torch.below_autograd():
            if name == "vary" or (name in FUNCTIONAL and _torch.is_functional(x)):
                return KERNELS[name](x, dims, size, group)
            return _torch.autopar_op(name)(x, dims, size, group, backward, *counts)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, dims, size, group, backward = ctx.call
        found = run_collective(backward, grad, dims[::-1], size, group, name, *ctx.counts)
        return found, None, *(None for _ in ctx.counts)


def run_collective(
    name: str, x: Tensor, dims: list[int], size: int, group: str, backward: str, *counts: Tensor
) -> Tensor:
    """Calls `torch.ops.autopar.<name>`, without the dispatcher of ops where nobody traces or watches them.

    The dispatcher takes the host as long as the collective of a small tensor.
    """
    if counts or not _torch.runs_at_once(x):
        return _torch.autopar_op(name)(x, dims, size, group, backward, *counts)
    if x.requires_grad and torch.is_grad_enabled():
        return _record(x, (name, dims, size, group, backward))
    return KERNELS[name](x, dims, size, group)


class _TransposedAtOnce(_Transposed):
    """The same where nobody traces or watches ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[str, list[int], int, str, str], *counts: Tensor) -> Tensor:
        ctx.call, ctx.counts = call, counts
        return KERNELS[call[0]](x, *call[1:-1])


# `Function.apply` without its questions about transforms of torch.func, which `runs_at_once` has asked.
_record = super(torch.autograd.Function, _TransposedAtOnce).apply


def _register(library: torch.library.Library, name: str) -> None:
    def kernel(x: Tensor, dims: list[int], size: int, group: str, backward: str) -> Tensor:
        return KERNELS[name](x, dims, size, group)

    def fake(x: Tensor, dims: list[int], size: int, group: str, backward: str) -> Tensor:
        # The result of every kernel is contiguous.
        return x.new_empty(result_shape(name, x.shape, dims, size))

    def autograd(x: Tensor, dims: list[int], size: int, group: str, backward: str) -> Tensor:
        return _Transposed.apply(x, (name, dims, size, group, backward))

    if name == "vary":  # its result shares the memory of `x`, so it has no kernel below autograd
        library.define(name + SIGNATURE.replace("Tensor", "Tensor(a)"))
        library.impl(name, autograd, "CompositeImplicitAutograd")
        return
    library.define(name + SIGNATURE)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd")
    library.impl(name, fake, "Meta")


def _register_exchange(library: torch.library.Library, name: str) -> None:
    def kernel(x: Tensor, dims: list[int], size: int, group: str, backward: str, counts: Tensor) -> Tensor:
        return _group_exchange(name, x, counts, size, group)

    def fake(x: Tensor, dims: list[int], size: int, group: str, backward: str, counts: Tensor) -> Tensor:
        return x.new_empty(x.shape)  # the size if all experts get as many rows

    def autograd(x: Tensor, dims: list[int], size: int, group: str, backward: str, counts: Tensor) -> Tensor:
        return _Transposed.apply(x, (name, dims, size, group, backward), counts)

    library.define(name + SIGNATURE.replace("str backward)", "str backward, Tensor counts)"))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd")
    library.impl(name, fake, "Meta")


def _register_on_host(library: torch.library.Library) -> None:
    """Defines `on_host(x)`, which copies a tensor to the host's memory on every device."""
    library.define("on_host(Tensor x) -> Tensor")
    library.impl("on_host", lambda x: x.cpu(), "CompositeExplicitAutograd")
    library.impl("on_host", torch.empty_like, "Meta")


def register() -> torch.library.Library:
    """Defines `torch.ops.autopar.*`; the ops exist as long as the returned library.

    The import of this module calls it once, below.
    """
    library = torch.library.Library("autopar", "DEF")
    for name in KERNELS:
        _register(library, name)
    for name in EXCHANGES:
        _register_exchange(library, name)
    for name in sorted(OWNER_COLLECTIVES):
        library.define(name + SIGNATURE)
    _register_on_host(library)
    return library


LIBRARY = register()


def group_name(group: dist.ProcessGroup) -> str:
    """The c10d name of a process group, by which the kernels find it."""
    return group.group_name
