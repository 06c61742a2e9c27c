"""Moves all-reduces so that ranks do not wait for each other in the middle of a step.

    return all_reduce(x)                  -> return x        its backward is nothing, so it can wait
    f(p); all_reduce(g(i))       -> start(g(i)); f(p); finish()

At a collective in the middle of a step every rank waits for the slowest one. The all-reduce that computes the loss is
therefore moved to the end of the step. All-reduces of inputs alone (such as the number of valid targets) start at the
beginning of the step, and finish where the result is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.ops.collectives import Collective


def defer_loss_sum(module: fx.GraphModule) -> tuple[str, ...]:
    """Takes the sums off the last output, and returns the axes they ran over, in order."""
    output = next(iter(module.graph.find_nodes(op="output")))
    axes: list[str] = []
    while (call := _final_sum(loss := output.args[0][-1])) and output.args[0].count(loss) == 1:
        axes.insert(0, call.group)
        output.args = ((*output.args[0][:-1], call.x),)
        module.graph.erase_node(loss)
    module.recompile()
    return tuple(axes)


def _final_sum(node: fx.Node) -> Collective | None:
    call = Collective.of(node)
    sums = call is not None and (call.name, call.backward) == ("all_reduce", "vary")
    return call if sums and len(node.users) == 1 else None


def hoist_input_sums(
    module: fx.GraphModule,
    start: Callable[..., object],
    finish: Callable[..., object],
    *,
    parameters: int,
    received: int = 0,
) -> None:
    """Starts all_reduces that depend on no parameter at the front, and finishes them where they stood.

    The first placeholders are parameters, and the last are what an earlier stage has made of some.

    `start(x, dims, size, axis, backward)` and `finish(started)` are functions of a module's top level.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    depends = {*placeholders[:parameters], *placeholders[len(placeholders) - received :]}
    for node in graph.nodes:
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    sums = [n for n in graph.nodes if n not in depends and (call := Collective.of(n)) and call.name == "all_reduce"]
    for node in sums:
        with graph.inserting_before(node):
            started = graph.call_function(start, node.args)
            node.replace_all_uses_with(graph.call_function(finish, (started,)))
        graph.erase_node(node)
        _move_to_front(graph, started, placeholders[-1])
    module.recompile()


def _move_to_front(graph: fx.Graph, node: fx.Node, anchor: fx.Node) -> None:
    """Moves a node and what it needs to right after the anchor and what was moved before."""
    needed = {node}
    for each in reversed(list(graph.nodes)):
        if each in needed:
            needed.update(each.all_input_nodes)
    for each in list(graph.nodes):
        if each in needed and each.op != "placeholder":
            anchor.append(each)
            anchor = each
