"""Folding: the repeated layers of a model share one set of decisions, so that the search stays small.

`fold` finds repeated blocks in the sequence of ops, by comparing kinds, shapes and choices of ops, not names. The k-th
ops of all repetitions of a block form one *class*, and all ops of a class get the same choice.

Tensors that the same class computes and the same classes use form one *entry*, which counts them. The tensor
between two blocks and the tensor after the last block are two entries, because other ops use them. The price of a
plan is therefore exact. If a class joined ops that had better differ, the plan would be slower, but still correct.
A simple algorithm is good enough:

1. Number every op by its signature, so that the model becomes a sequence of integers.
2. For every likely period p (a frequent distance between equal numbers), compare the sequence with itself
   shifted by p. A run of equal numbers is a repeated block. Take the block that saves the most ops, keep its first
   instance, and repeat with the shorter sequence until nothing repeats.

This finds several runs (encoder, decoder), runs between unequal first and last blocks, and blocks inside blocks. Each
round is linear in the number of ops. A block has at least `MIN_BLOCK` ops (a shorter period is multiplied), so that
neighbouring ops, such as the two linears of Megatron's column and row split, can still choose differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model import SavedTensors, keeps
from autopar.ir import Choice, Graph, Op, OwnCollective, Tensor

MIN_BLOCK = 8  # ops; below it a "block" would be one linear and its activation
_CANDIDATE_PERIODS = 64


@dataclass(frozen=True)
class OpClass:
    """Ops that share one choice per axis.

    Attributes:
        op: the first of these ops, which represents the others.
        members: names of all of them.
        count: number of such ops in the whole model, where a captured layer may stand for many layers.
    """

    op: Op
    members: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Entry:
    """Tensors that the same class computes and the same classes use, so that they share their conversions.

    Attributes:
        tensor: the first of these tensors.
        names: names of all of them.
        leaf: "parameter", "buffer" or "input" for a tensor that no op computes, else "".
        producer: class that computes the tensors, and position among its results; None for a leaf.
        consumers: pairs of a class that uses the tensors and the position of the operand, in order.
        is_output: whether the model returns the tensors.
        is_saved: whether autograd saves the tensors, or views of them.
        count: number of such tensors in the whole model.
    """

    tensor: Tensor
    names: tuple[str, ...]
    leaf: str
    producer: tuple[int, int] | None
    consumers: tuple[tuple[int, int], ...]
    is_output: bool
    is_saved: bool
    count: int = 1


@dataclass(frozen=True)
class SavedEntry:
    """Tensors of equal shape and dtype that autograd keeps for the same positions of the same op classes.

    Attributes:
        tensor: the first of these tensors, which owns the memory (its views count as it).
        count: number of such tensors in the whole model.
        savers: for every op class that keeps one: index of the class, position among its operands and then
            results, and name of the tensor kept there (`tensor` itself or a view of it).
    """

    tensor: Tensor
    count: int
    savers: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Fold:
    """A graph in which repeated layers occur once.

    Attributes:
        classes: the classes, in order of their first ops.
        entries: the entries, in order of their first tensors.
        saved: the tensors that autograd saves.
        class_of: op name -> index of its class.
    """

    classes: tuple[OpClass, ...]
    entries: tuple[Entry, ...]
    saved: tuple[SavedEntry, ...]
    class_of: Mapping[str, int]


def fold(graph: Graph, *, mark: Callable[[str], Hashable] = lambda name: None, repeats: bool = True) -> Fold:
    """Folds a graph.

    Args:
        graph: the captured model.
        mark: function from the name of an op or parameter to a value, such as its pin; only ops and parameters with
            equal values share decisions.
        repeats: whether repeated blocks are sought; with False every op is a class by itself.
    """
    groups = _groups(graph, mark) if repeats else [[index] for index in range(len(graph.ops))]
    classes = tuple(_class([graph.ops[i] for i in group], graph) for group in groups)
    class_of = {name: index for index, each in enumerate(classes) for name in each.members}
    saved = SavedTensors(graph)
    return Fold(
        classes=classes,
        entries=_entries(graph, class_of, saved, mark),
        saved=_saved_entries(graph, class_of, saved),
        class_of=class_of,
    )


def _class(ops: Sequence[Op], graph: Graph) -> OpClass:
    names = tuple(op.name for op in ops)
    return OpClass(ops[0], names, count_of(names, graph))


def count_of(names: Iterable[str], graph: Graph) -> int:
    """Number of ops or tensors of the whole model for which the ones with these names stand."""
    return sum(graph.layer_count.get(name, 1) for name in names)


def _groups(graph: Graph, mark: Callable[[str], Hashable]) -> list[list[int]]:
    """For every class the positions of its ops in the graph; classes are in the order of their first ops."""
    sequence = _number([(_signature(op, graph), mark(op.name)) for op in graph.ops])
    groups = [[index] for index in range(len(graph.ops))]
    while repeat := _best_repeat(sequence):
        start, period, count = repeat
        stop = start + period * count
        block = [[i for at in range(start + offset, stop, period) for i in groups[at]] for offset in range(period)]
        groups = groups[:start] + block + groups[stop:]
        sequence = np.concatenate([sequence[: start + period], sequence[stop:]])
    return groups


def _number(keys: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _signature(op: Op, graph: Graph) -> Hashable:
    """Everything on which the price and the choices of an op depend, without names."""
    tensors = [graph.tensors[name] for name in (*op.operands, *op.results)]
    leaves = tuple(name not in graph.producer for name in op.operands)
    return (
        op.kind,
        tuple((t.dims, t.formats, t.needs_grad) for t in tensors),
        tuple(_nameless_choice(c, graph) for c in op.choices),
        tuple(t.name in op.saved for t in tensors),
        leaves,
        op.flops,
        op.is_view,
        tuple(_nameless(each) for each in op.collectives),
    )


def _nameless_choice(choice: Choice, graph: Graph) -> Hashable:
    states = choice.label, choice.operands, choice.results
    return (*states, choice.size, choice.stretch, choice.needs_equal, _roles(choice.factor, graph))


def _nameless(collective: OwnCollective) -> Hashable:
    leaves = tuple(leaf._replace(factor="") for leaf in collective.leaves)
    return replace(collective, leaves=leaves)


def _roles(factor: str, graph: Graph) -> frozenset[str]:
    found = graph.factors.get(factor)
    return found.roles if found else frozenset()


def _best_repeat(sequence: np.ndarray) -> tuple[int, int, int] | None:
    """Start, period and count of the repetition that saves most ops, or None."""
    best: tuple[int, int, int] | None = None
    saves = 0
    for period in _periods(sequence):
        equal = np.concatenate([[False], sequence[:-period] == sequence[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(lengths):
            continue
        longest = int(np.argmax(lengths))
        count = int(lengths[longest]) // period + 1
        if (count - 1) * period > saves:
            saves = (count - 1) * period
            best = (int(starts[longest]), period, count)
    return best


def _periods(sequence: np.ndarray) -> list[int]:
    """The most frequent distances between equal numbers, multiplied to at least `MIN_BLOCK`, smallest first."""
    order = np.argsort(sequence, kind="stable")
    same = sequence[order][:-1] == sequence[order][1:]
    gaps = Counter((order[1:] - order[:-1])[same].tolist())
    frequent = sorted(gaps, key=lambda gap: (-gaps[gap], gap))[:_CANDIDATE_PERIODS]
    return sorted({gap * -(-MIN_BLOCK // gap) for gap in frequent if gap < len(sequence)})


def _entries(
    graph: Graph, class_of: Mapping[str, int], saved: SavedTensors, mark: Callable[[str], Hashable]
) -> tuple[Entry, ...]:
    consumers, producers = _uses(graph, class_of)
    kept = {saved.root(name) for op in graph.ops if keeps(op, graph.tensors) for name in op.saved}
    leaves = _leaves(graph)
    outputs = set(graph.outputs)
    groups: dict[Hashable, Entry] = {}
    names: dict[Hashable, list[str]] = {}
    for name, tensor in graph.tensors.items():
        leaf, public_name = leaves.get(name, ("", name))
        entry = Entry(
            tensor, (), leaf, producers.get(name), tuple(sorted(consumers.get(name, ()))), name in outputs, name in kept
        )
        key = (
            tensor.dims,
            tensor.formats,
            tensor.needs_grad,
            leaf,
            entry.producer,
            entry.consumers,
            entry.is_output,
            entry.is_saved,
            mark(public_name) if leaf else None,
        )
        groups.setdefault(key, entry)
        names.setdefault(key, []).append(name)
    return tuple(
        replace(entry, names=tuple(names[key]), count=count_of(names[key], graph)) for key, entry in groups.items()
    )


def _uses(
    graph: Graph, class_of: Mapping[str, int]
) -> tuple[dict[str, set[tuple[int, int]]], dict[str, tuple[int, int]]]:
    consumers: dict[str, set[tuple[int, int]]] = {}
    producers: dict[str, tuple[int, int]] = {}
    for op in graph.ops:
        index = class_of[op.name]
        for position, name in enumerate(op.operands):
            consumers.setdefault(name, set()).add((index, position))
        for position, name in enumerate(op.results):
            producers[name] = (index, position)
    return consumers, producers


def _leaves(graph: Graph) -> dict[str, tuple[str, str]]:
    """Name of a tensor that no op computes -> "buffer", "input" or "parameter", and its name in the model."""
    kinds = (("buffer", graph.buffers), ("input", graph.inputs), ("parameter", graph.parameters))
    return {name: (kind, public) for kind, leaves in kinds for public, name in leaves.items()}


def _saved_entries(graph: Graph, class_of: Mapping[str, int], saved: SavedTensors) -> tuple[SavedEntry, ...]:
    """Groups the tensors that autograd saves by the classes that save them, and by the views through which they do."""
    stored = {*graph.parameters.values(), *graph.buffers.values()}
    savers: dict[str, dict[Hashable, tuple[int, int, str]]] = {}
    for op in graph.ops:
        if not keeps(op, graph.tensors):
            continue
        for position, name in enumerate((*op.operands, *op.results)):
            root = saved.root(name)
            if name in op.saved and root not in stored:
                index = class_of[op.name]
                key = (index, position, _path(name, graph, class_of, saved))
                savers.setdefault(root, {})[key] = (index, position, name)
    groups: dict[Hashable, tuple[Tensor, list[str], tuple[tuple[int, int, str], ...]]] = {}
    for root, found in savers.items():
        tensor = graph.tensors[root]
        alike = (tensor.dims, tensor.formats, frozenset(found))
        groups.setdefault(alike, (tensor, [], tuple(found.values())))[1].append(root)
    return tuple(SavedEntry(t, count_of(roots, graph), found) for t, roots, found in groups.values())


def _path(name: str, graph: Graph, class_of: Mapping[str, int], saved: SavedTensors) -> tuple[int, ...]:
    """Classes of the views between a saved tensor and the tensor whose memory it shares."""
    path = []
    while view := saved.view(name):
        path.append(class_of[graph.producer[name].name])
        name = view.operand
    return tuple(path)
