"""Who waits for whom in a run, and for how long.

[Note: streams] A communicator is one queue on each rank: its operations run in the order in which the host asked for
them. One begins when the operation before it has ended, and with it all that the rank's computation had waited for. A
collective ends when all members have begun theirs, and a send when its receive has begun: nothing is buffered. A batch
is one operation. A host that syncs waits for all that its computation waits for.

Whether a run ends does not depend on how fast the ranks are. So all that waits is one graph (`waits`), and a run hangs
where the graph has a cycle. With durations, the longest path through it is the time of the run (`seconds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

from tests.support.nccl.launches import Communicator, Launches, Mode
from tests.support.nccl.traces import Call, Compute, Sync, Traces, Wait

Node = tuple[str, int, int]  # "comes", "host", "stream", "begin" or "end", the rank, the number of the event


def waits(traces: Traces, launches: Launches, mode: Mode) -> dict[Node, set[Node]]:
    """What each moment of a run waits for, see [Note: streams].

    At every event the host comes and passes; an operation begins and ends; the stream of the computation passes.
    """
    first = _first_uses(launches) if mode == "lazy" else {}
    graph: dict[Node, set[Node]] = {}
    for rank, trace in traces.items():
        host, stream = ("host", rank, -1), ("stream", rank, -1)
        graph[host] = graph[stream] = set()
        queues: dict[Communicator, Node] = {}
        for i, event in enumerate(trace):
            comes = ("comes", rank, i)
            graph[comes], host = {host}, ("host", rank, i)
            graph[host] = {comes}
            if isinstance(event, (Wait, Compute)):
                graph["stream", rank, i] = {stream, host}
                stream = ("stream", rank, i)
            if isinstance(event, Wait):
                graph[stream].add(("end", rank, event.event))
            elif isinstance(event, Sync):
                graph[host].add(stream)
            elif (launch := launches[rank].get(i)) is not None:
                communicator = launch.communicator
                if first.get((communicator, rank)) == i:
                    others = (first.get((communicator, other)) for other in communicator.members)
                    graph[host] |= {
                        ("comes", other, n)
                        for other, n in zip(communicator.members, others, strict=True)
                        if n is not None
                    }
                graph["begin", rank, i] = {host, stream, queues.get(communicator, host)}
                graph["end", rank, i] = {("begin", each.rank, each.event) for each in (launch, *launch.mates)}
                queues[communicator] = ("end", rank, i)
    return graph


def _first_uses(launches: Launches) -> dict[tuple[Communicator, int], int]:
    """The event at which a rank first uses a communicator."""
    found: dict[tuple[Communicator, int], int] = {}
    for rank, own in launches.items():
        for i, launch in own.items():
            found.setdefault((launch.communicator, rank), i)
    return found


def endless(traces: Traces, launches: Launches, mode: Mode) -> list[str]:
    """What waits without end: a communicator that a member never uses, or ranks that wait for each other."""
    if mode == "lazy":
        used = defaultdict(set)
        for communicator, rank in _first_uses(launches):
            used[communicator].add(rank)
        for communicator, ranks in used.items():
            absent = {*communicator.members} & {*traces} - ranks
            if absent:
                return [f"ranks {sorted(absent)} never come to make the communicator of {communicator.group}"]
    try:
        tuple(TopologicalSorter(waits(traces, launches, mode)).static_order())
    except CycleError as error:
        said = (_moment(node, traces, launches) for node in reversed(error.args[1][1:]))
        return [f"deadlock ({mode}), each waits for the next: " + "; ".join(filter(None, said))]
    return []


def _moment(node: Node, traces: Traces, launches: Launches) -> str:
    what, rank, i = node
    if what == "begin":
        return str(launches[rank][i])
    if what == "host" and isinstance(traces[rank][i], Sync):
        return f"rank {rank}: host in {traces[rank][i]}"
    return f"rank {rank}: host at {launches[rank][i]}" if what == "host" and i in launches[rank] else ""


def longest_seconds(traces: Traces, launches: Launches, mode: Mode, message_seconds: Callable[[Call], float]) -> float:
    """The time of a run whose hosts are ahead of their devices; collectives take none."""
    graph = waits(traces, launches, mode)
    ends: dict[Node, float] = {}
    for node in TopologicalSorter(graph).static_order():
        what, rank, i = node
        took = 0.0
        if what == "stream" and i >= 0 and isinstance(event := traces[rank][i], Compute):
            took = event.seconds
        elif what == "end":
            messages = [each for each in launches[rank][i].calls if each.is_message]
            took = max(map(message_seconds, messages), default=0.0)
        ends[node] = took + max((ends[each] for each in graph[node]), default=0.0)
    return max(ends.values())
