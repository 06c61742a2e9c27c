"""Simulates all ranks of a program in one process, in lockstep.

Every node of the local graph runs once for each rank before the next node runs. A collective gets the tensors
of all ranks at once, and is computed by its definition (`collectives.LOCAL`). Its backward is the
transposed collective, as on real process groups, so that a wrong transpose gives a wrong gradient.

On a mesh with vacant places these are simulated, too, and what they would send is replaced by garbage: a step that
needs somebody there gives a wrong result.

Blocks that the plan recomputes run a second time in backward, by the code of the runtime, which sees a list of all
ranks' tensors in the place of one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.ir import CollectiveCall, Dims, Layout, Mesh, calls
from autopar.ir.call import FIT
from autopar.ops.alone import absent, alone
from autopar.ops.collectives import LOCAL, Collective, fitted, seen
from autopar.ops.exchange import table_of
from autopar.ops.marks import kept
from autopar.ops.nodes import draws as draws_numbers
from autopar.ops.ring import Ring
from autopar.passes import arguments_on, fold_blocks
from autopar.program.program import Program
from autopar.proof.lockstep_rings import attend_together
from autopar.proof.rank_draws import RankDraws
from autopar.proof.streams import MicroBatchStreams
from autopar.runtime.execute.recompute import Recomputed
from autopar.runtime.execute.saved import SlicedSaves
from autopar.runtime.ranks.tiers import Tiers

Ranks = list[Tensor]  # one local tensor per rank


class _Collective(torch.autograd.Function):
    """One collective on all ranks, with the transposed one as backward."""

    @staticmethod
    def forward(
        ctx: Any, call: CollectiveCall, mesh: Mesh, tables: Sequence[Tensor], *ranks: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.mesh, ctx.tables = call, mesh, tables
        return tuple(_define(call.name, call.dims, call.axis, mesh, tables, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, mesh = ctx.call, ctx.mesh
        back = _define(call.backward, call.dims[::-1], call.axis, mesh, ctx.tables, grads)
        return None, None, None, *back


def _define(
    name: str, dims: Sequence[int], axis: int, mesh: Mesh, tables: Sequence[Tensor], ranks: Sequence[Tensor]
) -> Ranks:
    results = []
    ranks = [*ranks[: mesh.ranks], *map(_garbage, ranks[mesh.ranks :])]
    for rank in range(mesh.size):
        peers = mesh.peers(rank, axis)
        shards = [ranks[peer] for peer in peers]
        given = [tables[peer] for peer in peers] if tables else dims
        result = LOCAL[name](shards, mesh.coordinates(rank)[axis], given)
        results.append(result.clone())  # an autograd.Function must not return its inputs
    return results


def _garbage(x: Tensor) -> Tensor:
    """Values that stand for a tensor that no rank has sent: NaN, or the largest integer."""
    if x.dtype is torch.bool:
        return ~x
    return torch.full_like(x, torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max)


def collective(call: CollectiveCall, mesh: Mesh, ranks: Sequence[Tensor], tables: Sequence[Tensor] = ()) -> Ranks:
    """Runs one collective on all ranks. `tables` has the table of counts of every rank for an exchange of rows."""
    own = [call.on(rank) for rank in range(mesh.size)]
    ranks = [x if each.before is None else seen(x, each.before) for x, each in zip(ranks, own, strict=True)]
    if call.name == FIT:
        ranks = [fitted(x, each.fits) for x, each in zip(ranks, own, strict=True)]
    else:
        ranks = list(_Collective.apply(call, mesh, tables, *ranks))
    return [x if each.after is None else seen(x, each.after) for x, each in zip(ranks, own, strict=True)]


def convert(
    ranks: Ranks, dims: Dims, source: Layout, target: Layout, mesh: Mesh, *, back_by_rows: bool = False
) -> Ranks:
    """Converts the local tensors of all ranks from one layout to another, differentiably.

    With `back_by_rows` the gradient is carried by rows, see [Note: by rows] in autopar/ir/conversion.py.
    """
    steps = calls(dims, source, target, mesh)
    return _converted(ranks, [x.back_by_rows for x in steps] if back_by_rows else steps, mesh)


def run(program: Program, arguments: Sequence[Ranks], streams: MicroBatchStreams | None = None) -> list[Ranks]:
    """Runs a program on all ranks; returns the tensor outputs of the graph, each for all ranks.

    Args:
        program: the program of a rank.
        arguments: arguments of the graph, each on all ranks.
        streams: noise from which its ops draw; None to draw from the default generator, as the runtime does.
    """
    mesh, draws = program.plan.mesh, RankDraws(program.plan, streams)
    saves = SlicedSaves(program.slices, mesh, lambda ranks, steps: _converted(ranks, steps, mesh), Tiers(_torch.CPU))
    module = _together(program, saves, draws)
    with draws.running(), saves.watching():
        return _run(module, arguments)


def _converted(ranks: Sequence[Tensor], steps: Sequence[CollectiveCall], mesh: Mesh) -> Ranks:
    """The local tensors of all ranks after the steps of a conversion."""
    for call in steps:
        ranks = collective(call, mesh, ranks)
    return list(ranks)


def _together(program: Program, saves: SlicedSaves, draws: RankDraws) -> fx.GraphModule:
    """The graph of a program on all ranks, in which blocks are recomputed as the runtime recomputes them."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function" and node.target is not operator.getitem:
            copies[node].target = _OnAllRanks(node, program.plan.mesh, saves, draws)
            copies[node].args, copies[node].kwargs = arguments_on(copies[node], 0)  # every rank has its own sizes
    with _torch.code_when_called():
        module = fx.GraphModule(nn.Module(), graph)
        return fold_blocks(
            module, program.recomputed, Recomputed, parameters=len(program.parameters), received=len(program.received)
        )


