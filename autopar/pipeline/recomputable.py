"""Which ops of a block can be recomputed in backward, and what is then kept for backward.

[Note: recomputing ops] Every op of a block either runs once, in forward, or is *recomputed*: backward runs it
a second time. The set of recomputed ops decides which tensors are kept. A tensor that a recomputed op computes is never
kept. Any other tensor is kept if an op of the block saves it for its own backward, or if a recomputed op reads it.
Parameters and buffers exist anyway. Every set of ops is therefore possible: the empty set keeps what autograd keeps,
and the set of all ops keeps only the tensors that enter the block.

    x -> norm -> n -> up -> h -> gelu -> g -> down -> y        saved: x and statistics, n, h, g

    recomputed      kept
    {}              x, statistics, n, h, g
    {gelu}          x, statistics, n, h         g is recomputed from h
    {norm, gelu}    x, h                        n is recomputed from x
    all             x                           `down` does not run: nobody needs y

Views share the memory of their operand, so that recomputing them frees nothing, and they are not in the set. A
conversion of a tensor to another layout can be: the all-gather of an activation is repeated instead of keeping the
gathered tensor (Korthikanti et al. 2022, section 4.2.2). Names of ops are relative to the block, so that equal blocks
have equal names:

    mlp.act/gelu        the op `aten.gelu` of the module `mlp.act` of the block
    attn/matmul#2       the second `aten.matmul` of `attn`
    mlp.up/linear<0  the conversion of operand 0 for the op `mlp.up/linear`, the first one that needs it

Sources: Chen et al. 2016 (whole blocks), Korthikanti et al. 2022 (ops), Jain et al. 2020 (Checkmate, a program
over single tensors). torch._functorch.partitioners asks the same question of a graph of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from autopar.cost_model import keeps
from autopar.cost_model.flow import Flow
from autopar.cost_model.memory import Selected
from autopar.ir import Graph, Op, Plan
from autopar.ir.recompute import Selection
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.parts import parts_of_ops, repeating_parts
from autopar.pipeline.producers import Memory, Producer, Producers, op_names, producer_name

T = TypeVar("T")


class RecomputableOp(NamedTuple, Generic[T]):
    """An op of a block, or a conversion, that backward can run a second time.

    Attributes:
        seconds: duration of one forward run.
        reads: the tensors that it needs, without parameters and buffers.
    """

    seconds: float
    reads: tuple[T, ...]


class BlockTensor(NamedTuple):
    """Memory that a block may keep for backward.

    Attributes:
        bytes: its size.
        producer: name of the op of the block that computes it; None if it enters the block.
        is_saved: whether an op of the block saves it for its own backward.
    """

    bytes: float
    producer: str | None
    is_saved: bool


@dataclass(frozen=True)
class BlockChoices(Generic[T]):
    """The ops of one block that can be recomputed, and the tensors that it may keep.

    Attributes:
        ops: name -> op, in the order of the forward.
        tensors: key -> memory.
        name_of: op of the graph, or conversion for it -> its name in the block.
        first_user: key of a tensor -> the first op of the graph that saves or reads it.

    >>> block = BlockChoices(
    ...     {"gelu": RecomputableOp(1e-3, ("h",))},
    ...     {"h": BlockTensor(8, None, True), "g": BlockTensor(8, "gelu", True)},
    ... )
    >>> block.kept_bytes([]), block.kept_bytes(["gelu"]), block.seconds(["gelu"])
    (16, 8, 0.001)
    """

    ops: Mapping[str, RecomputableOp[T]]
    tensors: Mapping[T, BlockTensor]
    name_of: Mapping[Producer, str] = field(default_factory=dict)
    first_user: Mapping[T, str] = field(default_factory=dict)

    def running(self, recomputed: Iterable[str]) -> tuple[str, ...]:
        """The recomputed ops whose results backward needs, in order."""
        chosen = frozenset(recomputed)
        needed = {t.producer for t in self.tensors.values() if t.is_saved} & chosen
        for name in reversed(list(self.ops)):
            if name in needed:
                producers = (self.tensors[x].producer for x in self.ops[name].reads)
                needed.update(producer for producer in producers if producer in chosen)
        return tuple(name for name in self.ops if name in needed)

    def running_producers(self, recomputed: Iterable[str]) -> Iterator[Producer]:
        """The recomputed ops whose results backward needs, by their names in the graph."""
        running = frozenset(self.running(recomputed))
        return (producer for producer, name in self.name_of.items() if name in running)

    def kept(self, recomputed: Iterable[str]) -> tuple[T, ...]:
        """The tensors that stay from forward to backward."""
        chosen = frozenset(recomputed)
        read = {x for name in self.running(chosen) for x in self.ops[name].reads}
        return tuple(
            key
            for key, tensor in self.tensors.items()
            if tensor.producer not in chosen and (tensor.is_saved or key in read)
        )

    def kept_bytes(self, recomputed: Iterable[str]) -> float:
        """Bytes of the tensors that stay from forward to backward."""
        return sum(self.tensors[key].bytes for key in self.kept(recomputed))

    def seconds(self, recomputed: Iterable[str]) -> float:
        """Duration of the second run of the recomputed ops."""
        return sum(self.ops[name].seconds for name in self.running(recomputed))

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is equal for blocks with equal ops, sizes and durations."""
        numbers = {key: i for i, key in enumerate(self.tensors)}
        ops = ((name, op.seconds, tuple(numbers[x] for x in op.reads)) for name, op in self.ops.items())
        return (*ops, *self.tensors.values())


