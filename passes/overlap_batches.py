"""The graph of a micro-batch -> one graph of several, whose ops take turns while each other's collectives travel.

    a = f(x); b = all_reduce(a); y = g(b)    ->    a0 = f(x0); b0 = all_reduce(a0); a1 = f(x1); b1 = all_reduce(a1)
                                                   y0 = g(b0); y1 = g(b1)

Inside one micro-batch every op reads what the op before it made, so that its collectives have nothing beside them. Two
micro-batches do not depend on each other: the collectives of each travel while the other computes, once `start_early`
has split them (Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and
Overlapping", section 3.2; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.4). Autograd runs the backward of
a later call first, so that backward takes turns in the mirrored order.

The order is found by a simulation of one processor and one link. The link sends one message after another. A
micro-batch whose next op reads a result that has not arrived does not run; of those that can run, the one goes on that
has the least to compute until its next collective, because this keeps the link busy. What depends on parameters
alone, such as a gather of parameters, is computed once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from autopar.ops.collectives import Collective
from autopar.ops.nodes import draws
from autopar.passes.start_early import can_start

Seconds = Callable[[fx.Node], float]


def overlap_batches(module: fx.GraphModule, *, copies: int, inputs: int, seconds: Seconds) -> None:
    """Changes the graph of one micro-batch into that of several.

    Args:
        module: graph of one rank, changed in place. Its last `inputs` placeholders, and its results, become those of
            the first micro-batch, followed by those of the second, and so on.
        copies: number of micro-batches.
        inputs: number of placeholders that differ between micro-batches.
        seconds: duration of a call, or of the message of a collective. Only ratios matter.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    shared = placeholders[: len(placeholders) - inputs]
    own = _own(graph, placeholders[len(shared) :])
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    written = fx.Graph()
    common = {node: written.node_copy(node) for node in shared}
    batches = [_Batch(dict(common)) for _ in range(copies)]
    for batch in batches:
        for node in placeholders[len(shared) :]:
            copied = batch.copies[node] = written.node_copy(node)
            copied.target = copied.name  # a name of the function's arguments, each of which differs
    for node, number in taking_turns(calls, own, copies, seconds):
        copied = written.node_copy(node, batches[number].copies.__getitem__)
        for batch in [batches[number]] if node in own else batches:
            batch.copies[node] = copied
    (result,) = graph.output_node().args
    assert isinstance(result, Sequence), "a program returns several results"
    written.output(tuple(batch.copies[x] for batch in batches for x in result))  # type: ignore[index]
    module.graph = written
    module.recompile()


@dataclass
class _Batch:
    """One of the micro-batches.

    Attributes:
        copies: node of the given graph -> its node in the graph that is written.
        calls: its calls that have not run yet, in order.
        arrival_seconds: collective -> the time at which its result is there.
    """

    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    calls: list[fx.Node] = field(default_factory=list)
    arrival_seconds: dict[fx.Node, float] = field(default_factory=dict)

    def ready_seconds(self) -> float:
        """The time at which the operands of the next call are there."""
        found = (self.arrival_seconds.get(x, 0.0) for x in self.calls[0].all_input_nodes)
        return max(found, default=0.0)


def taking_turns(
    calls: Sequence[fx.Node], own: Set[fx.Node], copies: int, seconds: Seconds
) -> list[tuple[fx.Node, int]]:
    """Calls in the order in which they are to run, each with the number of its micro-batch.

    Args:
        calls: calls of one micro-batch, in order.
        own: those that every micro-batch makes for itself; the others run once, for the first that gets there.
        copies: number of micro-batches.
        seconds: duration of a call, or of the message of a collective.
    """
    left = _left(calls, own, seconds)
    batches = [_Batch(calls=list(calls)) for _ in range(copies)]
    order, done = list[tuple[fx.Node, int]](), set[fx.Node]()
    now = link_free = 0.0
    while any(batch.calls for batch in batches):
        waiting = [(b.ready_seconds(), left[b.calls[0]], i) for i, b in enumerate(batches) if b.calls]
        now = max(now, min(ready for ready, _, _ in waiting))
        _, _, number = min((work, i, i) for ready, work, i in waiting if ready <= now)
        batch = batches[number]
        node = batch.calls.pop(0)
        if node in done:
            continue
        order.append((node, number))
        if node not in own:
            done.add(node)
        if node in own and _travels(node):
            link_free = max(link_free, now) + seconds(node)
            batch.arrival_seconds[node] = link_free
        else:
            now += seconds(node)
    return order


def _left(calls: Sequence[fx.Node], own: Set[fx.Node], seconds: Seconds) -> dict[fx.Node, float]:
    """Call -> what is to be computed from it on until the next collective."""
    found, left = dict[fx.Node, float](), 0.0
    for node in reversed(calls):
        left = 0.0 if node in own and _travels(node) else left + seconds(node)
        found[node] = left
    return found


def _own(graph: fx.Graph, inputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on inputs or draw random numbers."""
    found = set(inputs)
    for node in graph.nodes:
        if draws(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _travels(node: fx.Node) -> bool:
    """Whether a node is a collective that `start_early` splits."""
    call = Collective.of(node)
    return call is not None and can_start(call)
