"""The items (work) and holdings (memory) of one plan, made node by node; see `autopar.cost_model.items`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.decomposed import Decomposed
from autopar.cost_model.flow import Flow
from autopar.cost_model.items import COMPUTE, FULL, MemoryItem, Phase, TrainingState, WorkItem, runs_every_time
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.memory import KeptSlice, Selected, keeps, layers_of_ops, recomputed_ops
from autopar.cost_model.node_items import numbers_out, regions_of, words_of
from autopar.cost_model.nodes import NodePricer
from autopar.cost_model.owners import Position, busiest_owner, owned_share
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Layout, Op, Plan, Tier, has_owner

_Memory = tuple[str, Layout]
_Kept = tuple[str, Layout, Tier]  # tensor, layout and tier of what is saved


class Pricer:
    """Prices a plan.

    Args:
        graph: the captured model.
        plan: the plan for this graph.
        sizes, hardware, links, layers, training_state, fused, bucket_bytes: see `NodePricer`.
        chosen_bucket_bytes: bytes of a bucket as a formula; by default those that the plan names, if any.
        regathers: whether an activation that is gathered for an op is saved in shards, and gathered
            again in backward (Korthikanti et al. 2022, section 4.2.2).
        blocks: op name -> the block with which the op is recomputed; by default its layer. Ops that are missing
            belong to no block and are never recomputed.
        again: names of the ops that are recomputed in backward; they make up whole blocks.
        selected: recomputation of single ops, in place of `again`.
        slices: tensors that blocks save in slices; their block numbers are those of `blocks`.
        meeting_link: link between replicas; None for a plan without replicas.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        sizes: Sizes,
        hardware: Hardware,
        links: Sequence[Link],
        layers: Mapping[str, Quantity] | None = None,
        training_state: TrainingState = FULL,
        fused: bool = False,
        regathers: bool = False,
        bucket_bytes: float | None = None,
        chosen_bucket_bytes: Quantity | None = None,
        blocks: Mapping[str, Hashable] | None = None,
        again: Collection[str] = (),
        selected: Selected | None = None,
        slices: Collection[KeptSlice] = (),
        meeting_link: Link | None = None,
    ) -> None:
        self.graph, self.plan, self.sizes, self.regathers = graph, plan, sizes, regathers
        self.flow, self.again, self.selected = Flow(graph, plan), frozenset(again), selected
        self.meeting_link = meeting_link
        self.slices = {(each.memory, each.block): each for each in slices}
        self.blocks = layers_of_ops(graph) if blocks is None else blocks
        self._labels = block_labels(graph, self.blocks)
        self.nodes = NodePricer(
            graph,
            sizes=sizes,
            hardware=hardware,
            links=links,
            layers=layers,
            training_state=training_state,
            fused=fused,
            bucket_bytes=bucket_bytes,
            chosen_bucket_bytes=plan.bucket_bytes if chosen_bucket_bytes is None else chosen_bucket_bytes,
            recomputed=recomputed_ops(graph, self.blocks),
            position=busiest_owner(graph, plan.parameters, plan.mesh),
            micro_batches=plan.micro_batches,
        )
        self.decomposed = Decomposed(
            graph,
            plan,
            self.flow,
            sizes=sizes,
            seconds=self._compute_seconds,
            hardware=hardware,
            block=self._block,
            slices=slices,
        )

    def _compute_seconds(self, op: Op, phase: Phase) -> Quantity:
        """Seconds in which an op computes in one phase; the backward of a product is two of its size."""
        _, count = self.nodes.place(op.name, op.module)
        items = self.nodes.op(op, self.plan.ops[op.name])
        own = (i for i in items if i.resource == COMPUTE and i.phase == phase)
        return sum((i.count / count * i.seconds for i in own), start=0)

    def _block(self, op: str) -> Hashable:
        return self._labels.get(op, "")

    # --- work

    def items(self) -> Iterator[WorkItem]:
        """The items of a step, with those that recomputation adds and without those that it makes unnecessary."""
        for item in self._once():
            change = self._change(item)
            if change >= 0:
                yield item
            if change > 0:
                yield replace(item, phase="backward")

    def _change(self, item: WorkItem) -> int:
        """Number of executions that recomputation adds to an item; -1 if it makes the item unnecessary."""
        if self.selected is not None:
            return int(self.selected.repeats(item.of, item.moves, item.phase, item.carries))
        return item.recomputed if item.of in self.again else 0

    def _once(self) -> Iterator[WorkItem]:
        for op in self.graph.ops:
            yield from self.nodes.op(op, self.plan.ops[op.name])
        for name, targets in self.flow.targets.items():
            for target, user in targets.items():
                yield from self._conversion(name, target, user)
        for each in self.slices.values():
            yield from self.decomposed.restored(each, list(self.nodes.restored(each)))
        for name in self.graph.parameters:
            yield from self.nodes.between_steps(name, self.plan.parameters[name])
        yield from self._meetings()

    def _meetings(self) -> Iterator[WorkItem]:
        """Items of the meetings of replicas, see `autopar.ir.meeting`."""
        meeting, link = self.plan.meeting, self.meeting_link
        if meeting is None:
            return
        assert link is not None, "the price of a meeting needs the link between replicas"
        for name in self.graph.parameters:
            yield from self.nodes.meeting(name, self.plan.parameters[name], meeting, link)

    def _conversion(self, name: str, target: Layout, user: str) -> Iterator[WorkItem]:
        stays_split = name in self._parameters or self.regathers
        again = stays_split and name in self.flow.saved_roots
        items = self.nodes.conversion(name, self.flow.place(name), target, user, again=again)
        return self.decomposed.items(name, target, list(items))

    def into(self, op: Op, position: int) -> Iterator[WorkItem]:
        """Forward items of the conversion of the operand of `op` at this position."""
        name, target = op.operands[position], self.flow.operands[op.name][position]
        for item in self._conversion(name, target, op.name):
            if item.phase == "forward":
                yield item

    def in_order(self) -> list[WorkItem]:
        """The items of a micro-batch in the order in which a rank runs them.

        Forward runs the ops in the order of the graph, each after the conversions of its operands. Backward runs them
        in reverse. What belongs to parameters comes last.
        """
        last = len(self.graph.ops)
        index = {op.name: i for i, op in enumerate(self.graph.ops)}

        def key(item: WorkItem) -> tuple[int, int, bool]:
            if item.phase == "forward":
                return 0, index.get(item.of, last), not item.moves
            is_of_parameter = item.phase == "reduce" or (item.of not in index and bool(item.of))
            return 1, last + 1 if is_of_parameter else -index.get(item.of, last), bool(item.moves)

        return sorted(filter(runs_every_time, self.items()), key=key)

    # --- memory

    def at(self, position: Position) -> Pricer:
        """This pricer with the memory of the rank at these mesh coordinates."""
        found = copy(self)
        found.nodes = copy(self.nodes)
        found.nodes.position = position
        return found

    def holdings(self) -> Iterator[MemoryItem]:
        """The memory of a rank: parameters, gradients, optimizer states, and saved activations of one micro-batch."""
        for name in self.graph.parameters:
            yield from self.nodes.parameter(name, self.plan.parameters[name])
        for public, name in self.graph.buffers.items():
            region, count = self.nodes.place(name, public)
            held = count * self.sizes.bytes(self.graph.tensors[name], self.flow.whole)
            yield MemoryItem(numbers_out(public), "buffers", region, held, name)
        yield from self.nodes.buckets()
        yield from self._gathered()
        for op in self.graph.ops:
            yield from self.nodes.working(op, self.plan.ops[op.name], self._block(op.name))
        kept = self._saved_memory()
        for (name, layout, tier), op in kept.items():
            if not has_owner(layout) or self._own_share(layout):
                yield replace(self._saved((name, layout), op), tier=tier)
        yield from self._recomputed(kept if self.selected is not None else ())

    def _saved_memory(self) -> dict[_Kept, Op]:
        """Saved tensor -> the first op that needs it in backward; a tensor saved in slices appears as its slice."""
        if self.selected is not None:
            named = self.selected.kept.items()
            users = {at: [self.graph.by_name[name] for name in names] for at, names in named}
        else:
            users = self._kept(self.again)
        found: dict[_Kept, Op] = {}
        for at, ops in users.items():
            for op in ops:
                own = self.slices.get((at, self._block(op.name)))  # type: ignore[arg-type]
                whole: _Kept = (*at, "device")
                found.setdefault(whole if own is None else (own.tensor, own.slice_layout, own.tier), op)
        return found

    def _gathered(self) -> Iterator[MemoryItem]:
        for name in self.graph.parameters.values():
            for target, user in self.flow.targets.get(name, {}).items():
                source, block = self.flow.place(name), self._block(user)
                yield from self.nodes.gathered(name, source, target, user, block)

    def _saved(self, at: _Memory, op: Op) -> MemoryItem:
        name, layout = at
        region, count = self.nodes.place(op.name, op.module)
        if has_owner(layout):
            count = count * self._own_share(layout)
        held = count * self.sizes.bytes(self.graph.tensors[name], layout)
        return MemoryItem(words_of(op), "saved activations", region, held, op.name)

    def _own_share(self, layout: Layout) -> Quantity:
        """Fraction of a tensor with an owner, 0 or 1, that the rank has whose memory is priced."""
        return owned_share(layout, self.nodes.position, self.sizes)

    def _kept(self, again: Collection[str]) -> dict[_Memory, list[Op]]:
        """Saved memory -> the ops that need it in backward, if the ops in `again` are recomputed."""
        stored = {*self._parameters, *self.graph.buffers.values()}
        found: dict[_Memory, list[Op]] = {}
        for op in self.graph.ops:
            names: Collection[str] = op.saved if keeps(op, self.graph.tensors) else ()
            operands = self.flow.operands[op.name]
            if op.name in again:
                names, operands = self._entering(op), self.flow.entering(op, self._labels)
            layouts = (*operands, *self.flow.results[op.name])
            for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
                for at in self._written(name, layout) if name in names else ():
                    if self.flow.saved.root(at[0]) not in stored:
                        found.setdefault(self.flow.saved.memory(*at), []).append(op)
        return found

    def _written(self, name: str, layout: Layout) -> Iterator[_Memory]:
        """A tensor in the layout that is saved; for one that stays in registers, what its chain of ops reads."""
        if name not in self.nodes.inner:
            yield name, self._shards(name, layout) if self.regathers else layout
            return
        op = self.graph.producer[name]
        for at in zip(op.operands, self.flow.operands[op.name], strict=True):
            yield from self._written(*at)

    def _entering(self, op: Op) -> list[str]:
        """Operands of an op that come from outside its block."""
        block = self._block(op.name)
        producers = {name: self.graph.producer.get(name) for name in op.operands}
        return [n for n, m in producers.items() if m is None or self._block(m.name) != block]

    def _recomputed(self, saved: Collection[_Kept]) -> Iterator[MemoryItem]:
        """Holdings of recomputation: recomputed activations, and activations that later blocks have freed by then.

        Memory in `saved` is saved anyway, so it is not recomputed.
        """
        order = list(dict.fromkeys(self._block(op.name) for op in self.graph.ops))
        recomputed = [op for op, _ in self.selected.producers] if self.selected else self.again
        again = {self._block(name) for name in recomputed}
        later = order[1 + max(map(order.index, again)) :] if again else ()
        for at, ops in self._kept(()).items():
            holding, blocks = self._saved(at, ops[0]), [self._block(op.name) for op in ops]
            if blocks[0] in again and (*at, "device") not in saved:
                _, count = self.nodes.place(ops[0].name, ops[0].module)
                yield replace(
                    holding, kind="recomputed", name="recomputed", bytes=holding.bytes / count, block=blocks[0]
                )
            if blocks[0] in later and len({*blocks}) == 1:
                yield replace(holding, kind="returned", name="returned")
        for each in self.slices.values():
            if each.block not in again:  # it is gathered while the block runs backward
                whole = self._saved(each.memory, self.graph.by_name[each.user])
                holding = self.decomposed.brought_back(each, whole)
                yield replace(holding, kind="recomputed", name="recomputed", block=each.block)

    def boundary_bytes(self) -> Quantity:
        """Bytes of the activations that one repeated layer passes to the next, on one rank."""
        produced, largest = self.flow.produced, 0
        for names in _crossing(self.graph).values():
            held = sum((self.sizes.bytes(self.graph.tensors[n], produced[n]) for n in names), start=0)
            largest = larger(largest, held)
        return largest

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(self.graph.parameters.values())

    def _shards(self, name: str, layout: Layout) -> Layout:
        """The layout of an operand with its gathers undone: split along every axis on which it was produced split."""
        made = self.flow.produced[name]
        return tuple(a if a.kind == "S" and b.kind in ("R", "V") else b for a, b in zip(made, layout, strict=True))


def block_labels(graph: Graph, blocks: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Op name -> label of its block.

    An op outside of blocks has its region (before or after the layers) as label; in a graph without repeated layers,
    its own name.
    """
    regions = regions_of(graph)
    return {op.name: blocks.get(op.name, regions[op.name] if graph.stacks else op.name) for op in graph.ops}


def _crossing(graph: Graph) -> dict[str, dict[str, None]]:
    """Path of a list of layers -> the tensors that its middle layer gets from the layer before."""
    found: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        place = graph.stack_of(op.module)
        for name in op.operands:
            producer = graph.producer.get(name)
            source = graph.stack_of(producer.module) if producer else None
            if place is None or source is None or source[0] != place[0]:
                continue
            if (source[1], place[1]) == (place[0].middle - 1, place[0].middle):
                found.setdefault(place[0].path, {})[name] = None
    return found
