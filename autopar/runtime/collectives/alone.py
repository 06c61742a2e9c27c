"""Binds the calls that only some ranks run (`autopar.ops.alone`) to one rank.

    linear(x, w)                  -> absent((x, w), ...)     on a rank that is not the owner
    broadcast(x, [0], 2, "dp")    -> hop_0(x)                on every rank of the axis
    all_gather(x, [0], 2, "tp")   -> absent((x,), ...)       on a rank of another position along dp, where x is in O

Each call is replaced by one call, so that the graphs of all ranks keep one shape.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

from autopar.errors import PlanError
from autopar.ir.conversion import OWNER_COLLECTIVES
from autopar.ops.alone import Alone, absent, alone
from autopar.ops.collectives import Collective
from autopar.runtime.collectives.hops import Hop
from autopar.runtime.collectives.transfer import travel
from autopar.runtime.ranks.world import World


class _TravelAlong(nn.Module):
    """Converts a tensor from or to the state O along one axis, differentiably."""

    def __init__(self, hop: Hop, world: World) -> None:
        super().__init__()
        self._hop, self._world = hop, world

    def forward(self, x: Tensor) -> Tensor:
        return travel(x, (self._hop,), self._world)


def leave_to_owners(module: fx.GraphModule, world: World, *, compiles: bool) -> bool:
    """Replaces the calls that this rank does not run, and the collectives from and to O; returns whether there are any.

    Args:
        module: graph of one rank, changed in place, whose collectives name mesh axes.
        world: mesh, rank and process groups.
        compiles: whether the executor compiles the graph, which is refused for such graphs with a PlanError.
    """
    left = [(node, found) for node in module.graph.nodes if (found := alone(node))]
    if left and compiles:
        raise PlanError(
            f"The plan runs {len(left)} calls on one rank of an axis, but a compiling executor was chosen; such a plan "
            'can only run op by op so far. Leave executor out, or write executor="eager".'
        )
    for number, (node, found) in enumerate(left):
        call = Collective.of(node)
        if not found.runs_on(world.rank, world.mesh):
            _leave(node, found)
        elif call is not None and call.name in OWNER_COLLECTIVES:
            module.add_submodule(f"hop_{number}", _TravelAlong(_hop(call, found, world), world))
            with module.graph.inserting_before(node):
                _replace(node, module.graph.call_module(f"hop_{number}", (call.x,)))
    module.recompile()
    return bool(left)


def _leave(node: fx.Node, found: Alone) -> None:
    """f(x, y) -> absent((x, y), ...)."""
    operands, device = tuple(node.all_input_nodes), node.kwargs.get("device")
    arguments = (operands, found.shape, found.dtype, found.needs_grad, device)
    with node.graph.inserting_before(node):
        _replace(node, node.graph.call_function(absent, arguments))


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _hop(call: Collective, found: Alone, world: World) -> Hop:
    assert found.taken is not None, call
    return Hop.of(call.call(world.mesh), found.taken, world.mesh)