class _OnAllRanks:
    """A call of a rank's graph that runs on all ranks.

    It takes lists of what every rank has, and gives one; if the call has several results, a tuple of lists.

    Args:
        node: the call of a rank.
        mesh: the axes of the ranks.
        saves: the slices in which tensors are saved.
        draws: what the ranks draw.

    Attributes:
        draws: whether the call draws random numbers.
    """

    def __init__(self, node: fx.Node, mesh: Mesh, saves: SlicedSaves, draws: RankDraws) -> None:
        self.__name__, self.draws = node.name, draws_numbers(node)
        self._node, self._mesh, self._saves, self._draws = node, mesh, saves, draws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values: dict[fx.Node, list[Any]] = {}
        _bind((self._node.args, self._node.kwargs), (args, kwargs), values)
        if self._node.target is kept:
            x, name = self._node.args
            self._saves.note(values[x], str(name))  # type: ignore[index]
            return values[x]  # type: ignore[index]
        results = _run_node(self._node, self._mesh, values, self._draws)
        several = next((x for x in results if isinstance(x, (tuple, list))), None)
        if several is None:
            return results
        return tuple([self._result(x, i, rank) for rank, x in enumerate(results)] for i in range(len(several)))

    def _result(self, results: Any, i: int, rank: int) -> Any:
        """One of several results; a rank that has left the call to another has the same in place of all."""
        if isinstance(results, (tuple, list)):
            return results[i]
        left = next((alone(user) for user in self._node.users if user.args[1] == i), None)
        return absent([results], left.on(rank).shape, left.dtype, left.needs_grad) if left else results


def _bind(pattern: Any, given: Any, values: dict[fx.Node, list[Any]]) -> None:
    """Notes what stands in arguments in the place of every node of a pattern."""
    if isinstance(pattern, fx.Node):
        values[pattern] = given
    elif isinstance(pattern, dict):
        _bind(list(pattern.values()), [given[name] for name in pattern], values)
    elif isinstance(pattern, (tuple, list)):
        for each, own in zip(pattern, given, strict=True):
            _bind(each, own, values)


def _run(module: fx.GraphModule, arguments: Sequence[Ranks]) -> list[Ranks]:
    """The results of a graph; a value is freed after its last use."""
    values: dict[fx.Node, Any] = {}
    remaining = iter(arguments)
    nodes = list(module.graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    expires: dict[fx.Node, list[fx.Node]] = {}
    for argument, user in last_use.items():
        expires.setdefault(user, []).append(argument)
    for node in nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            return [values[argument] for argument in node.args[0]]
        else:
            call = node.target if node.op == "call_function" else module.get_submodule(node.target)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(*args, **kwargs)
        for argument in expires.get(node, []):
            del values[argument]
    raise AssertionError("a graph without output")


def _run_node(node: fx.Node, mesh: Mesh, values: dict[fx.Node, list[Any]], draws: RankDraws) -> list[Any]:
    if ring := Ring.of(node):
        return attend_together(ring, mesh, values)
    if call := Collective.of(node):
        counts = values[call.counts] if call.counts is not None else []
        tables = [table_of(each, call.size) for each in counts]
        return collective(call.call(mesh), mesh, values[call.x], tables)
    results = []
    left = alone(node)
    for rank in range(mesh.size):
        if left is not None and not left.runs_on(rank, mesh):
            operands = [values[each][rank] for each in node.all_input_nodes]
            results.append(absent(operands, left.on(rank).shape, left.dtype, left.needs_grad))
            continue
        args, kwargs = fx.map_arg(arguments_on(node, rank), _of_rank(values, rank))
        with draws.on(node, rank, args):
            results.append(node.target(*args, **kwargs))  # type: ignore[operator]
    return results


def _of_rank(values: dict[fx.Node, list[Any]], rank: int) -> Callable[[fx.Node], Any]:
    return lambda node: values[node][rank]