# --- the choices of a plan's blocks


def block_choices(
    graph: Graph,
    plan: Plan,
    flow: Flow,
    *,
    unit: Mapping[str, int],
    seconds: Mapping[Producer, float],
    size: Callable[[Memory], float],
) -> list[BlockChoices[Memory]]:
    """The choices of every block, in order.

    Args:
        graph: the captured model.
        plan: its choices of layouts.
        flow: the layouts of its tensors.
        unit: op -> index of its block.
        seconds: op, or conversion, -> duration of its forward.
        size: bytes of a memory.
    """
    builder = _Builder(graph, plan, flow, unit, seconds, size)
    return [builder.block(ops) for ops in builder.blocks()]


def selected_in(
    choices: Sequence[BlockChoices[Memory]], paths: Sequence[str], may_repeat: Sequence[bool], selection: Selection
) -> Selected:
    """The ops that a selection recomputes, and the tensors that blocks then keep.

    For every block the arguments have its recomputable ops, its path, and whether it may be recomputed.
    """
    producers: set[Producer] = set()
    kept: dict[Memory, tuple[str, ...]] = {}
    for block, path, may in zip(choices, paths, may_repeat, strict=True):
        names = selection.names(path) if may else frozenset()
        producers.update(block.running_producers(names))
        for memory in block.kept(names):
            kept[memory] = (*kept.get(memory, ()), block.first_user[memory])
    return Selected(frozenset(producers), kept)


def selected(graph: Graph, plan: Plan, selection: Selection) -> Selected:
    """The ops that a selection recomputes under a plan, and the tensors that blocks then keep."""
    parts, _ = repeating_parts(graph, plan)
    paths = [block.module for block in find_blocks(graph)]
    choices = block_choices(
        graph, plan, Flow(graph, plan), unit=parts_of_ops(graph, plan), seconds={}, size=lambda _: 0.0
    )
    own = [paths[part.block] for part in parts]
    return selected_in(choices, own, [part.may_repeat for part in parts], selection)


