"""all_gather(p0), all_gather(p1), ... -> gather_0(p0, p1, ...): parameters that are moved together.

A parameter that is stored split and used whole (ZeRO-3) is converted inside the graph, and one that is in the host's
memory during a step is brought to the device there. Such chains of collectives are found here and replaced, several at
a time, by one submodule, which moves them in one buffer and can gather them again in backward instead of keeping them.
The same is done to parameters whose gradients alone move (`find_entries`), as those of replicated ones that every rank
uses for its part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from autopar.ops.collectives import Collective, fitted, is_collective
from autopar.ops.exchange import EXCHANGES
from autopar.ops.marks import is_move

_SHAPING = (torch.ops.aten.reshape.default, fitted)
MOVING = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", *EXCHANGES)


@dataclass(frozen=True)
class Chain:
    """Collectives (and reshapes around them) between a parameter and its users, after its move to the device, if any.

    Attributes:
        parameter: position of the parameter among the placeholders.
        nodes: nodes of the chain in order, with reshapes and fits; users take the last one.
    """

    parameter: int
    nodes: tuple[fx.Node, ...]

    @property
    def end(self) -> fx.Node:
        return self.nodes[-1]


def find_gathers(module: fx.GraphModule, parameters: int, reduced: Container[int] = ()) -> list[Chain]:
    """The chains from the first `parameters` placeholders that hold an all_gather or a move, by first use.

    For the placeholders in `reduced`, whose gradients travel in an element type of their own, a chain with any other
    collective counts as well.
    """
    return _by_first_use(
        module,
        parameters,
        lambda chain: (
            chain.parameter in reduced or "all_gather" in map(_name, chain.nodes) or any(map(is_move, chain.nodes))
        ),
    )


def find_entries(module: fx.GraphModule, parameters: int) -> list[Chain]:
    """The chains from the first `parameters` placeholders that take communication in backward alone."""

    def only_back(chain: Chain) -> bool:
        calls = [call for node in chain.nodes if (call := Collective.of(node))]
        moves_there = any(call.name in MOVING for call in calls)
        return not moves_there and any(call.backward in MOVING for call in calls)

    return _by_first_use(module, parameters, only_back)


def _by_first_use(module: fx.GraphModule, parameters: int, wanted: Callable[[Chain], bool]) -> list[Chain]:
    leaves = module.graph.find_nodes(op="placeholder")[:parameters]
    chains = [chain for i, leaf in enumerate(leaves) for chain in _chains(i, leaf) if wanted(chain)]
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    return sorted(chains, key=lambda chain: _first_use(chain.end, position))


def _chains(parameter: int, leaf: fx.Node) -> Iterator[Chain]:
    for user in leaf.users:
        path = [user]
        while _converts(path[-1]) and len(path[-1].users) == 1:
            path.append(next(iter(path[-1].users)))
        while path and not (is_collective(path[-1]) or is_move(path[-1])):
            path.pop()
        if path and all(map(_converts, path)):
            follower = next(iter(path[-1].users), None)
            if len(path[-1].users) == 1 and follower is not None and follower.target in _SHAPING:
                path.append(follower)
            yield Chain(parameter, tuple(path))


def _converts(node: fx.Node) -> bool:
    return is_collective(node) or is_move(node) or node.target in _SHAPING


def _name(node: fx.Node) -> str:
    call = Collective.of(node)
    return call.name if call else ""


def _first_use(node: fx.Node, position: dict[fx.Node, int]) -> int:
    return min((position[user] for user in node.users), default=position[node])


def group_gathers(
    module: fx.GraphModule,
    chains: Sequence[Chain],
    *,
    key: Callable[[Chain], Hashable],
    size_bytes: Callable[[Chain], int],
    make: Callable[[list[Chain]], nn.Module],
    bucket_bytes: int,
    name: str = "gather",
) -> None:
    """Replaces chains of equal `key`, in order, by calls of the submodules that `make` returns.

    A group is closed when its gathered parameters exceed `bucket_bytes`; submodules are `name_0`, ....
    """
    for number, group in enumerate(_groups(chains, key, size_bytes, bucket_bytes)):
        _replace(module, group, f"{name}_{number}", make(group))
    module.graph.eliminate_dead_code()
    module.recompile()


def _groups(
    chains: Sequence[Chain], key: Callable[[Chain], Hashable], size_bytes: Callable[[Chain], int], bucket_bytes: int
) -> list[list[Chain]]:
    groups: list[list[Chain]] = []
    latest: dict[Hashable, list[Chain]] = {}
    filled: dict[Hashable, int] = {}
    for chain in chains:
        kind = key(chain)
        if kind not in latest or filled[kind] + size_bytes(chain) > bucket_bytes:
            latest[kind], filled[kind] = [], 0
            groups.append(latest[kind])
        latest[kind].append(chain)
        filled[kind] += size_bytes(chain)
    return groups


def _replace(module: fx.GraphModule, group: list[Chain], name: str, gather: nn.Module) -> None:
    graph = module.graph
    leaves = graph.find_nodes(op="placeholder")
    position = {node: i for i, node in enumerate(graph.nodes)}
    users = [user for chain in group for user in chain.end.users]
    module.add_submodule(name, gather)
    with graph.inserting_before(min(users, key=position.__getitem__)):
        call = graph.call_module(name, tuple(leaves[chain.parameter] for chain in group))
        for i, chain in enumerate(group):
            chain.end.replace_all_uses_with(graph.call_function(operator.getitem, (call, i)))
    for chain in group:
        for node in reversed(chain.nodes):
            graph.erase_node(node)
