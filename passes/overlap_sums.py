"""Sums that ranks need not wait for in the middle of a step.

    return all_reduce(x)                  -> return x        its backward is nothing, so it can wait
    placeholders; f(p); all_reduce(g(i))  -> placeholders; all_reduce(g(i)); f(p)

A collective in mid-step makes every rank wait for the slowest one there. The sum that makes the loss is
left to the end of the step, and sums of inputs alone (such as how many targets count) come first, where
the ranks have just met.
"""

from __future__ import annotations

from torch import fx

from autopar.passes.retarget import is_collective


def defer_loss_sum(module: fx.GraphModule) -> tuple[str, ...]:
    """Takes the sums off the last output, and returns the axes they ran over, in order."""
    output = next(iter(module.graph.find_nodes(op="output")))
    axes: list[str] = []
    while _is_final_sum(loss := output.args[0][-1]):  # type: ignore[index]
        axes.insert(0, str(loss.args[3]))
        output.args = ((*output.args[0][:-1], loss.args[0]),)  # type: ignore[index, union-attr]
        module.graph.erase_node(loss)
    module.recompile()
    return tuple(axes)


def _is_final_sum(node: fx.Node) -> bool:
    sums = is_collective(node) and "all_reduce" in str(node.target) and node.args[4] == "vary"
    return sums and len(node.users) == 1


def hoist_input_sums(module: fx.GraphModule, parameters: int) -> None:
    """Moves all_reduces that depend on no parameter, with what they need, to the front."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    depends = set(placeholders[:parameters])
    for node in graph.nodes:
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        wanted = node in needed or (is_collective(node) and "all_reduce" in str(node.target))
        if wanted and node not in depends and node.op != "placeholder":
            needed.update([node, *node.all_input_nodes])
    anchor = placeholders[-1]
    for node in list(graph.nodes):
        if node in needed and node.op != "placeholder":
            anchor.append(node)
            anchor = node
    module.recompile()