class _Builder:
    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        flow: Flow,
        unit: Mapping[str, int],
        seconds: Mapping[Producer, float],
        size: Callable[[Memory], float],
    ) -> None:
        self.graph, self.flow, self.unit = graph, flow, unit
        self.seconds, self.size = seconds, size
        self.names = op_names(graph, plan)
        self.producers = Producers.find(graph, flow)
        self.parameters = frozenset(graph.parameters.values())
        self.stored = self.parameters.union(graph.buffers.values())
        self.made: dict[Producer, list[Memory]] = {}
        for memory, producer in self.producers.of.items():
            self.made.setdefault(producer, []).append(memory)
        self.shared = self._shared()

    def blocks(self) -> list[list[Op]]:
        found: list[list[Op]] = [[] for _ in range(max(self.unit.values()) + 1)]
        for op in self.graph.ops:
            found[self.unit[op.name]].append(op)
        return found

    def _shared(self) -> frozenset[str]:
        """Ops that depend on no parameter and serve several blocks: `fold_blocks` leaves them outside."""
        dependent, users = set(self.parameters), dict[str, list[str]]()
        for op in self.graph.ops:
            for name in op.operands:
                users.setdefault(name, []).append(op.name)
            dependent.update(op.results if dependent.intersection(op.operands) else ())
        homes: dict[str, int | None] = {}  # the only block that an op serves
        for op in reversed(self.graph.ops):
            served = {homes[user] for name in op.results for user in users.get(name, ())}
            free = dependent.isdisjoint(op.results)
            is_one = len(served) == 1
            homes[op.name] = self.unit[op.name] if not free else served.pop() if is_one else None
        return frozenset(name for name, home in homes.items() if home is None)

    def block(self, ops: Sequence[Op]) -> BlockChoices[Memory]:
        reads = {producer: reads for op in ops for producer, reads in self._steps(op) if self._is_choice(producer)}
        name_of = {producer: self._name(producer) for producer in reads}
        found = {
            name: RecomputableOp(self.seconds.get(producer, 0.0), reads[producer]) for producer, name in name_of.items()
        }
        users: dict[Memory, str] = {}
        for op in ops:
            for memory in self._saved(op):
                users.setdefault(memory, op.name)
        saved = frozenset(users)
        for (name, _), memories in reads.items():
            for memory in memories:
                users.setdefault(memory, name)
        tensors = {
            memory: BlockTensor(self.size(memory), self._maker(memory, ops), memory in saved) for memory in users
        }
        return BlockChoices(found, tensors, name_of, users)

    def _is_choice(self, producer: Producer) -> bool:
        op, converted = producer
        is_parameter = self.flow.saved.root(converted) in self.stored if converted else False
        return op in self.names and producer in self.made and op not in self.shared and not is_parameter

    def _name(self, producer: Producer) -> str:
        return producer_name(self.graph, self.names[producer[0]][1], producer)

    def _maker(self, memory: Memory, ops: Sequence[Op]) -> str | None:
        producer = self.producers.of.get(memory)
        inside = producer is not None and self.unit[producer[0]] == self.unit[ops[0].name]
        return self._name(producer) if inside and producer and self._is_choice(producer) else None

    def _steps(self, op: Op) -> Iterator[tuple[Producer, tuple[Memory, ...]]]:
        """The conversions for an op, and the op itself, each with the tensors that it reads."""
        reads = dict.fromkeys(
            self.flow.saved.memory(name, layout)
            for name, layout in zip(op.operands, self.flow.operands[op.name], strict=True)
            if self.flow.saved.root(name) not in self.stored
        )
        for name in dict.fromkeys(op.operands):
            if (op.name, name) in self.producers.source:
                yield (op.name, name), (self.producers.source[op.name, name],)
        yield (op.name, ""), tuple(reads)

    def _saved(self, op: Op) -> Iterator[Memory]:
        if not keeps(op, self.graph.tensors):
            return
        layouts = (*self.flow.operands[op.name], *self.flow.results[op.name])
        for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
            if name in op.saved and self.flow.saved.root(name) not in self.stored:
                yield self.flow.saved.memory(name, layout)
